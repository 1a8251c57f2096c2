"""Ranks that stay: many calls in one world, new ones after a failure, and none that is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from triton_dist.errors import RanksFailed
from triton_dist.testing import rank_pool
from triton_dist.testing.rank_pool import RankPool

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
