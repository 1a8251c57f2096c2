"""Steps of a transfer between ranks, independent of the device that executes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class InputRows:
    """Rows ``first`` to ``end - 1`` of the tensor that the transfer's ``start`` receives."""

    first: int
    end: int


@dataclass(frozen=True)
class Copy:
    """``destination.copy_(source)``; both contiguous, with equal shape and dtype."""

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
