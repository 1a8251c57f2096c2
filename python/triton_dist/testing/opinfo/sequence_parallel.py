"""OpInfos of the Ulysses ops, which exchange tokens for heads, and of AllGather-attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Generator
from torch.nn.functional import scaled_dot_product_attention

from triton_dist.kernels.nvidia import (
    create_sp_ag_attention_context,
    create_ulysses_context,
    sp_ag_attention,
    ulysses_gemm_pre_attn,
    ulysses_post_attn,
    ulysses_post_attn_gemm,
    ulysses_pre_attn,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.opinfo.base import (
    Call,
    Cost,
    Group,
    Operands,
    fill,
    meta,
    meta_with_layout,
    tolerance,
    uniform,
)
from triton_dist.testing.opinfo.exchange import META_DEVICE, ExchangeOpInfo, gathered


@dataclass(frozen=True)
class HeadsShape:
    """M tokens over all ranks, with ``q_heads`` and ``kv_heads`` heads of ``dim`` elements."""

    M: int
    q_heads: int
    kv_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.M}x{self.q_heads}/{self.kv_heads}x{self.dim}"


@dataclass(frozen=True)
class ProjectedShape(HeadsShape):
    """Heads that are projected from or to ``hidden`` elements."""

    hidden: int

    def __str__(self) -> str:
        return f"{super().__str__()}x{self.hidden}"

    @property
    def columns(self) -> int:
        """Number of elements of q, k and v of a token."""
        return (self.q_heads + 2 * self.kv_heads) * self.dim


def local_tokens(x: torch.Tensor, lengths: Sequence[int], rank: int) -> torch.Tensor:
    """Return a rank's tokens of x [batch, tokens, …]; ``lengths``: numbers of tokens by rank."""
    before = sum(lengths[:rank])
    return x[:, before : before + lengths[rank]].contiguous()


