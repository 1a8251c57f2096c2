"""Interface of an op in the harness: one shape, with operands, on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from triton_dist.testing.opinfo.base import Baseline, Cost

TUNED, TUNED_AGAIN = "tuned", "tuned, again"
"""The tuner's winner; and the same once more, which says how much a difference means."""


@dataclass(frozen=True)
class Choice:
    """Number of candidates to measure, in addition to the baselines and the winner."""

    best: int
    """So many of the others, the best by the record."""
    every: bool = False
    """All that are left after pruning, instead."""
    of_each_algorithm: bool = False
    """Number of configs of each algorithm, including the winner."""
    concurrent: bool = False
    """Measure also the GEMM while each transfer runs on another stream. Only for CUDA."""


class Workload(Protocol):
    """One op at one shape. Its operands are random; every method is collective."""

    serial: str
    """Name of the peer that does one part after the other."""
    tolerance: float
    """rtol = atol between an output and what it must be."""
    note: str
    """How the winner was come by."""
    cost: Cost
    """Work of a call for each rank."""

    def candidates(self) -> Mapping[str, Baseline]:
        """Return the candidates by name, in the order in which they run.

        These are the baselines, ``TUNED``, other configs, ``TUNED_AGAIN``.
        """

    def refresh(self) -> None:
        """Give the operands new random values, in place."""

    def recover(self) -> None:
        """Restore a common state of all ranks after a candidate failed on some rank."""
