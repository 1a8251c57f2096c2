"""Steps of a transfer between ranks, independent of the device that executes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class InputRows:
    """Rows ``first`` to ``end - 1`` of a tensor that the transfer's ``start`` receives.

    Attributes:
        columns: first column and end; ``None``: full rows of a contiguous tensor.
        tensor: index of the tensor, if ``start`` receives several.
    """

    first: int
    end: int
    columns: tuple[int, int] | None = None
    tensor: int = 0


@dataclass(frozen=True)
class Copy:
    """``destination.copy_(source)``, with equal shape and dtype; contiguous, except for columns."""

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
    """``flags[index] = value``; ``flags`` is int32 [n]."""

    stream: int
    flags: torch.Tensor
    index: int
    value: int


Step: TypeAlias = Copy | AwaitFlag | SetFlag
