"""Layout of tensors [batch, tokens, heads, dim] whose tokens travel between ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from triton_dist.kernels.common.context import Check


def heads_check(name: str, x: torch.Tensor) -> Iterator[Check]:
    """Yield the check that heads are contiguous and all tokens have one distance."""
    batch, tokens, heads, dim = x.shape
    in_row = x.stride(3) == 1 and (heads == 1 or x.stride(2) == dim)
    fits = in_row and (1 in (batch, tokens) or x.stride(0) == tokens * x.stride(1))
    expected = "contiguous heads, with one distance between all tokens"
    yield f"{name}.stride()", x.stride(), fits or x.is_contiguous(), expected


def row_stride(x: torch.Tensor) -> int:
    """Return the elements between two tokens."""
    if x.is_contiguous():  # whose strides of dimensions of size 1 are arbitrary
        return x.shape[2] * x.shape[3]
    return int(x.stride(1) if x.shape[1] > 1 else x.stride(0))


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return [batch * tokens, heads * dim] of a tensor, without gradient."""
    batch, tokens, heads, dim = x.shape
    return x.detach().as_strided((batch * tokens, heads * dim), (row_stride(x), 1))
