"""A broken piece is caught, a lost rank ends the others: neither a hang nor a wrong result."""

from __future__ import annotations

import os

import pytest

from tests.distributed import failing_ranks
from triton_dist.errors import RanksFailed
from triton_dist.kernels.common.slots.gathered import AllGatherMethod

PUSH, RING, FUSED, SERIAL = AllGatherMethod
LIMITS = {"TRITON_DIST_WAIT_TIMEOUT": "1", "TRITON_DIST_AUTOTUNE_TIMEOUT": "2"}

WRONG, OVERDUE, RACE = "AssertionError", "WaitTimeout", "DataRace"


def failures(spawn_ranks, world_size, function, *args, limits=LIMITS):
    with pytest.raises(RanksFailed) as failed:
        spawn_ranks(world_size, function, *args, env=limits, timeout=60)
    return failed.value.by_rank


@pytest.mark.parametrize("method", [PUSH, RING, FUSED])
def test_the_unbroken_pieces_pass(spawn_ranks, method):
    counts = spawn_ranks(2, failing_ranks.calls_with, None, method, True)
    assert counts == [4, 4]


@pytest.mark.parametrize(
    ("mutation", "method", "world_size", "persistent", "expected"),
    [
        ("flag before data", PUSH, 2, True, WRONG),
        ("flag before data", RING, 3, True, WRONG),
        ("consumer does not wait", PUSH, 2, True, WRONG),
        ("consumer does not wait", PUSH, 2, False, WRONG),
        ("consumer does not wait", RING, 3, True, WRONG),
        ("consumer does not wait", FUSED, 2, True, WRONG),
        ("epoch stands still", PUSH, 2, True, WRONG),
        ("epoch stands still", FUSED, 2, True, WRONG),
        ("waits for the first shard only", PUSH, 3, True, WRONG),
        ("data without flag", PUSH, 2, True, OVERDUE),
        ("consumption is not told", FUSED, 2, True, OVERDUE),
        ("consumption is not told", FUSED, 2, False, OVERDUE),
    ],
)
def test_a_broken_piece_is_caught(spawn_ranks, mutation, method, world_size, persistent, expected):
    failed = failures(
        spawn_ranks, world_size, failing_ranks.calls_with, mutation, method, persistent,
        limits=LIMITS if expected == OVERDUE else {},  # a slow machine must not pass for overdue
    )  # fmt: skip
    # Where TRITON_DIST_DEBUG looks for races, it may find one before there is a wrong result.
    caught = {WRONG, RACE} if expected == WRONG else {expected}
    assert caught & {failure.exception for failure in failed.values()}


def test_an_overdue_flag_is_named(spawn_ranks):
    failed = failures(
        spawn_ranks, 2, failing_ranks.calls_with, "consumption is not told", PUSH, True
    )
    for rank, failure in failed.items():
        assert failure.message.startswith(f"rank {rank}, program (0, 0, 0): waited 1.0 s for flag")
        # The first slot to be used again is the second one.
        assert f"flag ag_gemm.consumed1[{1 - rank}] to reach 1, it is 0" in failure.message


@pytest.mark.parametrize(
    ("how", "world_size", "ending_rank"),
    [("kill", 3, 0), ("raise", 2, 1)],
)
def test_a_lost_rank_ends_the_others(spawn_ranks, how, world_size, ending_rank):
    before = set(os.listdir("/dev/shm"))
    failed = failures(spawn_ranks, world_size, failing_ranks.end_before_call, how, ending_rank)
    ended = failed.pop(ending_rank)
    assert ended.exception == ("KeyError" if how == "raise" else "Died")
    assert sorted(failed) == [rank for rank in range(world_size) if rank != ending_rank]
    for rank, failure in failed.items():
        assert failure.exception == "WaitTimeout"
        assert failure.message.startswith(f"rank {rank}, program (")
        assert "waited 1.0 s for flag ag_gemm.arrivals0[" in failure.message
        assert "to reach 1, it is 0" in failure.message
    left = {name for name in set(os.listdir("/dev/shm")) - before if "triton_dist" in name}
    assert not left


def test_a_rank_that_calls_alone_ends(spawn_ranks):
    (failure,) = failures(spawn_ranks, 2, failing_ranks.one_rank_calls_alone).values()
    assert failure.exception == "WaitTimeout"
    # The second call has the first slot; rank 1's flags follow the 8 of rank 0.
    assert "flag ag_gemm.arrivals0[8] to reach 1, it is 0" in failure.message


@pytest.mark.parametrize(
    ("method", "left_out", "world_size"),
    [
        (PUSH, "the first run", 2),
        (RING, "a sample", 3),
        (FUSED, "a sample", 2),
        (SERIAL, "a sample", 2),
    ],
)
def test_a_rank_that_leaves_out_a_trial_costs_only_that_candidate(
    spawn_ranks, method, left_out, world_size
):
    trials = spawn_ranks(
        world_size, failing_ranks.one_rank_leaves_out_a_trial, method, left_out,
        env={"TRITON_DIST_AUTOTUNE_TIMEOUT": "4"}, timeout=60,
    )  # fmt: skip
    assert trials == [["timeout", "measured"]] * world_size
