"""Tuned functions at the top of a module, as users write them.

Candidates take their time by ``spend``. Within ``counted``, timers count only that time, so a busy
machine decides no race.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
import triton

from triton_dist.runtime.device import cpu
from triton_dist.tune import autotune, to_hashable

ran: list[tuple[str, int]] = []


def get_config_space():
    return [triton.Config({"BLOCK_SIZE_M": block}, num_warps=4) for block in (128, 64, 32)]


def key_fn(A, B, *args, **kwargs):
    return to_hashable(A), to_hashable(B)


def prune_fn(config, A, B, *args, **kwargs):
    return config["BLOCK_SIZE_M"] <= 128 and config["gemm_config"].num_warps == 4


@autotune([{"gemm_config": c} for c in get_config_space()], key_fn=key_fn, prune_fn=prune_fn)
def matmul(A, B, gemm_config: triton.Config, bias=None):
    """A @ B."""
    ran.append(("matmul", gemm_config.kwargs["BLOCK_SIZE_M"]))
    spend(abs(gemm_config.kwargs["BLOCK_SIZE_M"] - 64) * 3e-5)
    return A @ B if bias is None else A @ B + bias


class Layer:
    def __init__(self, weight):
        self.weight = weight

    @autotune([{"chunks": 2}, {"chunks": 1}], key_fn=lambda self, x: to_hashable(x))
    def forward(self, x, chunks):
        spend(chunks * 1e-3)
        return x * self.weight, chunks


@autotune([{"n": 3}, {"n": 1}, {"n": 2}], key_fn=lambda x, group: x)
def in_group(x, group, n):
    dist.barrier(group)
    spend(n * 8e-3)
    return n


def tune_in_two_groups() -> tuple[int, int]:
    """Two disjoint groups, at the same time, with different keys."""
    pair = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return in_group(pair, groups[pair], autotune_pg=groups[pair]), in_group.num_tunings


_OVERHEAD = 1e-3  # of a run, in milliseconds: none takes no time


class _Spent(threading.local):
    milliseconds: float | None = None


_spent = _Spent()
_counting = False


def spend(seconds: float) -> None:
    """Take ``seconds``: of the counted time where it is counted, else of the wall's."""
    if _counting:
        _spent.milliseconds = _now() + seconds * 1e3
    else:
        time.sleep(seconds)


def _now() -> float:
    return _spent.milliseconds or 0.0


class _SpentTimer:
    def start(self) -> None:
        self._begin = _now()

    def stop(self) -> None:
        self._end = _now()

    def is_done(self) -> bool:
        return True

    def milliseconds(self) -> float:
        return self._end - self._begin + _OVERHEAD


@contextmanager
def counted() -> Iterator[None]:
    """Within: what the calling thread spends is all the time that its runs take."""
    global _counting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "CpuTimer", _SpentTimer)
        _counting = True
        try:
            yield
        finally:
            _counting = False
