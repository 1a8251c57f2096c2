"""Algorithms of AllGather-attention, which gather k and v and compute attention with a library."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.collective.pushed import heads_check, rows_of
from triton_dist.kernels.common.context import (
    Check,
    checked_buffer,
    is_int,
    operand_checks,
    raise_first_error,
    tensor_checks,
)
from triton_dist.kernels.common.exchange.pushed import Pushed
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall
from triton_dist.kernels.common.peers import digest_of
from triton_dist.kernels.common.slots.epochs import PUSH_STREAMS
from triton_dist.kernels.nvidia.sp_ag_attention.context import SPAttentionContext
from triton_dist.kernels.nvidia.sp_ag_attention.kernel import kernel_await_shard, kernel_merge
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.transfer import Copy, InputRows, Step
from triton_dist.runtime.launch import Launch

R = TypeVar("R")
_MERGE_ELEMENTS = 4096
"""Number of elements that a program merges."""
AwaitShard = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Function that waits for the k and v of a rank, and returns them, [batch, tokens, kv_heads,
head_dim]."""


class AttentionKey(NamedTuple):
    """Tuning key of a call. The algorithms also use it as the call's sizes."""

    M: int
    """Batch size times tokens of a rank."""
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    is_causal: bool
    zigzag: bool
    sequences: int
    """Number of ``seq_lens``, or 1."""
    num_ranks: int


