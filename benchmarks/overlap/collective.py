"""A plain collective in the harness: its winner, the best config of each way, its peers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import (
    all_gather,
    all_reduce,
    create_all_gather_ctx,
    create_allreduce_ctx,
    create_reduce_scatter_ctx,
    reduce_scatter,
)
from triton_dist.runtime.device import current_device
from triton_dist.testing.collective_peers import LIBRARY, TOLERANCE, collective_peers, expected_of
from triton_dist.testing.overlap import Candidate
from triton_dist.utils import rand_tensor

from .workload import TUNED, TUNED_AGAIN

OPS = {
    "all_reduce": (all_reduce, create_allreduce_ctx),
    "reduce_scatter": (reduce_scatter, create_reduce_scatter_ctx),
    "all_gather": (all_gather, create_all_gather_ctx),
}


def method_of(config: Mapping[str, Any]) -> str:
    """``"one_shot"``, ``"collective"``, …"""
    return str(config["way"])


class TunedCollective:
    """``op(x, ctx)`` at one size, tuned when it is made, or its cached config used.

    Args:
        nbytes: of x; of an all-gather of the result.
        best: how many configs of each way to measure, the best by the record.
    """

    serial = LIBRARY

    def __init__(self, name: str, nbytes: int, dtype: torch.dtype, ctx: Any, best: int) -> None:
        self._name, self._op, self._ctx, self._best = name, OPS[name][0], ctx, best
        size = dist.get_world_size()
        elements = max(1, nbytes // dtype.itemsize // size) * size
        if name == "all_gather":
            elements //= size
        self.tolerance = TOLERANCE[dtype]
        self._x = torch.empty(elements, dtype=dtype, device=current_device().torch_device)
        self.refresh()
        before = self._op.tuning_count
        self._record = self._op.tune(self._x, ctx)
        self._winner = self._op.best_config(self._x, ctx)
        tuned_now = self._op.tuning_count > before
        self.note = f"tuned now, {self._record.seconds:.1f} s" if tuned_now else "from the cache"

    def candidates(self) -> Mapping[str, Candidate]:
        winner = self._candidate(self._winner)
        seen: dict[str, int] = {}
        others = {}
        for config in self._ranked():
            method = method_of(config)
            seen[method] = seen.get(method, 0) + 1
            if seen[method] <= self._best:
                others[f"{method} {seen[method]}"] = self._candidate(config)
        return {
            **collective_peers(self._name, self._x),
            TUNED: winner,
            **others,
            TUNED_AGAIN: winner,
        }

    def refresh(self) -> None:
        self._x.copy_(rand_tensor(self._x.shape, self._x.dtype, self._x.device))

    def recover(self) -> None:
        self._ctx.reset()

    def _candidate(self, config: Mapping[str, Any]) -> Candidate:
        op, x, ctx, arguments = self._op, self._x, self._ctx, dict(config)
        return Candidate(
            "vendor" if method_of(config) == "collective" else "own",
            lambda: op.fn(x, ctx, **arguments),
            lambda: expected_of(self._name, x),
            str(config),
        )

    def _ranked(self) -> list[Any]:
        """All measured configs, best first by the record."""
        space = self._op.config_space
        trials = [each for each in self._record.trials if hasattr(each.outcome, "median")]
        trials.sort(key=lambda trial: trial.outcome.median)
        found = (space.find(trial.digest) for trial in trials)
        return [config for config in found if config is not None]


@contextmanager
def open_collective(
    name: str, nbytes: int, dtype: torch.dtype, best: int
) -> Iterator[TunedCollective]:
    rank, size = dist.get_rank(), dist.get_world_size()
    room = max(nbytes, size * dtype.itemsize)
    with OPS[name][1](room, rank, size, size) as ctx:
        yield TunedCollective(name, nbytes, dtype, ctx, best)
