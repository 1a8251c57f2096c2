"""What an overlapped op is measured beside, and the limit that it cannot beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from triton_dist.testing.timing import Samples

Kind = Literal["gemm", "transfer", "peer", "vendor", "own"]
"""``gemm`` and ``transfer``: one of the two parts alone. The others do the whole op: ``peer``,
others' code; ``own`` and ``vendor``, configs of ours that run an algorithm of this package or call
the vendor's libraries."""


@dataclass(frozen=True)
class Candidate:
    """Something to be timed."""

    kind: Kind
    call: Callable[[], torch.Tensor]
    """Queues the work and returns its output."""
    expected: Callable[[], torch.Tensor] | None = None
    """What the output must be for the operands as they are now; ``None``: it cannot be told."""
    config: str = ""
    """As it would be typed, where there is one."""


def overlap_limit(candidates: Mapping[str, Candidate], samples: Mapping[str, Samples]) -> float:
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
