"""An op that the harness of overlapped ops can measure in no time: adding one, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from benchmarks.overlap.measuring import measure
from benchmarks.overlap.results import shape_tree
from benchmarks.overlap.shapes import Shape
from benchmarks.overlap.workload import TUNED, TUNED_AGAIN
from triton_dist.testing.overlap import Candidate


class AddOne:
    serial, note, tolerance = "serial", "made up", 1e-3

    def __init__(self) -> None:
        self.x = torch.zeros(4, 4)
        self.recovered = 0
        self.seen: list[float] = []

    def refresh(self) -> None:
        self.x += 1

    def recover(self) -> None:
        dist.barrier()
        self.recovered += 1

    def candidates(self) -> Mapping[str, Candidate]:
        def whole(kind, call: Callable[[], torch.Tensor]) -> Candidate:
            return Candidate(kind, call, lambda: self.x + 1)

        return {
            "GEMM alone": Candidate("gemm", lambda: self.x),
            "transfer alone": Candidate("transfer", lambda: self.x),
            "serial": whole("peer", lambda: self.x + 1),
            TUNED: whole("vendor", lambda: self.x + 1),
            "own 1": whole("own", lambda: self.x + 1),
            "unwritten": whole("own", lambda: torch.empty(4, 4)),
            "stale": whole("own", self._stale),
            "another shape": whole("own", lambda: torch.ones(3)),
            "wrong on rank 1": whole("own", lambda: self.x + 1 + 0.5 * dist.get_rank()),
            "raises on rank 1": whole("own", self._raise_on_rank_1),
            TUNED_AGAIN: whole("vendor", lambda: self.x + 1),
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
