"""Contextual tuning over real processes and gloo."""

from __future__ import annotations

import pytest

from tests.distributed import contextual_ops as ops
from triton_dist.errors import WATCHDOG_EXIT_STATUS, RanksFailed


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    folder = tmp_path / "logs"
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_LOG_DIR", str(folder))
    return folder


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_step_together_and_choose_the_same(spawn_ranks, world_size):
    results = spawn_ranks(world_size, ops.tune_two_kernels)
    for calls, first, second, chosen_first, chosen_second in results:
        assert calls == 6
        assert first[:4] == [16, 16, 32, 32]
        assert second[:6] == [16, 16, 32, 32, 64, 64]
        assert first[4:] == chosen_first * 4
        assert second[6:] == chosen_second * 2
        assert chosen_second == ([16] if world_size == 1 else [32])
        assert (chosen_first, chosen_second) == results[0][3:]


@pytest.mark.parametrize(
    "fails",
    [
        {1: (16,)},
        {1: (32,)},
        {1: (64,)},
        {0: (16,), 1: (32,)},
        {0: (16, 32)},
        {1: (16, 64), 0: (64,)},
    ],
)
def test_a_config_that_fails_on_one_rank_is_left_out_on_all(spawn_ranks, fails):
    results = spawn_ranks(2, ops.tune_with_failures, fails)
    failed = {block for blocks in fails.values() for block in blocks}
    for result, winners, blocks in results:
        assert result == "done"
        assert winners == results[0][1]
        assert not failed & set(winners)
        assert len(blocks) >= len(results[0][2]) - 2


@pytest.mark.parametrize("fails", [{1: (16, 32, 64)}, {0: (16, 32), 1: (64,)}])
def test_all_fail_is_an_error_on_all(spawn_ranks, fails):
    for result, winners, _ in spawn_ranks(2, ops.tune_with_failures, fails):
        assert result.startswith("NoValidConfig")
        assert winners == []


def test_after_all_failed_the_next_call_starts_cleanly(spawn_ranks):
    for first, second, calls in spawn_ranks(2, ops.all_fail_then_none):
        assert first.startswith("NoValidConfig")
        assert (second, calls) == ("done", 4)


def test_kernels_in_another_order_are_an_error_on_all(spawn_ranks):
    for result in spawn_ranks(2, ops.kernels_in_another_order):
        assert result.startswith("RankDisagreement")
        assert "rank 0: " in result
        assert "scale_kernel key (40, " in result
        assert "scale_kernel key (50, " in result


def test_a_kernel_that_one_rank_alone_launches_is_an_error_on_all(spawn_ranks):
    for result in spawn_ranks(2, ops.one_rank_launches_more):
        assert result.startswith("RankDisagreement")
        assert "end of call 0" in result
        assert "launch of tests.contextual.kernels.scale_kernel" in result


def test_another_order_in_a_later_call_is_an_error_on_all(spawn_ranks):
    for result in spawn_ranks(2, ops.one_rank_steps_in_another_order):
        assert result.startswith("RankDisagreement: ranks disagree on the kernels launched")
        assert "key (40, " in result
        assert "key (64, " in result


def test_an_exception_on_one_rank_ends_the_tuning_on_all(spawn_ranks):
    (first, first_again), (second, second_again) = spawn_ranks(2, ops.an_exception_on_one_rank)
    assert first.startswith("RankDisagreement")
    assert "raised KeyError: 'mine'" in first
    assert second == "KeyError: 'mine'"
    assert first_again == second_again == "done"


def test_a_rank_that_does_not_come_is_an_error_within_the_limit(spawn_ranks):
    env = {"TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT": "0.5"}
    waited, _ = spawn_ranks(2, ops.only_rank_0_calls, env=env, timeout=30)
    assert "Timeout: rank 0: " in waited
    assert "launch of tests.contextual.kernels.scale_kernel" in waited


def test_the_leaders_pruning_counts(spawn_ranks):
    assert spawn_ranks(2, ops.other_pruning_on_one_rank) == [("done", [32, 64])] * 2


def test_other_configs_on_one_rank_are_an_error_on_all(spawn_ranks):
    for result in spawn_ranks(2, ops.other_configs_on_one_rank):
        assert result.startswith("RankDisagreement: ranks disagree on the configs of")


def test_alone_beside_other_ranks(spawn_ranks):
    assert spawn_ranks(2, ops.alone_beside_others) == [(4, 1), (0, 0)]


def test_two_groups_tune_at_once(spawn_ranks):
    assert spawn_ranks(4, ops.two_groups) == [(3, [64]), (3, [64]), (3, [32]), (3, [32])]


