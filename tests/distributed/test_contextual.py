"""Contextual tuning over real processes and gloo."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.contextual.kernels import (
    Spy,
    TableTuner,
    autotuned,
    configs,
    scale,
    scale_kernel,
    tuned_by,
)
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import WATCHDOG_EXIT_STATUS, RanksFailed
from triton_dist.kernels.common.libraries import all_gather_matmul
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer
from triton_dist.testing.tma_autotuned_ag_gemm import TmaAutotunedAgGemm, all_tile_configs

X = torch.arange(64.0)


class Slow(Spy):
    """Launches with some blocks take some milliseconds longer."""

    def __init__(self, tuner: Any, delays: dict[int, float], *fails: int) -> None:
        super().__init__(tuner, *fails)
        self.delays = delays

    def run(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.delays.get(kwargs["BLOCK"], 0.0) / 1e3)
        return super().run(*args, **kwargs)


def outcome(call: Any) -> str:
    """What came of a call, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def chosen(kernel: Any) -> list[int]:
    return [config.kwargs["BLOCK"] for config in kernel.cache.values()]


def tune_two_kernels(race: bool = False) -> tuple[Any, ...]:
    """Calls, launches of each kernel, winners."""
    rank = dist.get_rank()
    first, second = (
        autotuned(scale_kernel, configs(*blocks)) for blocks in ((16, 32), (16, 32, 64))
    )
    # Rank 0 alone would choose 16, rank 1 alone 64: on the slowest rank, 32 is the fastest.
    # By far, since a rank may wait for a core as long as a launch takes.
    delays = {16: 240.0, 32: 60.0} if rank else {32: 60.0, 64: 240.0}
    spies = Spy(first), Slow(second, delays)

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1, race=race)
    def function(x: torch.Tensor) -> torch.Tensor:
        return scale(second, scale(first, x))

    assert torch.equal(function(X), 4 * X)
    calls = function.num_tuning_calls
    assert torch.equal(function(X), 4 * X)
    assert function.num_tuning_calls == calls
    return calls, spies[0].blocks, spies[1].blocks, chosen(first), chosen(second)


def tune_with_failures(fails: dict[int, tuple[int, ...]]) -> tuple[str, list[int], list[int]]:
    """Outcome, winners, launches; some blocks fail on some ranks."""
    kernel = autotuned(scale_kernel, configs(16, 32, 64))
    spy = Spy(kernel, *fails.get(dist.get_rank(), ()))
    function = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1)(lambda: scale(kernel, X))
    result = outcome(function)
    if result == "done":
        assert torch.equal(function(), 2 * X)
    return result, chosen(kernel), spy.blocks


def all_fail_then_none() -> tuple[str, str, int]:
    """The second tuning starts cleanly."""
    kernel = autotuned(scale_kernel, configs(16, 32))
    spy = Spy(kernel, 16, 32) if dist.get_rank() == 1 else Spy(kernel)
    function = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1)(lambda: scale(kernel, X))
    first = outcome(function)
    spy.fails = ()
    return first, outcome(function), function.num_tuning_calls


def kernels_in_another_order() -> str:
    kernels = [autotuned(scale_kernel, configs(16, 32)), autotuned(scale_kernel, configs(16, 32))]
    shapes = [X[:40], X[:50]]
    if dist.get_rank() == 1:
        shapes.reverse()

    @contextual_autotune(is_dist=True)
    def function() -> None:
        for kernel, x in zip(kernels, shapes, strict=True):
            scale(kernel, x)

    return outcome(function)


def one_rank_launches_more() -> str:
    kernels = [autotuned(scale_kernel, configs(16, 32)), autotuned(scale_kernel, configs(16, 32))]

    @contextual_autotune(is_dist=True)
    def function() -> None:
        for kernel in kernels[: 1 + dist.get_rank()]:
            scale(kernel, X)

    return outcome(function)


