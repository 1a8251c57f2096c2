"""Steps of a transfer between ranks. ``CpuTransfer`` and ``CudaTransfer`` execute them.

``stream`` is the index of the copy stream that executes the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class InputRows:
    """Rows ``first`` to ``end - 1`` of a tensor that is passed to the transfer's ``start``.

    Attributes:
        columns: first column, and last column + 1; ``None``: full rows of a contiguous tensor.
        tensor: index of the tensor, if several are passed.
    """

    first: int
    end: int
    columns: tuple[int, int] | None = None
    tensor: int = 0


@dataclass(frozen=True)
class Copy:
    """``destination.copy_(source)``, with equal shapes and dtypes. Both are contiguous, unless
    ``source`` selects columns."""

    stream: int
    destination: torch.Tensor
    source: torch.Tensor | InputRows


@dataclass(frozen=True)
class AwaitFlag:
    """Block the stream until ``flags[index] == value``; ``flags`` is int32 [n]."""

    stream: int
    flags: torch.Tensor
    index: int
    value: int


@dataclass(frozen=True)
class SetFlag:
    """Set ``flags[index] = value``; ``flags`` is int32 [n]."""

    stream: int
    flags: torch.Tensor
    index: int
    value: int


Step: TypeAlias = Copy | AwaitFlag | SetFlag
