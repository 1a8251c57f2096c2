"""OpInfo of decode attention over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Generator

from triton_dist.kernels.nvidia import create_sp_decode_context, sp_decode_attn
from triton_dist.runtime.device import current_device
from triton_dist.testing.opinfo.base import Call, Cost, Group, Operands, meta, tolerance, uniform
from triton_dist.testing.opinfo.exchange import META_DEVICE, ExchangeOpInfo, gathered


@dataclass(frozen=True)
class DecodeShape:
    """``batch`` sequences of at most ``tokens`` tokens each, counted over all ranks."""

    tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens x {self.batch}, {self.heads}/{self.kv_heads} x {self.head_dim}"
        )


class DecodeOpInfo(ExchangeOpInfo[DecodeShape]):
    """Operands ``q`` [batch, heads, head_dim], ``k_cache``, ``v_cache`` and ``kv_lens``. ``q`` and
    ``kv_lens`` are equal on all ranks. The caches are not paged and have this rank's tokens."""

    shape_type, shapes = DecodeShape, (DecodeShape(65536, 1, 96, 12, 128),)
    collective_name, create = "all-gather", staticmethod(create_sp_decode_context)
    positional_names = ("q", "k_cache", "v_cache", "kv_lens", "ctx")
    baseline_algorithm, random_operands = "all_to_all", ("k_cache", "v_cache")
    library_algorithms = ("library", "library_reduce_scatter")

    def smaller(self, shape: DecodeShape, divisor: int, num_ranks: int) -> DecodeShape:
        tokens = max(4, shape.tokens // divisor // num_ranks) * num_ranks
        kv_heads = max(1, shape.kv_heads // divisor)
        heads = kv_heads * min(num_ranks * 2, shape.heads // shape.kv_heads)
        return DecodeShape(tokens, shape.batch, heads, kv_heads, max(16, shape.head_dim // divisor))

    def context_sizes(self, shape: DecodeShape, num_ranks: int) -> tuple[int, ...]:
        return shape.batch, shape.heads, shape.head_dim

    def allocate(
        self, shape: DecodeShape, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        device, tokens = current_device().torch_device, shape.tokens // num_ranks
        cache = shape.batch, tokens, shape.kv_heads, shape.head_dim
        # All ranks must draw equal queries.
        shared_generator = torch.Generator(device).manual_seed(shape.tokens)
        shortened_by = torch.arange(num_ranks)[:, None] + torch.arange(shape.batch)
        return {
            "q": uniform((shape.batch, shape.heads, shape.head_dim), dtype, shared_generator, 3.0),
            "k_cache": torch.empty(cache, dtype=dtype, device=device),
            "v_cache": torch.empty(cache, dtype=dtype, device=device),
            "kv_lens": (tokens - shortened_by % min(tokens, 4)).int().to(device),
        }

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> DecodeShape:
        q, cache = operands["q"], operands["k_cache"]
        return DecodeShape(
            cache.shape[1] * num_ranks, len(q), q.shape[-2], cache.shape[2], q.shape[-1]
        )

    def output(self, result: Any) -> torch.Tensor:
        """Return the attention output without the log-sum-exp."""
        out: torch.Tensor = result[0]
        return out

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        q, lens = operands["q"], operands["kv_lens"].flatten()
        # [ranks * batch, tokens, KV heads, head_dim]
        k, v = (gathered(operands[name], group).float() for name in ("k_cache", "v_cache"))
        tokens, group_size = k.shape[1], q.shape[1] // k.shape[2]
        k, v = k.repeat_interleave(group_size, 2), v.repeat_interleave(group_size, 2)
        queries = q.float().repeat(len(k) // len(q), 1, 1)
        scores = torch.einsum("bhd,bnhd->bhn", queries, k) * q.shape[-1] ** -0.5
        absent = torch.arange(tokens, device=q.device) >= lens[:, None]
        scores = scores.masked_fill(absent[:, None], float("-inf")).unflatten(0, (-1, len(q)))
        weights = scores.movedim(0, 2).flatten(2).softmax(-1)
        values = v.unflatten(0, (-1, len(q))).movedim(0, 1).flatten(1, 2)
        return torch.einsum("bhn,bnhd->bhd", weights, values).to(q.dtype)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        return tolerance(dtype, num_ranks + 1)

    def cost(self, shape: DecodeShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the cost if every sequence has ``shape.tokens`` tokens."""
        keys = shape.tokens / num_ranks * shape.batch
        output_size = shape.batch * shape.heads * shape.head_dim
        cache = 2 * keys * shape.kv_heads * shape.head_dim
        return Cost(
            dtype, flops=4 * keys * shape.heads * shape.head_dim,
            read_bytes=(cache + output_size) * dtype.itemsize,
            written_bytes=output_size * dtype.itemsize,
            link_bytes=output_size * dtype.itemsize * (num_ranks - 1),
        )  # fmt: skip

    def inputs_for(self, key: Any) -> Call:
        ctx = SimpleNamespace(
            max_batch=key.batch, max_q_len=1, num_q_heads=key.q_heads, head_dim=key.head_dim,
            v_head_dim=key.head_dim, dtype=key.dtype, shard_queries=False, num_ranks=key.num_ranks,
            buffer=None, device=META_DEVICE,
        )  # fmt: skip
        cache = meta(key.dtype, key.batch, key.max_kv_len, key.kv_heads, key.head_dim)
        q = meta(key.dtype, key.batch, key.q_heads, key.head_dim)
        return (q, cache, cache, meta(torch.int32, key.num_ranks, key.batch), ctx), {}


SP_DECODE_ATTN = DecodeOpInfo(sp_decode_attn)