def one_rank_steps_in_another_order() -> str:
    """Both open the same kernels in the same order; in the second call they launch otherwise."""
    kernels = [autotuned(scale_kernel, configs(16, 32), key=["n"]) for _ in range(2)]
    calls: list[int] = []

    @contextual_autotune(is_dist=True)
    def function() -> None:
        calls.append(1)
        turned = len(calls) == 2 and dist.get_rank() == 1
        for kernel, x in list(zip(kernels, (X[:40], X), strict=True))[:: -1 if turned else 1]:
            scale(kernel, x)

    return outcome(function)


def an_exception_on_one_rank() -> tuple[str, str]:
    kernel = autotuned(scale_kernel, configs(16, 32))
    calls: list[int] = []

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1)
    def function() -> torch.Tensor:
        calls.append(1)
        y = scale(kernel, X)
        if len(calls) == 2 and dist.get_rank() == 1:
            raise KeyError("mine")
        return y

    return outcome(function), outcome(function)


def only_rank_0_calls() -> str:
    kernel = autotuned(scale_kernel, configs(16, 32))
    function = contextual_autotune(is_dist=True)(lambda: scale(kernel, X))
    return outcome(function) if dist.get_rank() == 0 else "elsewhere"


def keep_more_on_rank_1(all_: list[Any], *_: Any, **__: Any) -> list[Any]:
    return all_[-2 - dist.get_rank() :]


def other_pruning_on_one_rank() -> tuple[str, list[int]]:
    kernel = autotuned(
        scale_kernel,
        configs(16, 32, 64),
        prune_configs_by={"early_config_prune": keep_more_on_rank_1},
    )
    spy = Spy(kernel)
    function = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)(lambda: scale(kernel, X))
    return outcome(function), spy.blocks[:2]


def other_configs_on_one_rank() -> str:
    kernel = autotuned(scale_kernel, configs(16, 32 << dist.get_rank()))
    return outcome(contextual_autotune(is_dist=True)(lambda: scale(kernel, X)))


def alone_beside_others() -> tuple[int, int]:
    """Only rank 0 calls, and tunes alone; the other rank waits for nobody."""
    kernel = autotuned(scale_kernel, configs(16, 32))
    function = contextual_autotune(n_repeat=1, n_warmup=1)(lambda: scale(kernel, X))
    if dist.get_rank() == 0:
        function()
    return function.num_tuning_calls, len(kernel.cache)


def two_groups() -> tuple[int, list[int]]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2
    group = pairs[pair]
    # A pair that comes late would find the record of the other.
    os.environ["TRITON_DIST_CACHE_DIR"] = str(Path(os.environ["TRITON_DIST_CACHE_DIR"], str(pair)))
    kernel = autotuned(scale_kernel, configs(16, 32, 64))
    delays = {16: 200.0, 64 if pair else 32: 200.0}
    Slow(kernel, delays)
    function = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0, group=group)(
        lambda: scale(kernel, X)
    )
    function()
    return function.num_tuning_calls, chosen(kernel)


def tune_in(folders: list[str], blocks: tuple[int, ...], always: bool = False) -> tuple[int, Any]:
    """Extra calls and winners, with a cache folder for each rank."""
    os.environ["TRITON_DIST_CACHE_DIR"] = folders[dist.get_rank()]
    os.environ["TRITON_DIST_AUTOTUNE_ALWAYS_TUNE"] = str(int(always))
    kernels = [autotuned(scale_kernel, configs(*blocks)) for _ in range(2)]

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1)
    def function() -> torch.Tensor:
        return scale(kernels[0], X)[:40] + scale(kernels[1], X[:40])

    assert torch.equal(function(), 4 * X[:40])
    return function.num_tuning_calls, [chosen(kernel) for kernel in kernels]