def test_a_second_start_calls_once(spawn_ranks, tmp_path):
    shared = [str(tmp_path / "shared")] * 2
    first = spawn_ranks(2, ops.tune_in, shared, (16, 32, 64))
    assert [calls for calls, _ in first] == [6, 6]
    again = spawn_ranks(2, ops.tune_in, shared, (16, 32, 64))
    assert again == [(0, first[0][1])] * 2
    retuned = spawn_ranks(2, ops.tune_in, shared, (16, 32, 64), True)
    assert [calls for calls, _ in retuned] == [6, 6]
    other_space = spawn_ranks(2, ops.tune_in, shared, (16, 32))
    assert [calls for calls, _ in other_space] == [4, 4]


def test_a_record_of_one_rank_is_used_by_all(spawn_ranks, tmp_path):
    shared, empty = str(tmp_path / "shared"), str(tmp_path / "empty")
    first = spawn_ranks(2, ops.tune_in, [shared, shared], (16, 32))
    for folders in ([shared, empty], [empty, shared]):
        assert spawn_ranks(2, ops.tune_in, folders, (16, 32)) == [(0, first[0][1])] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_and_started_again(spawn_ranks, tmp_path, rank):
    """Kernels that were done are known; the tuning of the other goes on where it was."""
    arguments = (6, rank, str(tmp_path / "killed"))
    env = {"TRITON_DIST_AUTOTUNE_TIMEOUT": "2"}
    with pytest.raises(RanksFailed) as failure:
        spawn_ranks(2, ops.killed_in_call, *arguments, env=env, timeout=40)
    assert "SIGKILL" in str(failure.value)
    assert spawn_ranks(2, ops.killed_in_call, *arguments) == [(4, 1)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_config_that_hangs_is_not_tried_again(spawn_ranks, tmp_path, rank):
    """The rank that is stuck is ended; the other gets an error that names config and rank."""
    notes = tmp_path / "notes"
    notes.mkdir()
    limits = ("AUTOTUNE_TIMEOUT", "COMPILE_TIMEOUT", "AUTOTUNE_GRACE")
    env = {f"TRITON_DIST_{limit}": "1.5" for limit in limits}
    with pytest.raises(RanksFailed) as failure:
        spawn_ranks(2, ops.stuck_in, 32, rank, str(notes), env=env, timeout=40)
    assert f"with status {WATCHDOG_EXIT_STATUS} " in failure.value.by_rank[rank].message
    said = (notes / str(1 - rank)).read_text()
    assert said.startswith("TuningTimeout: ")
    assert f"rank {rank} left: TuningTimeout" in said
    assert "'BLOCK': 32" in said
    for calls, winners, blocks in spawn_ranks(2, ops.stuck_in, 32, rank, str(notes)):
        assert (calls, winners[0] in (16, 64)) == (2, True)
        assert blocks == [64, 64, winners[0]]


def test_logs_of_all_ranks(spawn_ranks, logs):
    spawn_ranks(2, ops.tune_two_kernels)
    for rank in (0, 1):
        lines = (logs / f"rank-{rank}.log").read_text().splitlines()
        steps = [line for line in lines if " iter " in line]
        assert len(steps) == 4 + 6
        assert "call 0 tests.contextual.kernels.scale_kernel key (64, " in steps[0]
        assert "BLOCK: 16" in steps[0]
        assert steps[0].endswith("iter 0: warm-up")
        assert steps[2].endswith(" ms")


def test_race_over_ranks(spawn_ranks):
    results = spawn_ranks(2, ops.tune_two_kernels, True)
    assert {result[4][0] for result in results} == {32}


def test_a_kernel_that_waits_for_other_ranks(spawn_ranks):
    """It cannot be timed alone: each call, tuning or not, is a whole AllGather-GEMM."""
    for calls in (2 * (3 + 5), 0):
        results = spawn_ranks(2, ops.tma_autotuned_ag_gemm, timeout=200)
        assert results == [(calls, results[0][1])] * 2
        assert len(results[0][1]) == 1


def test_choices_are_of_the_world_in_which_they_were_agreed(spawn_ranks):
    """Alone each rank has a winner of its own; together they agree, in each world anew."""
    for rank, found in enumerate(spawn_ranks(2, ops.in_other_worlds)):
        own = [64] if rank else [16]
        assert found[0] == (6, own)
        assert found[1:3] == [(6, [32]), (0, [32])]
        assert found[3:5] == [(0, [32]), (0, [32])]  # from the record
        assert found[5] in [(0, [16]), (0, [64])]  # one of those alone: they share a folder


def test_a_librarys_table_does_not_keep_ranks_apart(spawn_ranks):
    """One that only one rank has would let that one go on without the other."""
    results = spawn_ranks(2, ops.a_table_of_its_own)
    assert [(calls, written) for calls, _, written in results] == [(4, 1), (4, 0)]
    assert [blocks for _, blocks, _ in results] == [[16, 16, 32, 32, 32, 32]] * 2
