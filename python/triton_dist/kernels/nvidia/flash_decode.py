"""Decode attention on one rank, under the names of Triton-distributed's scripts.

These functions call ``sp_decode_attn`` without tuning. New programs should call ``sp_decode_attn``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.decode_attention import sp_decode_attn
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launcher


@functools.lru_cache(64)
def _context(heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> Any:
    """Return a substitute for the context of ``sp_decode_attn``, for a single rank.

    It has no symmetric memory.
    """
    return SimpleNamespace(
        rank=0, num_ranks=1, group=None, max_batch=2**31, max_q_len=1, num_q_heads=heads,
        head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, shard_queries=False,
        device=current_device(), buffer=SimpleNamespace(launcher=Launcher()),
    )  # fmt: skip


def gqa_fwd_batch_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, workspace: torch.Tensor | None,
    q_lens: Sequence[int], kv_lens: torch.Tensor, block_table: torch.Tensor, scale: float,
    soft_cap: float = 0.0, output_split: torch.Tensor | None = None,
    output_combine: torch.Tensor | None = None, kv_split: int = -1,
) -> torch.Tensor:  # fmt: skip
    """Return the attention of one new token per sequence over a paged KV cache.

    Args:
        q: [batch, heads, head_dim], fp16, bf16 or fp32.
        k_cache, v_cache: [pages, page size, KV heads, dimension].
        workspace, output_split, kv_split: ignored; the op divides the keys over the SMs.
        q_lens: number of new tokens of each sequence; must be 1.
        kv_lens: int32 [batch], number of keys of each sequence.
        block_table: int32 [batch, pages of a sequence].
        scale: factor by which the scores are multiplied.
        soft_cap: see ``sp_decode_attn``.
        output_combine: receives the result.

    Raises:
        InvalidArgument: an argument has another shape or dtype.
    """
    if any(length != 1 for length in q_lens):
        raise InvalidArgument("gqa_fwd_batch_decode", "q_lens", list(q_lens), "ones")
    ctx = _context(q.shape[-2], q.shape[-1], v_cache.shape[-1], q.dtype)
    out: torch.Tensor = sp_decode_attn.fn(
        q, k_cache, v_cache, kv_lens.view(1, -1), ctx, block_table, float(scale), float(soft_cap)
    )[0]
    return out if output_combine is None else output_combine.copy_(out)


gqa_fwd_batch_decode_persistent = gqa_fwd_batch_decode


def gqa_fwd_batch_decode_aot(*_: Any, **__: Any) -> NoReturn:
    """Raise ``InvalidArgument``, because there are no kernels that are compiled ahead of time."""
    expected = "gqa_fwd_batch_decode, without a stream: kernels are compiled at the first call, or "
    expected += "come from a pack"
    name = "gqa_fwd_batch_decode_aot"
    raise InvalidArgument(name, "the function", name, expected)


gqa_fwd_batch_decode_persistent_aot = gqa_fwd_batch_decode_aot