def killed_in_call(number: int, rank: int, marker: str) -> tuple[int, int]:
    """The first start is killed in that call; the kernel with two configs is done by then."""
    kernel, long = (
        autotuned(scale_kernel, configs(16, 32)),
        autotuned(scale_kernel, configs(16, 32, 64, 128)),
    )
    calls: list[int] = []

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1)
    def function() -> torch.Tensor:
        calls.append(1)
        if len(calls) == number and dist.get_rank() == rank and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return scale(long, X)[:48] + scale(kernel, X[:48])

    spy = Spy(kernel)
    function()
    return function.num_tuning_calls, len(set(spy.blocks))


def stuck_in(block: int, rank: int, notes: str) -> tuple[int, list[int], list[int]]:
    """The first start hangs in a launch on one rank. Extra calls, winners, launches."""
    kernel = autotuned(scale_kernel, configs(16, 32, 64))
    delays = {block: 3600e3} if dist.get_rank() == rank and not os.listdir(notes) else {}
    spy = Slow(kernel, delays)
    function = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1)(lambda: scale(kernel, X))
    try:
        function()
    except Exception as error:
        Path(notes, str(dist.get_rank())).write_text(f"{type(error).__name__}: {error}")
        raise
    return function.num_tuning_calls, chosen(kernel), spy.blocks


def tma_autotuned_ag_gemm() -> tuple[int, list[str]]:
    """The consumer of an AllGather-GEMM, tuned inside the op; rank-dependent data, odd rows."""
    world_size, rows, N, K = dist.get_world_size(), 19, 64, 32
    buffer = AllGatherBuffer(rows * world_size, K, torch.float16, None, "test_tma_autotuned")
    op = TmaAutotunedAgGemm(buffer, all_tile_configs()[:2])
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        A = torch.randn(rows, K, dtype=torch.float16)
        B = torch.randn(N, K, dtype=torch.float16).T
        torch.testing.assert_close(op(A, B), all_gather_matmul(A, B), rtol=1e-2, atol=1e-2)
    dist.barrier()
    buffer.free()
    return op.num_tuning_calls, [str(config) for config in op.choices().values()]


