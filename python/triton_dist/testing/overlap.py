"""Lower bound of the time of an overlapped op: its GEMM alone or its transfer alone."""

from __future__ import annotations

from collections.abc import Mapping

from triton_dist.testing.opinfo.base import Baseline
from triton_dist.testing.timing import Samples


def overlap_limit_ms(candidates: Mapping[str, Baseline], samples: Mapping[str, Samples]) -> float:
    """Return max(fastest GEMM alone, fastest transfer alone) in ms, by medians.

    Args:
        candidates: baselines by name, with at least one of kind ``gemm`` and one of ``transfer``.
        samples: measurements of the baselines, by name.
    """
    fastest = {
        kind: min(samples[name].median for name, each in candidates.items() if each.kind == kind)
        for kind in ("gemm", "transfer")
    }
    return max(fastest.values())