def heads_by_rank(x: torch.Tensor, num_ranks: int) -> tuple[torch.Tensor, ...]:
    """Split x [batch, tokens, heads, dim] into the heads of each rank. With fewer heads than ranks,
    consecutive ranks have the same head."""
    replicas = max(1, num_ranks // x.shape[2])
    return tuple(each for each in x.chunk(num_ranks // replicas, 2) for _ in range(replicas))


class HeadsOpInfo(ExchangeOpInfo[HeadsShape]):
    """Base of ops with operands ``q``, ``k``, ``v`` [1, M / W, heads, dim], for W ranks."""

    random_operands, positional_names = ("q", "k", "v"), ("q", "k", "v", "ctx")

    def allocate(
        self, shape: HeadsShape, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        device, tokens = current_device().torch_device, shape.M // num_ranks
        heads = {"q": shape.q_heads, "k": shape.kv_heads, "v": shape.kv_heads}
        return {
            name: torch.empty(1, tokens, number, shape.dim, dtype=dtype, device=device)
            for name, number in heads.items()
        }

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> HeadsShape:
        q, k = operands["q"], operands.get("k")
        kv_heads = q.shape[2] if k is None else k.shape[2]
        return HeadsShape(q.shape[0] * q.shape[1] * num_ranks, q.shape[2], kv_heads, q.shape[3])


class UlyssesOpInfo(ExchangeOpInfo[HeadsShape]):
    """Base of the OpInfos of Ulysses; all ranks have equal numbers of tokens."""

    shape_type: type[HeadsShape] = HeadsShape
    shapes = HeadsShape(8000, 32, 32, 128), HeadsShape(16384, 32, 8, 128)
    collective_name, create = "all-to-all", staticmethod(create_ulysses_context)

    def smaller(self, shape: HeadsShape, divisor: int, num_ranks: int) -> HeadsShape:
        M = max(1, shape.M // divisor // num_ranks) * num_ranks
        kv_heads = num_ranks if shape.kv_heads < shape.q_heads else 2 * num_ranks
        return HeadsShape(M, 2 * num_ranks, kv_heads, max(8, shape.dim // divisor // 8 * 8))

    def context_sizes(self, shape: HeadsShape, num_ranks: int) -> tuple[int, ...]:
        return shape.M, shape.q_heads, shape.kv_heads, shape.dim

    def output(self, result: Any) -> torch.Tensor:
        """Concatenate the results (q, k and v, or o) to one tensor [batch, tokens, elements]."""
        return torch.cat([x.flatten(2) for x in result], 2)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Return 0: elements are copied."""
        return 0.0

    def cost(self, shape: HeadsShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        row_bytes = self.heads(shape, num_ranks) * shape.dim * dtype.itemsize
        nbytes = shape.M / num_ranks * row_bytes
        link = nbytes * (num_ranks - 1) / num_ranks
        return Cost(dtype, flops=0, read_bytes=nbytes, written_bytes=nbytes, link_bytes=link)

    def heads(self, shape: HeadsShape, num_ranks: int) -> int:
        """Return the number of heads that all ranks together have of a token after the exchange. A
        head that several ranks have is counted for each of them."""
        return shape.q_heads

    def meta_inputs(self, key: Any) -> tuple[Any, tuple[int, int], list[int], dict[str, Any]]:
        """Return arguments of a call with tuning key ``key``. They are: context, (batch, tokens
        over all ranks), numbers of heads of q, k and v of a rank, and keyword arguments."""
        size, has_shared_heads, dtype = key.num_ranks, key.ranks_per_head > 1, key.dtype
        dims = (key.widths[1], key.widths[2]) if has_shared_heads else (8, 8)
        heads = [key.widths[0] // dims[0], *(max(1, w // 8) for w in key.widths[1:])]
        if has_shared_heads:
            heads[1:] = 1, 1
        ctx = SimpleNamespace(
            rank=0, num_ranks=size, buffer=None, max_tokens=key.M, max_local_tokens=key.M,
            q_heads=heads[0] * size,
            kv_heads=size // key.ranks_per_head if has_shared_heads else heads[1] * size,
            head_dims=dims, dtype=dtype, ranks_per_kv_head=key.ranks_per_head, device=META_DEVICE,
        )  # fmt: skip
        batch = 2 if key.is_batched else 1
        tokens = key.M // batch
        options = {"seq_lens": [tokens // size] * size} if key.has_lengths else {}
        return ctx, (batch, tokens), heads, options


class PreAttnOpInfo(HeadsOpInfo, UlyssesOpInfo):
    """Operands ``q``, ``k``, ``v`` [1, M / W, heads, dim], for W ranks."""

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        ranks = group_for(group)
        gathered_operands = [gathered(operands[name][0], group)[None] for name in "qkv"]
        return self.output([heads_by_rank(x, ranks.size)[ranks.rank] for x in gathered_operands])

    def heads(self, shape: HeadsShape, num_ranks: int) -> int:
        return shape.q_heads + 2 * max(shape.kv_heads, num_ranks)

    def inputs_for(self, key: Any) -> Call:
        ctx, (batch, tokens), _, options = self.meta_inputs(key)
        shape = batch, tokens // key.num_ranks
        kv: list[torch.Tensor | None] = [
            meta(key.dtype, *shape, ctx.kv_heads, dim) if width else None
            for dim, width in zip(ctx.head_dims, key.widths[1:], strict=True)
        ]
        return (meta(key.dtype, *shape, ctx.q_heads, ctx.head_dims[0]), *kv, ctx), options


class PostAttnOpInfo(UlyssesOpInfo):
    """Operand ``o`` [1, M, q_heads / W, dim], for W ranks."""

    random_operands, positional_names = ("o",), ("o", "ctx")

    def allocate(
        self, shape: HeadsShape, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        sizes = 1, shape.M, shape.q_heads // num_ranks, shape.dim
        return {"o": torch.empty(sizes, dtype=dtype, device=current_device().torch_device)}

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> HeadsShape:
        batch, tokens, heads, dim = operands["o"].shape
        return HeadsShape(batch * tokens, heads * num_ranks, heads * num_ranks, dim)

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        ranks, o = group_for(group), operands["o"]
        parts = gathered(o, group).chunk(ranks.size, 1)[ranks.rank]
        return torch.cat(parts.split(1), 2).flatten(2)

    def inputs_for(self, key: Any) -> Call:
        ctx, gathered_operands, (heads, *kv_heads), options = self.meta_inputs(key)
        kv = [
            meta(key.dtype, *gathered_operands, number, dim) if width else None
            for number, dim, width in zip(kv_heads, ctx.head_dims, key.widths[1:], strict=True)
        ]
        return (meta(key.dtype, *gathered_operands, heads, ctx.head_dims[0]), ctx, *kv), options


class ProjectedOpInfo(UlyssesOpInfo):
    """Base of the Ulysses ops with projections; operands: rows, and ``B``."""

    shape_type = ProjectedShape
    projects_qkv: ClassVar[bool] = False
    """The op computes q, k and v; otherwise it multiplies the attention output."""
    shapes = (
        ProjectedShape(8000, 32, 32, 128, 4096), ProjectedShape(16384, 32, 8, 128, 8192),
    )  # fmt: skip

    def smaller(self, shape: Any, divisor: int, num_ranks: int) -> ProjectedShape:
        heads = super().smaller(shape, divisor, num_ranks)
        hidden = max(8, shape.hidden // divisor // 8 * 8)
        return ProjectedShape(heads.M, heads.q_heads, heads.kv_heads, heads.dim, hidden)

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        (rows,) = (operands[name] for name in self.random_operands)
        fill(rows, operands, operands["B"].shape[0], generator)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        return tolerance(dtype)

    def cost(self, shape: Any, dtype: torch.dtype, num_ranks: int) -> Cost:
        heads_cost, tokens = super().cost(shape, dtype, num_ranks), shape.M / num_ranks
        columns, hidden_bytes = self.columns(shape), tokens * shape.hidden * dtype.itemsize
        read, written = heads_cost.read_bytes, hidden_bytes
        if self.projects_qkv:
            read, written = hidden_bytes, heads_cost.written_bytes
        return replace(
            heads_cost, flops=int(2 * tokens * columns * shape.hidden),
            read_bytes=read + columns * shape.hidden * dtype.itemsize, written_bytes=written,
        )  # fmt: skip

    def columns(self, shape: ProjectedShape) -> int:
        """Return the number of elements of a token's heads that are multiplied."""
        return shape.q_heads * shape.dim

    def inputs_for(self, key: Any) -> Call:
        ctx, (batch, tokens), heads, options = self.meta_inputs(key.exchange)
        columns = ctx.q_heads * ctx.head_dims[0] + ctx.kv_heads * sum(ctx.head_dims)
        if self.projects_qkv:
            x = meta(ctx.dtype, batch, tokens // ctx.num_ranks, key.hidden)
            sizes = key.hidden, columns
        else:
            x = meta(ctx.dtype, batch, tokens, heads[0], ctx.head_dims[0])
            sizes = ctx.q_heads * ctx.head_dims[0], key.hidden
        if key.has_bias:
            options["bias"] = meta(ctx.dtype, sizes[1])
        return (x, meta_with_layout(key.layout, ctx.dtype, *sizes), ctx), options


class GemmPreAttnOpInfo(ProjectedOpInfo):
    """Operands ``x`` [1, M / W, hidden] and ``B`` [hidden, columns], for W ranks. ``heads`` has the
    numbers of heads of q and k, and of elements of a head, which the context has too."""

    random_operands, positional_names, projects_qkv = ("x",), ("x", "B", "ctx"), True

    def allocate(
        self, shape: Any, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        sizes, device = (1, shape.M // num_ranks, shape.hidden), current_device().torch_device
        B = uniform((shape.hidden, shape.columns), dtype, generator)
        heads = torch.tensor([shape.q_heads, shape.kv_heads, shape.dim])
        return {"x": torch.empty(sizes, dtype=dtype, device=device), "B": B, "heads": heads}

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> ProjectedShape:
        ctx, (batch, tokens, hidden) = operands.get("ctx"), operands["x"].shape
        if ctx is None:
            q_heads, kv_heads, dim = operands["heads"].tolist()
        else:
            q_heads, kv_heads, dim = ctx.q_heads, ctx.kv_heads, ctx.head_dims[0]
        return ProjectedShape(batch * tokens * num_ranks, q_heads, kv_heads, dim, hidden)

    def columns(self, shape: ProjectedShape) -> int:
        return shape.columns

    def heads(self, shape: HeadsShape, num_ranks: int) -> int:
        return shape.q_heads + 2 * max(shape.kv_heads, num_ranks)

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        x, (q_heads, kv_heads, dim) = operands["x"], operands["heads"].tolist()
        product = (x.float() @ operands["B"].float()).to(x.dtype).unflatten(2, (-1, dim))
        parts = zip("qkv", product.split((q_heads, kv_heads, kv_heads), 2), strict=True)
        return ULYSSES_PRE_ATTN.reference(dict(parts), group)


class PostAttnGemmOpInfo(ProjectedOpInfo):
    """Operands ``o`` [1, M, q_heads / W, dim] and ``B`` [q_heads * dim, hidden], for W ranks."""

    random_operands, positional_names = ("o",), ("o", "B", "ctx")

    def allocate(
        self, shape: Any, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        B = uniform((shape.q_heads * shape.dim, shape.hidden), dtype, generator)
        return {**ULYSSES_POST_ATTN.allocate(shape, dtype, num_ranks, generator), "B": B}

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> ProjectedShape:
        heads = ULYSSES_POST_ATTN.shape_of(operands, num_ranks)
        hidden = operands["B"].shape[1]
        return ProjectedShape(heads.M, heads.q_heads, heads.kv_heads, heads.dim, hidden)

    def output(self, result: Any) -> torch.Tensor:
        out: torch.Tensor = result
        return out

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        rows = ULYSSES_POST_ATTN.reference(operands, group)
        return (rows.float() @ operands["B"].float()).to(rows.dtype)


def token_positions(lengths: Sequence[int], rank: int, num_ranks: int, zigzag: bool) -> list[int]:
    """Return the positions of a rank's tokens among the concatenated sequences. ``lengths`` are the
    numbers of tokens of the sequences. Each rank has an equal share of each sequence: with
    ``zigzag``, one chunk from the front and one from the back."""
    tokens: list[int] = []
    first = 0
    for length in lengths:
        chunks = 2 * num_ranks if zigzag else num_ranks
        chunk = length // chunks
        for number in (rank, chunks - 1 - rank) if zigzag else (rank,):
            tokens += range(first + number * chunk, first + (number + 1) * chunk)
        first += length
    return tokens


class SPAttentionOpInfo(HeadsOpInfo):
    """Operands ``q``, ``k``, ``v`` [1, M / W, heads, dim], for W ranks, of one causal sequence.
    Each rank has a chunk from the front and a chunk from the back of the sequence (zig-zag)."""

    shape_type = HeadsShape
    shapes = HeadsShape(8192, 32, 32, 128), HeadsShape(32768, 32, 8, 128)
    # Not measured by bench_overlap (``overlaps`` is false): its lower bound is a library's
    # attention, not a GEMM.
    collective_name, serial_name = "all-gather", "all-gather + attention"
    create = staticmethod(create_sp_ag_attention_context)

    def smaller(self, shape: HeadsShape, divisor: int, num_ranks: int) -> HeadsShape:
        M = max(1, shape.M // divisor // (2 * num_ranks)) * 2 * num_ranks
        return HeadsShape(M, 4, 2, max(8, shape.dim // divisor // 8 * 8))

    def context_sizes(self, shape: HeadsShape, num_ranks: int) -> tuple[int, ...]:
        return shape.M // num_ranks, shape.kv_heads, shape.dim

    def output(self, result: Any) -> torch.Tensor:
        out: torch.Tensor = result[0]
        return out

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        ranks = group_for(group)
        gathered_operands = [gathered(operands[name][0], group)[None] for name in "qkv"]
        length = gathered_operands[0].shape[1]
        size = ranks.size
        order = [t for r in range(size) for t in token_positions([length], r, size, size > 1)]
        position = torch.tensor(order, device=gathered_operands[0].device).argsort()
        q, k, v = (x[:, position].float().transpose(1, 2) for x in gathered_operands)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        own_positions = order[ranks.rank * length // size :][: length // size]
        return out.transpose(1, 2)[:, own_positions].to(operands["q"].dtype)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Return the tolerance. Partial results are rounded before they are merged."""
        return tolerance(dtype, num_ranks + 1)

    def cost(self, shape: HeadsShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        head_bytes, tokens = shape.dim * dtype.itemsize, shape.M / num_ranks
        kv_bytes = 2 * shape.M * shape.kv_heads * head_bytes
        flops = 2 * shape.M**2 * shape.q_heads * shape.dim / num_ranks
        q_bytes = tokens * shape.q_heads * head_bytes
        link_bytes = kv_bytes * (num_ranks - 1) / num_ranks
        return Cost(dtype, flops, q_bytes + kv_bytes, q_bytes, link_bytes)

    def inputs_for(self, key: Any) -> Call:
        ctx = SimpleNamespace(
            rank=0, num_ranks=key.num_ranks, buffer=None, max_tokens=key.M, kv_heads=key.kv_heads,
            head_dim=key.head_dim, dtype=key.dtype,
            device=META_DEVICE,
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


ULYSSES_PRE_ATTN = PreAttnOpInfo(ulysses_pre_attn)
ULYSSES_POST_ATTN = PostAttnOpInfo(ulysses_post_attn)
ULYSSES_GEMM_PRE_ATTN = GemmPreAttnOpInfo(ulysses_gemm_pre_attn)
ULYSSES_POST_ATTN_GEMM = PostAttnGemmOpInfo(ulysses_post_attn_gemm)
SP_AG_ATTENTION = SPAttentionOpInfo(sp_ag_attention)