class AttentionSlice(NamedTuple):
    """Attention of tokens ``rows`` of this rank over tokens ``keys`` of one rank."""

    rows: slice
    keys: slice
    is_causal: bool


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class AttentionCall(OpCall):
    """The arguments of one call of ``sp_ag_attention``, and values derived from them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    ctx: SPAttentionContext
    is_causal: bool = True
    zigzag: bool = True
    seq_lens: Sequence[int] | None = None
    scale: float | None = None
    backend: str | None = None
    algorithm: str | None = None
    validated_key: Any = None

    def __post_init__(self) -> None:
        if self.validated_key is None:
            checked_buffer(
                self.ctx, SPAttentionContext, "sp_ag_attention", "create_sp_ag_attention_context"
            )
            raise_first_error("sp_ag_attention", self.checks())
        batch, tokens, heads, dim = self.q.shape
        self.lengths = (tokens,) if self.seq_lens is None else tuple(map(int, self.seq_lens))
        self.key = self.validated_key or AttentionKey(
            batch * tokens, batch, heads, self.k.shape[2], dim, self.q.dtype, self.is_causal,
            self.is_causal and self.zigzag, len(self.lengths), self.ctx.num_ranks,
        )  # fmt: skip
        self.backend = self.backend or backends()[0]
        self.chosen_algorithm = ALGORITHMS[self.algorithm or CopyEngine.name]
        if self.backend not in backends():
            expected = f"None or one of {', '.join(map(repr, backends()))}"
            raise InvalidArgument("sp_ag_attention", "backend", self.backend, expected)

    def checks(self) -> Iterator[Check]:
        ctx, q, k, v = self.ctx, self.q, self.k, self.v
        yield from tensor_checks(q=q, k=k, v=v)
        shape, dim = tuple(q.shape), ctx.head_dim
        fits = q.ndim == 4 and shape[3] == dim and shape[2] >= 1 and shape[2] % ctx.kv_heads == 0
        expected = f"[batch, tokens, a multiple of {ctx.kv_heads}, {dim}]"
        yield "q.shape", shape, fits, expected
        fits = 1 <= shape[0] * shape[1] <= ctx.max_tokens
        yield "q.shape", shape, fits, f"1 to {ctx.max_tokens} tokens, the context's max_tokens"
        expected_shape = (*shape[:2], ctx.kv_heads, dim)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if name != "q":
                fits = tuple(x.shape) == expected_shape
                yield f"{name}.shape", tuple(x.shape), fits, f"{expected_shape}"
            yield from operand_checks(ctx.dtype, ctx.device.torch_device, **{name: x})
            yield from heads_check(name, x)
        lengths = self.seq_lens
        if lengths is not None:
            fits = isinstance(lengths, Sequence) and all(is_int(n) and n >= 0 for n in lengths)
            expected = f"tokens whose sum is {shape[1]}, for a batch of 1"
            fits = fits and shape[0] == 1 and sum(lengths) == shape[1]
            yield "seq_lens", lengths, fits, expected
        if self.is_causal and self.zigzag and ctx.num_ranks > 1:
            fits = all(n % 2 == 0 for n in lengths or (shape[1],))
            name, value = ("q.shape", shape) if lengths is None else ("seq_lens", lengths)
            yield name, value, fits, "even numbers of tokens for zigzag order"

    @property
    def agreement(self) -> str:
        """Text that, like the tuning key, must be equal on all ranks."""
        return f"{self.key.M} tokens, seq_lens {self.lengths}"

    @property
    def digest(self) -> int:
        """Call tag, a digest of the arguments that must be equal on all ranks."""
        return digest_of(self.key, self.lengths)

    def slices(self, source: int) -> Iterator[AttentionSlice]:
        """Yield the slices of the attention of this rank's tokens over the keys of ``source``."""
        first, is_earlier = 0, source < self.ctx.rank
        for length in filter(None, self.lengths):
            middle, end = first + length // 2, first + length
            sequence, front, back = slice(first, end), slice(first, middle), slice(middle, end)
            if source == self.ctx.rank or not self.is_causal:
                yield AttentionSlice(sequence, sequence, self.is_causal)
            elif self.zigzag and is_earlier:
                yield AttentionSlice(sequence, front, False)
            elif self.zigzag:
                yield AttentionSlice(back, sequence, False)
            elif is_earlier:
                yield AttentionSlice(sequence, sequence, False)
            first = end

    def shards(self, await_shard: AwaitShard) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield each rank with its k and v, beginning with this rank."""
        yield self.ctx.rank, self.k.detach(), self.v.detach()
        for step in range(1, self.ctx.num_ranks):
            source = (self.ctx.rank + step) % self.ctx.num_ranks
            yield source, *await_shard(source)

    def attend(self, await_shard: AwaitShard) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention over the k and v of all ranks, and its log-sum-exp."""
        shards = self.shards(await_shard)
        own = [result for _, result in self.partial_results(*next(shards))]
        out, lse = own[0]
        if len(own) > 1:
            out, lse = torch.cat([o for o, _ in own], 1), torch.cat([s for _, s in own], 2)
        for shard in shards:
            for rows, (part, part_lse) in self.partial_results(*shard):
                self.merge(out, lse, part, part_lse, rows.start)
        return out, lse

    def partial_results(
        self, source: int, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield tokens of this rank, with their attention over keys of ``source`` and its
        log-sum-exp."""
        q, backend = self.q.detach(), str(self.backend)
        for rows, keys, is_causal in self.slices(source):
            operands = q[:, rows], k[:, keys], v[:, keys]
            yield rows, attention(backend, *operands, is_causal, self.scale)

    def merge(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        part: torch.Tensor,
        part_lse: torch.Tensor,
        first: int,
    ) -> None:
        """Merge a part, which begins at token ``first``, into ``out`` and ``lse``."""
        batch, tokens, heads, dim = part.shape
        padded_dim = triton.next_power_of_2(dim)
        block = max(1, _MERGE_ELEMENTS // padded_dim)
        rows = batch * tokens * heads
        arguments = (out, lse, part, part_lse, rows, out.shape[1], tokens, first)
        options = {
            "HEADS": heads, "DIM": dim, "PADDED_DIM": padded_dim, "BLOCK": block, "num_warps": 4,
        }  # fmt: skip
        grid = (triton.cdiv(rows, block),)
        self.ctx.buffer.slots.launcher.repeat(Launch(kernel_merge, grid, arguments, options))

    def gradients(
        self, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v, given the gradient of ``out``."""
        ctx, q, num_ranks = self.ctx, self.q.detach(), self.ctx.num_ranks
        dq = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
        dkv = q.new_zeros((num_ranks, 2, *self.k.shape))

        def attend(await_shard: AwaitShard) -> None:
            for source, k, v in self.shards(await_shard):
                for rows, keys, is_causal in self.slices(source):
                    dq_part, *dkv_part = attention_gradients(
                        str(self.backend), grad[:, rows], q[:, rows], k[:, keys], v[:, keys],
                        out[:, rows], lse[:, :, rows], is_causal, self.scale,
                    )  # fmt: skip
                    dq[:, rows] += dq_part
                    dkv[source, 0, :, keys], dkv[source, 1, :, keys] = dkv_part

        self.chosen_algorithm.gather(self, attend)  # type: ignore[attr-defined]
        if num_ranks == 1:
            dk, dv = dkv[0]
        else:
            dk, dv = libraries.reduce_scatter(dkv.flatten(0, 1), ctx.group)
        return dq.to(q.dtype), dk, dv


def backends() -> tuple[str, ...]:
    """Return the names of the libraries for this device, the usually fastest first."""
    return ("cpu",) if current_device().torch_device.type == "cpu" else ("cudnn", "flash")


def attention(
    backend: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention, [batch, tokens, heads, dim], and its log-sum-exp, [batch, heads,
    tokens]."""
    ops = torch.ops.aten
    if backend == "cpu":
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if backend == "cpu":
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    elif backend == "flash":
        out, lse, *_ = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    else:
        out, lse, *_ = ops._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
    return out.transpose(1, 2).contiguous(), lse.reshape(q.shape[:3]).contiguous()


def attention_gradients(
    backend: str,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v. ``out`` and ``lse`` are results over all ranks' keys."""
    ops, groups = torch.ops.aten, q.shape[2] // k.shape[2]
    if backend == "cpu":
        k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    lse, lengths = lse.contiguous(), (q.shape[2], k.shape[2])
    if backend == "cpu":
        gradients = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        philox = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout
        rest = (None, None, *lengths, 0.0, causal)
        if backend == "flash":
            gradients = ops._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, *rest, philox, philox[:0], scale=scale
            )
        else:
            gradients = ops._scaled_dot_product_cudnn_attention_backward(
                grad, q, k, v, out, lse[..., None], philox[:1].long(), philox[:1].long(), None,
                *rest, scale=scale,
            )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    if backend == "cpu":
        dk, dv = (x.unflatten(2, (-1, groups)).sum(3) for x in (dk, dv))
    return dq, dk, dv


class _Algorithm(Algorithm[AttentionCall, AttentionKey]):
    """Base class of the algorithms. The library is a tunable."""

    tunables: ClassVar[tuple[str, ...]] = ("backend",)

    def fits(self, config: Mapping[str, Any], sizes: AttentionKey) -> bool:
        return True

    def run(self, call: AttentionCall) -> Any:
        return self.gather(call, call.attend)

    @abstractmethod
    def gather(self, call: AttentionCall, attend: Callable[[AwaitShard], R]) -> R:
        """Gather k and v of all ranks, and return ``attend(await_shard)``."""


class CopyEngine(_Algorithm):
    """Copy engines push k and v while the library attends to the parts that have arrived."""

    name = "copy_engine"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return [(backend,) for backend in backends()]

    def compile(self, call: AttentionCall) -> None:
        if call.ctx.num_ranks > 1:
            self.launch(call, 0).compile()

    def launch(self, call: AttentionCall, source: int) -> Launch:
        """Return the launch that waits for the k and v of rank ``source``."""
        slots = call.ctx.buffer.slots
        pushed = Pushed(slots["shards"].local, slots["arrivals"].local, slots.epoch)
        arguments = (pushed, call.digest, source)
        return Launch(kernel_await_shard, (1,), arguments, {"num_warps": 1})

    def gather(self, call: AttentionCall, attend: Callable[[AwaitShard], R]) -> R:
        slots = call.ctx.buffer.slots

        def await_shard(source: int) -> tuple[torch.Tensor, torch.Tensor]:
            key = kernel_await_shard, slots.index, call.digest, source
            slots.launcher.run(key, lambda: self.launch(call, source))
            return self.shard(call, call.ctx.rank, source)

        if call.ctx.num_ranks == 1:
            return attend(await_shard)
        return call.ctx.buffer.push(
            call.digest, call.k.shape, lambda: self.steps(call), (rows_of(call.k), rows_of(call.v)),
            lambda: attend(await_shard), lambda: 1,
        )  # fmt: skip

    @staticmethod
    def shard(call: AttentionCall, rank: int, source: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory on ``rank`` that receives the k and v of ``source``."""
        elements = call.k.numel()
        memory = call.ctx.buffer.slots["shards"].peers[rank].view(call.k.dtype)
        k, v = memory[2 * source * elements :][: 2 * elements].view(2, *call.k.shape)
        return k, v

    def steps(self, call: AttentionCall) -> Iterator[Step]:
        """Yield the copies of this rank's k and v, and of the flags."""
        ctx, slots = call.ctx, call.ctx.buffer.slots
        rows, width = call.k.shape[0] * call.k.shape[1], call.k.shape[2] * call.k.shape[3]
        for step in range(1, ctx.num_ranks):
            stream, peer = step % PUSH_STREAMS, (ctx.rank - step) % ctx.num_ranks
            for tensor, target in enumerate(self.shard(call, peer, ctx.rank)):
                part = InputRows(0, rows, (0, width), tensor)
                yield Copy(stream, target.view(rows, width), part)
            arrivals = slots["arrivals"].peers[peer]
            yield Copy(stream, arrivals[ctx.rank : ctx.rank + 1], slots.epoch[:1])


class Collective(_Algorithm):
    """All-gather by ``torch.distributed`` (NCCL, or gloo on CPU ranks), then all attention."""

    name = "collective"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        # CPU ranks test the kernels of this package, so libraries are no candidates there.
        return [(backend,) for backend in backends()] if current_device().has_nccl else []

    def gather(self, call: AttentionCall, attend: Callable[[AwaitShard], R]) -> R:
        k, v, batch, group = call.k, call.v, call.q.shape[0], call.ctx.group
        if call.ctx.num_ranks > 1:
            k, v = (libraries.all_gather_rows(x.detach().contiguous(), group) for x in (k, v))
        return attend(lambda source: (k[source * batch :][:batch], v[source * batch :][:batch]))


ALGORITHMS = Algorithms("sp_ag_attention", (CopyEngine(), Collective()))
