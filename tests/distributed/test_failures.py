"""Failures of a rank or of a kernel: the other ranks raise an error instead of hanging."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

import triton_dist
from tests.distributed.gemm_calls import AllGatherGEMM, default_tiles
from triton_dist import tune
from triton_dist._tuning.values import Failure
from triton_dist.errors import RanksFailed
from triton_dist.kernels.common.slots import epochs
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer, AllGatherMethod
from triton_dist.kernels.nvidia import ag_gemm


@triton_dist.jit(do_not_specialize=["rank", "num_ranks"])
def kernel_finish_without_notifying(epoch_ptr, consumed_ptr, consumed_table, rank, num_ranks):
    tl.store(epoch_ptr, tl.load(epoch_ptr) + (1 << 20))  # the next epoch, of the same rows


def without_notifying_consumption() -> None:
    """Make four calls that do not notify peers, and that all check their peers, as in graphs."""
    finish = AllGatherBuffer.finish
    epochs.kernel_finish_epoch = kernel_finish_without_notifying
    AllGatherBuffer.finish = lambda buffer, _=False: finish(buffer)  # type: ignore[method-assign]
    calls = AllGatherGEMM(max_rows=20, columns=40, K=72)
    for _ in range(4):
        calls(20, method=PUSH, num_chunks=2)
    calls.check()


def shared_memory_mappings() -> list[str]:
    """Lines of this process's mappings that lie in /dev/shm."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]


def end_before_call(how: str, ending_rank: int) -> float | None:
    """One rank ends after a good call; seconds that the others' next call took to give up."""
    calls = AllGatherGEMM(max_rows=20, columns=40, K=72)
    calls(20)
    calls.check()
    names = os.listdir("/dev/shm")
    mappings = shared_memory_mappings()
    assert len(mappings) >= dist.get_world_size()
    assert all(line.endswith("(deleted)") for line in mappings), mappings
    assert not any("triton_dist" in name for name in names), names
    if dist.get_rank() == ending_rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("this rank fails")
    begin = time.monotonic()
    try:
        calls(20)
    finally:
        assert time.monotonic() - begin < 18, "gave up too late"
    return None


def one_rank_leaves_out_a_trial(method: AllGatherMethod, left_out: str) -> list[str]:
    """A tuning of two candidates; rank 1 does not take part in a run of the first. What came of
    each."""
    calls = AllGatherGEMM(max_rows=20, columns=40, K=72)
    runs = itertools.count()

    @tune.autotune(
        config_space=[{"leaves_out": True}, {"leaves_out": False}],
        key_fn=lambda *_, **__: "one",
        recover_fn=lambda A, B, ctx, **_: ctx.reset(),
    )
    def op(
        A: torch.Tensor,
        B: torch.Tensor,
        ctx: Any,
        leaves_out: bool,
        gathered: torch.Tensor | None = None,
    ) -> torch.Tensor:
        skipped = leaves_out and next(runs) == (0 if left_out == "the first run" else 2)
        if skipped and ctx.rank == 1:
            return A.new_empty(A.shape[0] * ctx.num_ranks, B.shape[1])
        return ag_gemm.fn(A, B, ctx, default_tiles(), method=method, gathered=gathered)

    calls(20, op=op)
    calls(11, op=op)
    calls.check()
    record = op.tune(A=None, B=None, ctx=calls.ctx)
    calls.ctx.finalize()
    return [
        each.outcome.kind if isinstance(each.outcome, Failure) else "measured"
        for each in record.trials
    ]


PUSH, RING, FUSED, _ = AllGatherMethod
LIMITS = {"TRITON_DIST_WAIT_TIMEOUT": "1", "TRITON_DIST_AUTOTUNE_TIMEOUT": "2"}


def failures(spawn_ranks, world_size, function, *args, limits=LIMITS):
    with pytest.raises(RanksFailed) as failed:
        spawn_ranks(world_size, function, *args, env=limits, timeout=60)
    return failed.value.by_rank


def test_an_overdue_flag_is_named(spawn_ranks):
    failed = failures(spawn_ranks, 2, without_notifying_consumption)
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
    failed = failures(spawn_ranks, world_size, end_before_call, how, ending_rank)
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


@pytest.mark.parametrize(
    ("method", "left_out", "world_size"),
    [
        (PUSH, "the first run", 2),
        (RING, "a sample", 2),
        pytest.param(FUSED, "a sample", 2, marks=pytest.mark.stress),
    ],
)
def test_a_rank_that_leaves_out_a_trial_costs_only_that_candidate(
    spawn_ranks, method, left_out, world_size
):
    trials = spawn_ranks(
        world_size, one_rank_leaves_out_a_trial, method, left_out,
        env={"TRITON_DIST_AUTOTUNE_TIMEOUT": "4"}, timeout=60,
    )  # fmt: skip
    assert trials == [["timeout", "measured"]] * world_size
