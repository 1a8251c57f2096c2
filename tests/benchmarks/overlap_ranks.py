"""Ops in the harness of overlapped ops, on every rank: one that is measured in no time, adding one;
and real ones, of which a candidate fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.overlap import measuring
from benchmarks.overlap.measuring import measure
from benchmarks.overlap.results import shape_tree
from benchmarks.overlap.shapes import Shape
from benchmarks.overlap.tuned_op import TunedOp
from benchmarks.overlap.workload import TUNED, TUNED_AGAIN, Choice
from tests.distributed.gemm_calls import default_tiles
from triton_dist.testing.opinfo import GEMM_OPINFOS
from triton_dist.testing.opinfo.base import Baseline, Cost


class AddOne:
    serial, note, tolerance = "serial", "made up", 1e-3
    cost = Cost(torch.float32, 0, 0, 0, 0)

    def __init__(self) -> None:
        self.x = torch.zeros(4, 4)
        self.recovered = 0
        self.seen: list[float] = []

    def refresh(self) -> None:
        self.x += 1

    def recover(self) -> None:
        dist.barrier()
        self.recovered += 1

    def candidates(self) -> Mapping[str, Baseline]:
        def whole(kind, call: Callable[[], torch.Tensor]) -> Baseline:
            return Baseline(kind, call, lambda: self.x + 1)

        return {
            "GEMM alone": Baseline("gemm", lambda: self.x),
            "transfer alone": Baseline("transfer", lambda: self.x),
            "serial": whole("baseline", lambda: self.x + 1),
            TUNED: whole("library", lambda: self.x + 1),
            "own 1": whole("own", lambda: self.x + 1),
            "unwritten": whole("own", lambda: torch.empty(4, 4)),
            "stale": whole("own", self._stale),
            "another shape": whole("own", lambda: torch.ones(3)),
            "wrong on rank 1": whole("own", lambda: self.x + 1 + 0.5 * dist.get_rank()),
            "raises on rank 1": whole("own", self._raise_on_rank_1),
            TUNED_AGAIN: whole("library", lambda: self.x + 1),
        }

    def _stale(self) -> torch.Tensor:
        """Right for the operands of the first call."""
        self.seen.append(float(self.x[0, 0]))
        return torch.full((4, 4), self.seen[0])

    def _raise_on_rank_1(self) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise MemoryError("too large")
        return self.x + 1


def measured() -> tuple[int, dict]:
    """How often ranks had to recover, and what was measured."""
    workload = AddOne()
    rows, failures = measure(workload, ["eager", "graph"], rounds=3, warmup_rounds=1)
    return workload.recovered, shape_tree(Shape(4, 4, 4), workload, rows, failures, 0.5)


IN_ONE_LAUNCH: dict[str, dict[str, Any]] = {
    "ag_gemm": {"algorithm": "serial"},
    "gemm_ar": {"algorithm": "two_shot_in_one_launch"},
    "gemm_rs": {"algorithm": "one_launch"},
}
"""Of each op a way that counts its calls apart from the op's slots: both must be recovered."""


class OneFails(TunedOp):
    """The same call twice; the first time rank 1 does not make it. Nothing is tuned."""

    def candidates(self) -> Mapping[str, Baseline]:
        good = self._candidate(self._winner)
        return {
            "rank 1 fails": Baseline("own", lambda: self._fail_or(good), good.expected),
            TUNED: good,
        }

    def _fail_or(self, good: Baseline) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise MemoryError("too large")
        return good.call()


def recovered(op: str) -> tuple[list[str], dict[str, str]]:
    """Candidates that were right, and why the others were not."""
    case, dtype = GEMM_OPINFOS[op], torch.float16
    shape = case.of_rank(5, 40, 72, dist.get_world_size())
    config = {"gemm_config": default_tiles(), **IN_ONE_LAUNCH[op]}
    record = SimpleNamespace(seconds=0.0, trials=[], warm_started_from="")
    with (
        mock.patch.object(case.op, "tune", return_value=record),
        mock.patch.object(case.op, "best_config", return_value=config),
        mock.patch.object(measuring, "_SECONDS", 2.0),
        case.context(shape, dtype) as ctx,
    ):
        workload = OneFails(case, shape, dtype, ctx, Choice(0))
        rows, failures = measure(workload, ["eager"], rounds=2, warmup_rounds=1)
    return [row.name for row in rows], failures
