"""Interface through which ``measuring.py`` runs an op at one shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from triton_dist.testing.opinfo.base import Baseline, Cost

TUNED, TUNED_AGAIN = "tuned", "tuned, again"
"""Names of the tuner's winner. It is timed twice; the difference of the two times is noise."""
BEST_BASELINE = "best_peer"
"""Key in results: the name of the fastest baseline."""


@dataclass(frozen=True)
class CandidateSelection:
    """What to measure in addition to the baselines and the winner of the tuning."""

    best: int
    """Number of configs that are the fastest in the tuning record after the winner."""
    all_measured: bool = False
    """Measure all configs that were measured in the tuning; ignore ``best``."""
    per_algorithm: bool = False
    """``best`` is a number per algorithm, and the winner counts."""
    concurrent: bool = False
    """Also measure the GEMM while each transfer runs on another stream. Only for CUDA."""


class Workload(Protocol):
    """One op at one shape, with random operands on this rank. Every method is collective."""

    serial: str
    """Name of the baseline that runs the library's GEMM and transfer one after the other."""
    tolerance: float
    """Relative and absolute tolerance of each output."""
    note: str
    """Origin of the winner: a tuning in this run, or a record."""
    cost: Cost
    """Operations and bytes of one rank in a call."""

    def candidates(self) -> Mapping[str, Baseline]:
        """Return the calls to measure by name, in the order in which they run.

        These are the baselines, ``TUNED``, other configs, and ``TUNED_AGAIN``.
        """

    def refresh(self) -> None:
        """Write new random values to the operands, in place."""

    def recover(self) -> None:
        """Reset the op's state on all ranks after a candidate failed on some rank."""