def in_other_worlds() -> list[Any]:
    """Calls and choice alone, in the world, in the next one, and in it with one fresh rank.

    Rank r alone would choose the config after r; in the world the slowest rank counts.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # The store of the ranks' parent: it outlives every process group made here.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False)
    dist.destroy_process_group()
    kernel = autotuned(scale_kernel, configs(16, 32, 64))
    Slow(kernel, {16: 240.0, 32: 60.0} if rank else {32: 60.0, 64: 240.0})
    function = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1)(lambda: scale(kernel, X))
    found: list[Any] = []

    def call(clear: bool = False) -> None:
        if clear:
            function.clear()
        before = function.num_tuning_calls
        assert torch.equal(function(), 2 * X)
        found.append((function.num_tuning_calls - before, chosen(kernel)))

    call()
    for number in range(2):
        prefixed = dist.PrefixStore(f"world {number}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size)
        call(clear=number == 1 and rank == 1)  # stands for a rank that was started again
        call()
        dist.barrier()
        dist.destroy_process_group()
    call()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=size
    )
    dist.barrier()  # a rank that ends at once is gone before the other has connected
    return found


def a_table_of_its_own() -> tuple[int, list[int], int]:
    """Calls, launches and what was written to the table; on rank 0 the table has a winner."""
    kernel = tuned_by(TableTuner, scale_kernel, configs(16, 32))
    if dist.get_rank() == 0:
        kernel.cache["n is 64"] = kernel.configs[0]
    spy = Slow(kernel, {16: 100.0})
    function = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1)(lambda: scale(kernel, X))
    for _ in range(2):
        assert torch.equal(function(), 2 * X)
    return function.num_tuning_calls, spy.blocks, len(kernel.cache.written)


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    folder = tmp_path / "logs"
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_LOG_DIR", str(folder))
    return folder


def test_ranks_step_together_choose_the_same_and_log_each_step(spawn_ranks, logs):
    results = spawn_ranks(3, tune_two_kernels)
    for calls, first, second, chosen_first, chosen_second in results:
        assert calls == 6
        assert first[:4] == [16, 16, 32, 32]
        assert second[:6] == [16, 16, 32, 32, 64, 64]
        assert first[4:] == chosen_first * 4
        assert second[6:] == chosen_second * 2
        assert chosen_second == [32]
        assert (chosen_first, chosen_second) == results[0][3:]
    for rank in range(3):
        lines = (logs / f"rank-{rank}.log").read_text().splitlines()
        steps = [line for line in lines if " iter " in line]
        assert len(steps) == 4 + 6
        assert "call 0 tests.contextual.kernels.scale_kernel key (64, " in steps[0]
        assert "BLOCK: 16" in steps[0]
        assert steps[0].endswith("iter 0: warm-up")
        assert steps[2].endswith(" ms")


@pytest.mark.parametrize("fails", [{1: (16,)}, {0: (32,), 1: (16,)}, {1: (16, 64), 0: (64,)}])
def test_a_config_that_fails_on_one_rank_is_left_out_on_all(on_two, fails):
    results = on_two(tune_with_failures, fails)
    failed = {block for blocks in fails.values() for block in blocks}
    for result, winners, blocks in results:
        assert result == "done"
        assert winners == results[0][1]
        assert not failed & set(winners)
        assert len(blocks) >= len(results[0][2]) - 2


def test_all_fail_is_an_error_on_all(on_two):
    for result, winners, _ in on_two(tune_with_failures, {0: (16, 32), 1: (64,)}):
        assert result.startswith("NoValidConfig")
        assert winners == []


def test_after_all_failed_the_next_call_starts_cleanly(on_two):
    for first, second, calls in on_two(all_fail_then_none):
        assert first.startswith("NoValidConfig")
        assert (second, calls) == ("done", 4)


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (kernels_in_another_order, ("scale_kernel key (40, ", "scale_kernel key (50, ")),
        (one_rank_launches_more, ("end of call 0", "launch of tests.contextual.kernels.scale_")),
        (one_rank_steps_in_another_order, ("on the kernels launched", "key (40, ", "key (64, ")),
        (other_configs_on_one_rank, ("ranks disagree on the configs of",)),
    ],
)
def test_what_differs_between_ranks_is_an_error_on_all(on_two, run, named):
    for result in on_two(run):
        assert result.startswith("RankDisagreement: ")
        assert all(each in result for each in named)


def test_an_exception_on_one_rank_ends_the_tuning_on_all(on_two):
    (first, first_again), (second, second_again) = on_two(an_exception_on_one_rank)
    assert first.startswith("RankDisagreement")
    assert "raised KeyError: 'mine'" in first
    assert second == "KeyError: 'mine'"
    assert first_again == second_again == "done"


def test_a_rank_that_does_not_come_is_an_error_within_the_limit(spawn_ranks):
    env = {"TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT": "0.5"}
    waited, _ = spawn_ranks(2, only_rank_0_calls, env=env, timeout=30)
    assert "Timeout: rank 0: " in waited
    assert "launch of tests.contextual.kernels.scale_kernel" in waited


def test_the_leaders_pruning_counts(on_two):
    assert on_two(other_pruning_on_one_rank) == [("done", [32, 64])] * 2


def test_alone_beside_other_ranks(on_two):
    assert on_two(alone_beside_others) == [(4, 1), (0, 0)]


def test_two_groups_tune_at_once(spawn_ranks):
    assert spawn_ranks(4, two_groups) == [(3, [64]), (3, [64]), (3, [32]), (3, [32])]


def test_a_second_start_calls_once(on_two, tmp_path):
    shared = [str(tmp_path / "shared")] * 2
    first = on_two(tune_in, shared, (16, 32, 64))
    assert [calls for calls, _ in first] == [6, 6]
    again = on_two(tune_in, shared, (16, 32, 64))
    assert again == [(0, first[0][1])] * 2
    retuned = on_two(tune_in, shared, (16, 32, 64), True)
    assert [calls for calls, _ in retuned] == [6, 6]
    other_space = on_two(tune_in, shared, (16, 32))
    assert [calls for calls, _ in other_space] == [4, 4]


def test_a_record_of_one_rank_is_used_by_all(on_two, tmp_path):
    shared, empty = str(tmp_path / "shared"), str(tmp_path / "empty")
    first = on_two(tune_in, [shared, shared], (16, 32))
    for folders in ([shared, empty], [empty, shared]):
        assert on_two(tune_in, folders, (16, 32)) == [(0, first[0][1])] * 2


def test_killed_and_started_again(spawn_ranks, tmp_path):
    """Kernels that were done are known; the tuning of the other goes on where it was."""
    arguments = (6, 0, str(tmp_path / "killed"))
    env = {"TRITON_DIST_AUTOTUNE_TIMEOUT": "2"}
    with pytest.raises(RanksFailed) as failure:
        spawn_ranks(2, killed_in_call, *arguments, env=env, timeout=40)
    assert "SIGKILL" in str(failure.value)
    assert spawn_ranks(2, killed_in_call, *arguments) == [(4, 1)] * 2


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.stress), 1])
def test_a_config_that_hangs_is_not_tried_again(spawn_ranks, tmp_path, rank):
    """The rank that is stuck is ended; the other gets an error that names config and rank."""
    notes = tmp_path / "notes"
    notes.mkdir()
    limits = ("AUTOTUNE_TIMEOUT", "COMPILE_TIMEOUT", "AUTOTUNE_GRACE")
    env = {f"TRITON_DIST_{limit}": "1.5" for limit in limits}
    with pytest.raises(RanksFailed) as failure:
        spawn_ranks(2, stuck_in, 32, rank, str(notes), env=env, timeout=40)
    assert f"with status {WATCHDOG_EXIT_STATUS} " in failure.value.by_rank[rank].message
    said = (notes / str(1 - rank)).read_text()
    assert said.startswith("TuningTimeout: ")
    assert f"rank {rank} left: TuningTimeout" in said
    assert "'BLOCK': 32" in said
    for calls, winners, blocks in spawn_ranks(2, stuck_in, 32, rank, str(notes)):
        assert (calls, winners[0] in (16, 64)) == (2, True)
        assert blocks == [64, 64, winners[0]]


def test_race_over_ranks(spawn_ranks):
    results = spawn_ranks(2, tune_two_kernels, True)
    assert {result[4][0] for result in results} == {32}


def test_a_kernel_that_waits_for_other_ranks(spawn_ranks):
    """It cannot be timed alone: each call, tuning or not, is a whole AllGather-GEMM."""
    for calls in (2 * (3 + 5), 0):
        results = spawn_ranks(2, tma_autotuned_ag_gemm, timeout=200)
        assert results == [(calls, results[0][1])] * 2
        assert len(results[0][1]) == 1


def test_choices_are_of_the_world_in_which_they_were_agreed(spawn_ranks):
    """Alone each rank has a winner of its own; together they agree, in each world anew."""
    for rank, found in enumerate(spawn_ranks(2, in_other_worlds)):
        own = [64] if rank else [16]
        assert found[0] == (6, own)
        assert found[1:3] == [(6, [32]), (0, [32])]
        assert found[3:5] == [(0, [32]), (0, [32])]  # from the record
        assert found[5] in [(0, [16]), (0, [64])]  # one of those alone: they share a folder


def test_a_librarys_table_does_not_keep_ranks_apart(on_two):
    """One that only one rank has would let that one go on without the other."""
    results = on_two(a_table_of_its_own)
    assert [(calls, written) for calls, _, written in results] == [(4, 1), (4, 0)]
    assert [blocks for _, blocks, _ in results] == [[16, 16, 32, 32, 32, 32]] * 2
