"""Limit of an overlapped op, as its two parts alone are measured."""

from __future__ import annotations

from collections.abc import Mapping

from triton_dist.testing.opinfo.base import Baseline
from triton_dist.testing.timing import Samples


def overlap_limit(candidates: Mapping[str, Baseline], samples: Mapping[str, Samples]) -> float:
    """max(GEMM alone, fastest transfer alone), in ms: nothing is faster that does both.

    Args:
        candidates: by name; at least one of kind ``gemm`` and one of kind ``transfer`` among them.
        samples: of the same names.
    """
    fastest = {
        kind: min(samples[name].median for name, each in candidates.items() if each.kind == kind)
        for kind in ("gemm", "transfer")
    }
    return max(fastest.values())
