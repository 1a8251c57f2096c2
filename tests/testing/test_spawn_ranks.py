"""Ranks that other tests use: results, every kind of failure, pools, and nothing left behind."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton.runtime.interpreter

from triton_dist._traceback import format_exception
from triton_dist.errors import InvalidArgument, NoValidConfig
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import RankFailure, RanksFailed, assert_allclose, rank_pool, spawn_ranks
from triton_dist.testing.rank_pool import RankPool
from triton_dist.tune import autotune


def shared_memory_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def assert_no_new_shared_memory(before: set[str]) -> None:
    """None of the new files stays; tests that run beside this one have some for a moment."""
    new, limit = shared_memory_files() - before, time.monotonic() + 5
    while new & shared_memory_files():
        assert time.monotonic() < limit, f"left in /dev/shm: {new & shared_memory_files()}"
        time.sleep(0.05)


def sum_of_ranks(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = tensor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return os.getpid(), total


def settings(names: tuple[str, ...]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def kind_of_kernel() -> str:
    import triton

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel() -> None:
        pass

    return type(kernel).__name__


def rewritten_kernels() -> int:
    """Kernels of ours that a rank need not rewrite for the interpreter, as it starts."""
    from triton.runtime.interpreter import InterpretedFunction

    assert {"torch._dynamo", "triton_dist.layers.nvidia"} <= sys.modules.keys()
    modules = [fn.__module__ for fn in InterpretedFunction.rewritten_fn]
    return sum(name.startswith("triton_dist.kernels.") for name in modules)


def process_group_from_environment() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return dist.get_world_size()


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count)


def unwritten_is_nan() -> bool:
    return bool(torch.empty(64).isnan().all())


def fail_on_rank_1(how: str) -> str:
    if dist.get_rank() == 1:
        if how == "raise":
            try:
                raise ValueError("a message of rank 1")
            finally:
                group_for().barrier("clean-up", 0.1)
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "hang":
            wait_for_ever()
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "local":
            return lambda: None  # type: ignore[return-value]  # cannot be pickled
    return "fine"


def wait_for_ever() -> None:
    while True:
        time.sleep(0.01)


def raise_or_wait() -> None:
    if dist.get_rank() == 0:
        raise KeyError("the cause")
    wait_for_ever()


def failures(fn: Any, *args: Any, **kwargs: Any) -> dict[int, RankFailure]:
    before = shared_memory_files()
    with pytest.raises(RanksFailed) as failed:
        spawn_ranks(2, fn, *args, **kwargs)
    assert_no_new_shared_memory(before)
    for rank, failure in failed.value.by_rank.items():
        assert f"rank {rank}: {failure.exception}: {failure.message}" in str(failed.value)
    return failed.value.by_rank


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_are_ordered_by_rank_and_ranks_are_processes(world_size: int) -> None:
    results = spawn_ranks(world_size, sum_of_ranks, torch.tensor([1.0, 10.0]))
    total = world_size * (world_size + 1) / 2
    assert len({os.getpid(), *(pid for pid, _ in results)}) == world_size + 1
    for _, tensor in results:
        assert torch.equal(tensor, torch.tensor([total, 10 * total]))


def test_environment_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_PARENT", "inherited")
    monkeypatch.setenv("OF_BOTH", "parent")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    names += ("OF_THE_PARENT", "OF_BOTH", "OF_THE_CALL")
    env = {"OF_BOTH": "call", "OF_THE_CALL": "1"}
    results = spawn_ranks(2, settings, names, env=env, init=False)
    assert [list(result.values()) for result in results] == [
        [str(rank), str(rank), "2", "2", "inherited", "call", "1"] for rank in range(2)
    ]
    assert "OF_THE_CALL" not in os.environ
    assert "MASTER_PORT" not in os.environ


def test_kernels_of_a_cpu_rank_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert spawn_ranks(1, kind_of_kernel, init=False) == ["InterpretedFunction"]


def test_ranks_that_interpret_start_with_layers_and_rewritten_kernels() -> None:
    first, second = spawn_ranks(2, rewritten_kernels, init=False)
    assert first == second > 20


@pytest.mark.stress
def test_a_setting_that_torch_reads_at_import_gets_a_fresh_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook = types.ModuleType("__main__")
    notebook.__file__ = triton.runtime.interpreter.__file__  # Triton adds it to a notebook's module
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    value = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    assert spawn_ranks(1, settings, tuple(value), env=value, init=False) == [value]


def test_the_process_group_can_be_left_to_the_function() -> None:
    assert spawn_ranks(2, process_group_from_environment, init=False) == [2, 2]


def test_a_result_larger_than_a_pipe_leaves_no_shared_memory() -> None:
    before = shared_memory_files()
    (result,) = spawn_ranks(1, numbers, 1_000_000, init=False)
    assert torch.equal(result, torch.arange(1_000_000))
    assert_no_new_shared_memory(before)


def test_unwritten_buffers_of_a_rank_are_nan() -> None:
    assert spawn_ranks(1, unwritten_is_nan, init=False) == [True]
    assert spawn_ranks(1, unwritten_is_nan, init=False, poison_empty=False) == [False]


def test_a_rank_that_raises() -> None:
    by_rank = failures(fail_on_rank_1, "raise")
    assert list(by_rank) == [1]
    assert by_rank[1].exception == "ValueError"
    assert by_rank[1].message.startswith("a message of rank 1; then RankTimeout: rank 1: clean-up")
    assert 'raise ValueError("a message of rank 1")' in by_rank[1].traceback
    assert "_wait" not in by_rank[1].traceback, "frames of the package are folded"
    assert (
        by_rank[1].traceback.count(
            "of triton_dist or Triton: TRITON_DIST_TRACEBACK=full shows all]"
        )
        == 2
    )


def test_frames_of_the_package_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x)
    def fail(x: int, n: int) -> None:
        raise NameError("mine")

    with pytest.raises(NoValidConfig) as purposeful:
        fail(1)
    with pytest.raises(NameError) as users:
        fail(1, autotune=False)
    with pytest.raises(AttributeError) as defect:
        assert_allclose(1, 2)
    folded = "frames of triton_dist or Triton: TRITON_DIST_TRACEBACK=full shows all]\n"
    text = format_exception(purposeful.value)
    assert text.endswith(f"{folded}{text.rpartition(folded)[2]}")
    assert text.rpartition(folded)[2].startswith("triton_dist.errors.NoValidConfig: ")
    assert 'raise NameError("mine")' in format_exception(users.value)
    assert "/triton_dist/" not in format_exception(users.value)
    assert format_exception(defect.value).count("/triton_dist/") == 1, "the innermost is shown"
    monkeypatch.setenv("TRITON_DIST_TRACEBACK", "full")
    for error in (purposeful.value, users.value, defect.value):
        assert format_exception(error) == "".join(traceback.format_exception(error))


def test_the_cause_is_said_first_and_equal_failures_once() -> None:
    late = RankFailure("RankTimeout", "rank {}: barrier: rank(s) 1 did not arrive", "lines")
    by_rank = {
        rank: dataclasses.replace(late, message=late.message.format(rank)) for rank in (2, 0, 3)
    }
    by_rank[1] = RankFailure("ValueError", "mine\nlonger", "its lines")
    failed = RanksFailed("work", 4, by_rank)
    assert str(failed) == (
        "work: 4 of 4 ranks failed. rank 1: ValueError: mine\n"
        "--- rank 1: ValueError: mine\nlonger\nits lines\n"
        "--- ranks 2, 0, 3: RankTimeout: rank 2: barrier: rank(s) 1 did not arrive\nlines"
    )
    assert list(failed.by_rank) == [2, 0, 3, 1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "exited with status 3 before it reported"),
        ("kill", "was killed by signal 9 (SIGKILL) before it reported"),
        ("segfault", "was killed by signal 11 (SIGSEGV) before it reported"),
    ],
)
def test_a_rank_that_dies(how: str, message: str) -> None:
    by_rank = failures(fail_on_rank_1, how)
    assert list(by_rank) == [1]
    assert (by_rank[1].exception, by_rank[1].message) == ("Died", message)
    if how == "segfault":
        assert "in fail_on_rank_1" in by_rank[1].traceback


def test_a_rank_whose_result_cannot_be_pickled() -> None:
    assert "lambda" in failures(fail_on_rank_1, "local")[1].message


def test_a_rank_that_hangs_is_killed_and_its_stack_shown() -> None:
    begin = time.monotonic()
    by_rank = failures(fail_on_rank_1, "hang", timeout=3.0)
    assert time.monotonic() - begin < 30
    assert list(by_rank) == [1]
    assert (by_rank[1].exception, by_rank[1].message) == ("TimedOut", "still running after 3 s")
    assert "in wait_for_ever" in by_rank[1].traceback


def test_of_a_rank_that_answers_no_signal_the_kernel_is_asked() -> None:
    by_rank = failures(fail_on_rank_1, "stop", timeout=3.0)
    assert "state T, in " in by_rank[1].traceback


def test_ranks_left_waiting_by_a_failed_one_end_after_the_grace() -> None:
    begin = time.monotonic()
    by_rank = failures(raise_or_wait, timeout=60.0, grace=0.5)
    assert time.monotonic() - begin < 20
    assert list(by_rank) == [0, 1], "the cause comes first"
    assert by_rank[0].exception == "KeyError"
    assert by_rank[1].message == "still running 0.5 s after rank 0 failed"


def write_pid_and_wait(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    wait_for_ever()


def run_ranks_for_ever(folder: str) -> None:
    """Ranks that compile start without the kernels that ranks interpret."""
    env = {"TRITON_INTERPRET": "0"}
    spawn_ranks(2, write_pid_and_wait, folder, timeout=100.0, env=env, init=False)


def kill_a_parent(folder: str) -> bool:
    """Kill a process that waits for two ranks; whether these ranks then end."""
    parent = multiprocessing.get_context("forkserver").Process(
        target=run_ranks_for_ever, args=(folder,)
    )
    parent.start()
    files = [Path(folder, str(rank)) for rank in range(2)]
    limit = time.monotonic() + 120
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < limit, "the ranks did not start"
        time.sleep(0.05)
    parent.kill()
    parent.join()
    limit = time.monotonic() + 10
    while any(Path("/proc", file.read_text()).exists() for file in files):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    assert kill_a_parent(str(tmp_path))


def test_bad_arguments() -> None:
    for number in (0, "2", 1.5):
        with pytest.raises(InvalidArgument, match=f"world_size is {number!r}, expected an int, 1"):
            spawn_ranks(number, numbers, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="device is 'tpu'"):
        spawn_ranks(1, numbers, 1, device="tpu")
    with pytest.raises(InvalidArgument, match="top of a module"):
        spawn_ranks(1, lambda: None)
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def work(): pass", "<ipython-input-1>", "exec"), cell)
    with pytest.raises(
        InvalidArgument, match=r"cannot import functions of a notebook .*%%writefile"
    ):
        spawn_ranks(1, cell["work"])


_calls = 0


def count_calls(name: str) -> tuple[int, int, str | None, float]:
    """Process, number of the call in it, a variable, and the sum of the ranks."""
    global _calls
    _calls += 1
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return os.getpid(), _calls, os.environ.get(name), total.item()


def end_on_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("a message of rank 1")
        os.kill(os.getpid(), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def pool():
    with RankPool(2) as pool:
        yield pool


def test_ranks_stay_and_see_the_environment_of_each_call(pool, monkeypatch):
    monkeypatch.setenv("OF_A_CALL", "first")
    first = pool.run(count_calls, "OF_A_CALL")
    monkeypatch.setenv("OF_A_CALL", "second")
    second = pool.run(count_calls, "OF_A_CALL")
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]
    assert [rest for _, *rest in first] == [[1, "first", 1.0]] * 2
    assert [rest for _, *rest in second] == [[2, "second", 1.0]] * 2
    pool.close()
    pool.close()
    assert not any(is_alive(pid) for pid, *_ in first)


@pytest.mark.parametrize(("how", "kind"), [("raise", "ValueError"), ("kill", "Died")])
def test_after_a_failure_there_are_new_ranks(pool, how, kind):
    before = pool.run(count_calls, "NONE")
    with pytest.raises(RanksFailed) as failed:
        pool.run(end_on_rank_1, how, timeout=3, grace=1)
    assert failed.value.by_rank[1].exception == kind
    assert not any(is_alive(pid) for pid, *_ in before)
    assert [number for _, number, *_ in pool.run(count_calls, "NONE")] == [1, 1]


def test_a_rank_that_died_between_two_calls_is_a_failure(pool):
    (_, first), (pid, _) = ((entry[0], entry[1]) for entry in pool.run(count_calls, "NONE"))
    assert first == 1
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(RanksFailed, match="SIGKILL"):
        pool.run(count_calls, "NONE", timeout=5, grace=0.5)


def test_a_rank_that_cannot_be_killed_is_not_waited_for(monkeypatch):
    pool = RankPool(1, init=False)
    (pid,) = pool.run(os.getpid)
    (rank,) = pool._ranks
    monkeypatch.setattr(rank.process, "kill", lambda: None)
    monkeypatch.setattr(rank_pool, "EXIT_SECONDS", 0.2)
    with pytest.warns(match=f"rank 0, process {pid}, has not exited"):
        pool.close()
    assert rank.process not in multiprocessing.active_children()
    os.kill(pid, signal.SIGKILL)
