"""OpInfo of AllGather-attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Generator
from torch.nn.functional import scaled_dot_product_attention

from triton_dist.kernels.nvidia import create_sp_ag_attention_context, sp_ag_attention
from triton_dist.kernels.nvidia.sp_ag_attention.algorithms import AttentionKey
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.opinfo.base import (
    Baseline,
    Call,
    Cost,
    Group,
    Operands,
    OpInfo,
    meta,
    other_dtype,
    tolerance,
    uniform,
)
from triton_dist.testing.opinfo.ulysses import HeadsShape, gathered

SERIAL = "all-gather + attention"


def tokens_of_rank(lengths: Sequence[int], rank: int, num_ranks: int, zigzag: bool) -> list[int]:
    """Return the positions of a rank's tokens among the concatenated sequences.

    ``lengths`` are the numbers of tokens of the sequences. Each rank has an equal share of each
    sequence: with ``zigzag``, one chunk from the front and one from the back.
    """
    tokens: list[int] = []
    first = 0
    for length in lengths:
        chunks = 2 * num_ranks if zigzag else num_ranks
        chunk = length // chunks
        for number in (rank, chunks - 1 - rank) if zigzag else (rank,):
            tokens += range(first + number * chunk, first + (number + 1) * chunk)
        first += length
    return tokens


class SPAttentionOpInfo(OpInfo[HeadsShape]):
    """Operands ``q``, ``k``, ``v`` [1, M / W, heads, dim], for W ranks, of one causal sequence.

    Each rank has a chunk from the front and a chunk from the back of the sequence (zig-zag).
    """

    shape = HeadsShape
    shapes = HeadsShape(8192, 32, 32, 128), HeadsShape(32768, 32, 8, 128)
    # Not measured by bench_overlap (``overlaps`` is false): its lower bound is a library's
    # attention, not a GEMM.
    transfer, serial, overlaps = "all-gather", SERIAL, False

    def smaller(self, shape: HeadsShape, divisor: int, num_ranks: int) -> HeadsShape:
        M = max(1, shape.M // divisor // (2 * num_ranks)) * 2 * num_ranks
        return HeadsShape(M, 4, 2, max(8, shape.dim // divisor // 8 * 8))

    def context(
        self, shape: HeadsShape, dtype: torch.dtype, group: Any = None, **options: Any
    ) -> Any:
        ranks = group_for(group)
        return create_sp_ag_attention_context(
            ranks.rank, ranks.size, ranks.size, shape.M // ranks.size, shape.kv_heads, shape.dim,
            dtype, group=group, **options,
        )  # fmt: skip

    def allocate(
        self, shape: HeadsShape, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        device, tokens = current_device().torch_device, shape.M // num_ranks
        heads = {"q": shape.q_heads, "k": shape.kv_heads, "v": shape.kv_heads}
        return {
            name: torch.empty(1, tokens, number, shape.dim, dtype=dtype, device=device)
            for name, number in heads.items()
        }

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        for x in operands.values():
            x.copy_(uniform(x.shape, x.dtype, generator))

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> HeadsShape:
        batch, tokens, heads, dim = operands["q"].shape
        return HeadsShape(batch * tokens * num_ranks, heads, operands["k"].shape[2], dim)

    def arguments(self, operands: Operands, ctx: Any) -> Call:
        return (operands["q"], operands["k"], operands["v"], ctx), {}

    def output(self, result: Any) -> torch.Tensor:
        out: torch.Tensor = result[0]
        return out

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        ranks = group_for(group)
        whole = [gathered(operands[name], group) for name in "qkv"]
        length = whole[0].shape[1]
        size = ranks.size
        order = [t for r in range(size) for t in tokens_of_rank([length], r, size, size > 1)]
        position = torch.tensor(order, device=whole[0].device).argsort()
        q, k, v = (x[:, position].float().transpose(1, 2) for x in whole)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mine = order[ranks.rank * length // size :][: length // size]
        return out.transpose(1, 2)[:, mine].to(operands["q"].dtype)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Return the tolerance. Partial results are rounded before they are merged."""
        return tolerance(dtype, num_ranks + 1)

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return a baseline: the group's all-gather, then attention."""
        args, _ = self.arguments(operands, ctx)
        call = lambda: self.output(self.op.fn(*args, algorithm="collective"))  # noqa: E731
        return {SERIAL: self.whole(call, operands, ctx.group)}

    def cost(self, shape: HeadsShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        token, item = shape.dim * dtype.itemsize, shape.M / num_ranks
        kv = 2 * shape.M * shape.kv_heads * token
        flops = 2 * shape.M**2 * shape.q_heads * shape.dim / num_ranks
        rows = item * shape.q_heads * token
        return Cost(dtype, flops, rows + kv, rows, kv * (num_ranks - 1) / num_ranks)

    def error_inputs(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        q, k, v = good["q"], good["k"], good["v"]
        batch, tokens, heads, dim = q.shape
        return {
            "q": {"q": None},
            "q.dtype": {"q": q.to(other_dtype(q.dtype))},
            "q.device": {"q": q.to("meta")},
            "q.shape": {"q": q.new_ones(batch, tokens, heads + 1, dim)},
            "q.shape (a vector)": {"q": q.flatten()},
            "q.shape (too many tokens)": {n: torch.cat([x, x], 1) for n, x in good.items()},
            "q.shape (odd)": {n: x[:, 1:].contiguous() for n, x in good.items()},
            "q.stride()": {"q": q.mT.contiguous().mT},
            "q.requires_grad": {"q": q.clone().requires_grad_()},
            "k.shape": {"k": k[:, 1:]},
            "v.dtype": {"v": v.to(other_dtype(v.dtype))},
            "seq_lens": {"seq_lens": [tokens + 2]},
            "algorithm": {"algorithm": "ring"},
            "backend": {"backend": "math"},
        }

    def example_keys(self) -> Iterator[Any]:
        for M in (256, 512, 2048, 4096, 8192, 16384):
            for kv_heads in (8, 32):
                for zigzag in (False, True):
                    yield AttentionKey(M, 1, 32, kv_heads, 128, torch.bfloat16, True, zigzag, 1, 2)

    def inputs_for(self, key: Any) -> Call:
        ctx = SimpleNamespace(
            rank=0, num_ranks=key.num_ranks, buffer=None, max_tokens=key.M, kv_heads=key.kv_heads,
            head_dim=key.head_dim, dtype=key.dtype,
            device=SimpleNamespace(torch_device=torch.device("meta")),
        )  # fmt: skip
        q, k, v = (
            meta(key.dtype, key.batch, key.M // key.batch, heads, key.head_dim)
            for heads in (key.q_heads, key.kv_heads, key.kv_heads)
        )
        options = {"is_causal": key.is_causal, "zigzag": key.zigzag}
        if key.sequences > 1:
            rest = [0] * (key.sequences - 1)
            options["seq_lens"] = [key.M, *rest]
        return (q, k, v, ctx), options


SP_AG_ATTENTION = SPAttentionOpInfo(sp_ag_attention)
