"""OpInfos of the Ulysses ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def local_part(x: torch.Tensor, lengths: Sequence[int], rank: int) -> torch.Tensor:
    """Return the tokens of a rank of a tensor [batch, tokens, …] of the whole sequence."""
    before = sum(lengths[:rank])
    return x[:, before : before + lengths[rank]].contiguous()


def shared_heads(x: torch.Tensor, num_ranks: int) -> tuple[torch.Tensor, ...]:
    """Return the heads of each rank of x [batch, tokens, heads, dim]."""
    replicas = max(1, num_ranks // x.shape[2])
    return tuple(each for each in x.chunk(num_ranks // replicas, 2) for _ in range(replicas))
