"""Parts of a transfer between ranks, whatever device queues it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class OwnRows:
    """Rows ``first`` to ``end`` of the tensor that a transfer is started with."""

    first: int
    end: int


@dataclass(frozen=True)
class Copy:
    """``destination.copy_(source)``; both contiguous, same shape and dtype."""

    stream: int
    destination: torch.Tensor
    source: torch.Tensor | OwnRows


@dataclass(frozen=True)
class AwaitFlag:
    """Hold what follows on the stream until ``flags[index] == value``; ``flags`` int32 [n]."""

    stream: int
    flags: torch.Tensor
    index: int
    value: int


@dataclass(frozen=True)
class SetFlag:
    """``flags[index] = value``; ``flags`` int32 [n]."""

    stream: int
    flags: torch.Tensor
    index: int
    value: int


Step: TypeAlias = Copy | AwaitFlag | SetFlag
