"""OpInfos of the Ulysses ops, which exchange tokens for heads before and after attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Generator

from triton_dist.kernels.common import libraries
from triton_dist.kernels.nvidia import create_ulysses_context, ulysses_post_attn, ulysses_pre_attn
from triton_dist.kernels.nvidia.ulysses.algorithms import HeadsKey
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
    uniform,
)

LIBRARY = "library"


@dataclass(frozen=True)
class HeadsShape:
    """M tokens over all ranks, with ``q_heads`` and ``kv_heads`` heads of ``dim`` elements."""

    M: int
    q_heads: int
    kv_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.M}x{self.q_heads}/{self.kv_heads}x{self.dim}"


def local_part(x: torch.Tensor, lengths: Sequence[int], rank: int) -> torch.Tensor:
    """Return a rank's tokens of x [batch, tokens, …]; ``lengths``: numbers of tokens by rank."""
    before = sum(lengths[:rank])
    return x[:, before : before + lengths[rank]].contiguous()


def shared_heads(x: torch.Tensor, num_ranks: int) -> tuple[torch.Tensor, ...]:
    """Split x [batch, tokens, heads, dim] into the heads of each rank.

    With fewer heads than ranks, consecutive ranks have the same head.
    """
    replicas = max(1, num_ranks // x.shape[2])
    return tuple(each for each in x.chunk(num_ranks // replicas, 2) for _ in range(replicas))


class UlyssesOpInfo(OpInfo[HeadsShape]):
    """Base class of both OpInfos. All ranks have the same number of tokens."""

    shape = HeadsShape
    shapes = HeadsShape(8000, 32, 32, 128), HeadsShape(16384, 32, 8, 128)
    transfer, serial, overlaps = "all-to-all", LIBRARY, False

    def smaller(self, shape: HeadsShape, divisor: int, num_ranks: int) -> HeadsShape:
        M = max(1, shape.M // divisor // num_ranks) * num_ranks
        kv_heads = num_ranks if shape.kv_heads < shape.q_heads else 2 * num_ranks
        dim = max(8, shape.dim // divisor // 8 * 8)
        return HeadsShape(M, 2 * num_ranks, kv_heads, dim)

    def context(
        self, shape: HeadsShape, dtype: torch.dtype, group: Any = None, **options: Any
    ) -> Any:
        ranks = group_for(group)
        return create_ulysses_context(
            ranks.rank, ranks.size, ranks.size, shape.M, shape.q_heads, shape.kv_heads, shape.dim,
            dtype, group=group, **options,
        )  # fmt: skip

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        for x in operands.values():
            x.copy_(uniform(x.shape, x.dtype, generator))

    def output(self, result: Any) -> torch.Tensor:
        """Concatenate the results (q, k and v, or o) to one tensor [batch, tokens, elements]."""
        return torch.cat([x.flatten(2) for x in result], 2)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Return 0: elements are copied."""
        return 0.0

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return a baseline: a permutation, the library's all-to-all, and another permutation."""
        args, _ = self.arguments(operands, ctx)
        call = lambda: self.output(self.op.fn(*args, algorithm="collective"))  # noqa: E731
        return {LIBRARY: self.whole(call, operands, ctx.group)}

    def cost(self, shape: HeadsShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        row = self.heads(shape, num_ranks) * shape.dim * dtype.itemsize
        nbytes = shape.M / num_ranks * row
        link = nbytes * (num_ranks - 1) / num_ranks
        return Cost(dtype, flops=0, read_bytes=nbytes, written_bytes=nbytes, link_bytes=link)

    def heads(self, shape: HeadsShape, num_ranks: int) -> int:
        """Return the number of heads that all ranks together have of a token after the exchange.

        A head that several ranks have is counted for each of them.
        """
        return shape.q_heads

    def error_inputs(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        name, x = next(iter(good.items()))
        batch, tokens, heads, dim = x.shape
        return {
            name: {name: None},
            f"{name}.dtype": {name: x.to(other_dtype(x.dtype))},
            f"{name}.device": {name: x.to("meta")},
            f"{name}.shape": {name: x.new_ones(batch, tokens, heads + 1, dim)},
            f"{name}.shape (a vector)": {name: x.flatten()},
            f"{name}.stride()": {name: x.mT.contiguous().mT},
            f"{name}.requires_grad": {name: x.clone().requires_grad_()},
            "seq_lens": {"seq_lens": [tokens] * (num_ranks + 1)},
            "seq_lens (negative)": {"seq_lens": [-1] * num_ranks},
            f"{name}.shape (of seq_lens)": {"seq_lens": [tokens + 1] * num_ranks},
            "algorithm": {"algorithm": "ring"},
            "num_ctas": {"num_ctas": 0, "algorithm": "push"},
        }

    def example_keys(self) -> Iterator[Any]:
        for M in (256, 512, 2048, 4096, 8192, 16384):
            for kv_width in (2048, 128):
                for has_lengths in (False, True):
                    yield HeadsKey(
                        M, (2048, kv_width, kv_width), torch.bfloat16, 1, False, has_lengths, 2
                    )  # fmt: skip

    def meta_inputs(self, key: Any) -> tuple[Any, tuple[int, int], list[int], dict[str, Any]]:
        """Return arguments of a call with tuning key ``key``.

        They are: context, (batch, tokens over all ranks), numbers of heads of q, k and v of a rank,
        and keyword arguments.
        """
        size, shared, dtype = key.num_ranks, key.replicas > 1, key.dtype
        dims = (key.widths[1], key.widths[2]) if shared else (8, 8)
        heads = [key.widths[0] // dims[0], *(max(1, w // 8) for w in key.widths[1:])]
        if shared:
            heads[1:] = 1, 1
        ctx = SimpleNamespace(
            rank=0, num_ranks=size, buffer=None, max_tokens=key.M, max_local_tokens=key.M,
            q_heads=heads[0] * size, kv_heads=size // key.replicas if shared else heads[1] * size,
            head_dims=dims, dtype=dtype, replicas=key.replicas,
            device=SimpleNamespace(torch_device=torch.device("meta")),
        )  # fmt: skip
        batch = 2 if key.is_batched else 1
        tokens = key.M // batch
        options = {"seq_lens": [tokens // size] * size} if key.has_lengths else {}
        return ctx, (batch, tokens), heads, options


class PreAttnOpInfo(UlyssesOpInfo):
    """Operands ``q``, ``k``, ``v`` [1, M / W, heads, dim], for W ranks."""

    def allocate(
        self, shape: HeadsShape, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        device, tokens = current_device().torch_device, shape.M // num_ranks
        return {
            name: torch.empty(1, tokens, heads, shape.dim, dtype=dtype, device=device)
            for name, heads in (
                ("q", shape.q_heads), ("k", shape.kv_heads), ("v", shape.kv_heads),
            )
        }  # fmt: skip

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> HeadsShape:
        q, k = operands["q"], operands.get("k")
        kv_heads = q.shape[2] if k is None else k.shape[2]
        M = q.shape[0] * q.shape[1] * num_ranks
        return HeadsShape(M, q.shape[2], kv_heads, q.shape[3])

    def arguments(self, operands: Operands, ctx: Any) -> Call:
        return (operands["q"], operands["k"], operands["v"], ctx), {}

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        ranks = group_for(group)
        whole = [gathered(operands[name], group) for name in "qkv"]
        return self.output([shared_heads(x, ranks.size)[ranks.rank] for x in whole])

    def heads(self, shape: HeadsShape, num_ranks: int) -> int:
        return shape.q_heads + 2 * max(shape.kv_heads, num_ranks)

    def error_inputs(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        k, v = good["k"], good["v"]
        twice = {name: torch.cat([x, x], 1) for name, x in good.items()}
        return {
            **super().error_inputs(good, num_ranks),
            "q.shape (too many tokens)": twice,
            "k.dtype": {"k": k.to(other_dtype(k.dtype))},
            "v.shape": {"v": v[:, 1:]},
            "v": {"k": None},
        }

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

    def allocate(
        self, shape: HeadsShape, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        sizes = 1, shape.M, shape.q_heads // num_ranks, shape.dim
        return {"o": torch.empty(sizes, dtype=dtype, device=current_device().torch_device)}

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> HeadsShape:
        batch, tokens, heads, dim = operands["o"].shape
        return HeadsShape(batch * tokens, heads * num_ranks, heads * num_ranks, dim)

    def arguments(self, operands: Operands, ctx: Any) -> Call:
        return (operands["o"], ctx), {}

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        ranks, o = group_for(group), operands["o"]
        by_rank = o[None] if ranks.size == 1 else libraries.all_gather_rows(o, group)[:, None]
        tokens = o.shape[1] // ranks.size
        parts = [local_part(x, [tokens] * ranks.size, ranks.rank) for x in by_rank]
        return torch.cat(parts, 2).flatten(2)

    def inputs_for(self, key: Any) -> Call:
        ctx, whole, (heads, *kv_heads), options = self.meta_inputs(key)
        kv = [
            meta(key.dtype, *whole, number, dim) if width else None
            for number, dim, width in zip(kv_heads, ctx.head_dims, key.widths[1:], strict=True)
        ]
        return (meta(key.dtype, *whole, heads, ctx.head_dims[0]), ctx, *kv), options


def gathered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather x [1, tokens, …] of each rank to [1, tokens of all ranks, …]."""
    return x if group_for(group).size == 1 else libraries.all_gather_rows(x[0], group)[None]


ULYSSES_PRE_ATTN = PreAttnOpInfo(ulysses_pre_attn)
ULYSSES_POST_ATTN = PostAttnOpInfo(ulysses_post_attn)
