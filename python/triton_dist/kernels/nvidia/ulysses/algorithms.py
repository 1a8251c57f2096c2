"""Algorithms of the two Ulysses ops, which differ only in the direction of the exchange."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.collective.pushed import heads_check, row_stride
from triton_dist.kernels.common.context import (
    Check,
    checked_buffer,
    is_int,
    operand_checks,
    raise_first_error,
    tensor_checks,
)
from triton_dist.kernels.common.exchange.buffer import (
    MAX_CTAS,
    LaunchParams,
    checked_params,
)
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall
from triton_dist.kernels.common.peers import digest_of
from triton_dist.kernels.nvidia.ulysses import kernel
from triton_dist.kernels.nvidia.ulysses.context import UlyssesContext
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

_DEFAULT, _INTERPRETED = LaunchParams(64, 16384, 4), LaunchParams(2, 16384, 2)
_PUSH = tuple(
    LaunchParams(ctas, nbytes, chunks)
    for ctas, nbytes, every in (
        (16, 8192, (1, 4)), (64, 8192, (1, 4)), (32, 16384, (4, 8)), (128, 8192, (4, 8, 16)),
        (64, 16384, (1, 4, 8, 16)),
    )
    for chunks in every
)  # fmt: skip


class HeadsKey(NamedTuple):
    """Tuning key of a call. The algorithms also use it as the call's sizes."""

    M: int
    """Batch size times tokens of all ranks."""
    widths: tuple[int, ...]
    """Number of elements per token of q, k and v on a rank after ``ulysses_pre_attn``. 0 for a
    tensor that is ``None``."""
    dtype: torch.dtype
    replicas: int
    """Number of ranks that share a KV head."""
    is_batched: bool
    has_lengths: bool
    num_ranks: int


class Block(NamedTuple):
    """The blocks of one of the tensors q, k and v. A rank sends one block to each other rank."""

    part: int
    """0 for q, 1 for k and 2 for v."""
    x: torch.Tensor
    width: int
    """Number of elements of a row of the block."""
    skipped: int
    """Sum of the widths of the tensors before this one."""
    replicas: int
    """Number of ranks that share a head."""


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class HeadsCall(OpCall):
    """The arguments of one call, and values derived from them.

    The call is of ``ulysses_pre_attn`` if ``to_heads`` is true, else of ``ulysses_post_attn``.
    """

    to_heads: bool
    tensors: dict[str, Any]
    """Tensors by argument name, in the order q (or o), k, v."""
    ctx: UlyssesContext
    seq_lens: Sequence[int] | None = None
    num_ctas: int | None = None
    block_bytes: int | None = None
    num_chunks: int | None = None
    algorithm: str | None = None
    validated_key: Any = None
    function: str | None = None
    """Name of the op in errors, if another op contains this call."""

    def __post_init__(self) -> None:
        algorithms = PRE_ATTN if self.to_heads else POST_ATTN
        function = self.function or algorithms.function
        if self.validated_key is None:
            checked_buffer(self.ctx, UlyssesContext, function, "create_ulysses_context")
            raise_first_error(function, self.checks())
        self.x = list(self.tensors.values())
        first = self.x[0]
        self.batch, tokens = int(first.shape[0]), int(first.shape[1])
        ctx, lengths = self.ctx, self.seq_lens
        equal = tokens if self.to_heads else tokens // ctx.num_ranks
        self.lengths = (equal,) * ctx.num_ranks if lengths is None else tuple(map(int, lengths))
        self.total = sum(self.lengths)
        shards = [ctx.num_ranks // (ctx.replicas if part else 1) for part in range(3)]
        self.widths: tuple[int, ...] = tuple(
            0 if x is None else x.shape[2] * x.shape[3] // (number if self.to_heads else 1)
            for x, number in zip(self.x, shards, strict=True)
        )
        self.key: HeadsKey = self.validated_key or HeadsKey(
            self.batch * self.total, self.widths, first.dtype, ctx.replicas, self.batch > 1,
            lengths is not None, ctx.num_ranks,
        )  # fmt: skip
        self.chosen = algorithms[self.algorithm or Push.name]
        self.params = checked_params(
            function, self.num_ctas, self.block_bytes, self.num_chunks, default_params()
        )
        if self.params.num_ctas > MAX_CTAS // 2:
            raise InvalidArgument(function, "num_ctas", self.num_ctas, f"1 to {MAX_CTAS // 2}")

    def checks(self) -> Iterator[Check]:
        ctx, size, to_heads = self.ctx, self.ctx.num_ranks, self.to_heads
        (main, first), *others = self.tensors.items()
        given = {main: first} | {name: x for name, x in others if x is not None}
        yield from tensor_checks(**given)
        dims = ctx.head_dims[:1] if to_heads and len(given) > 1 else ctx.head_dims
        dims_of_parts = dims, ctx.head_dims[:1], ctx.head_dims[1:]
        for part, (name, x) in enumerate(self.tensors.items()):
            if x is None:
                continue
            heads, replicas = (ctx.kv_heads, ctx.replicas) if part else (ctx.q_heads, 1)
            heads, dims = heads if to_heads else heads * replicas // size, dims_of_parts[part]
            fits = x.ndim == 4 and x.shape[2] == heads and x.shape[3] in dims
            dim = " or ".join(map(str, dict.fromkeys(dims)))
            yield f"{name}.shape", tuple(x.shape), fits, f"[batch, tokens, {heads}, {dim}]"
            expected = f"batch and tokens of {main}, {tuple(first.shape[:2])}"
            yield f"{name}.shape", tuple(x.shape), x.shape[:2] == first.shape[:2], expected
            yield from operand_checks(ctx.dtype, ctx.device.torch_device, **{name: x})
            if to_heads:
                yield from heads_check(name, x)
            else:
                yield f"{name}.stride()", x.stride(), x.is_contiguous(), "a contiguous tensor"
        yield from token_checks(ctx, main, first.shape, self.seq_lens, to_heads)
        yield "v", "a tensor", "v" not in given or "k" in given, "None if k is None"

    @property
    def agreement(self) -> str:
        """Text that, like the tuning key, must be equal on all ranks."""
        return f"{self.batch} batches, seq_lens {self.lengths}"

    def outputs(self) -> list[Any]:
        """Return uninitialised memory for the results, ``None`` for absent tensors."""
        tokens = self.total if self.to_heads else self.own_tokens
        out: list[Any] = [None] * 3
        for block in self.blocks():
            shards = 1 if self.to_heads else self.ctx.num_ranks // block.replicas
            heads, dim = shards * block.width // block.x.shape[3], block.x.shape[3]
            out[block.part] = block.x.new_empty(self.batch, tokens, heads, dim)
        return out

    @property
    def device_lengths(self) -> torch.Tensor | None:
        """``UlyssesContext.lengths`` of the call, ``None`` without ``seq_lens``."""
        return self.ctx.lengths(self.lengths) if self.key.has_lengths else None

    @property
    def own_tokens(self) -> int:
        return self.lengths[self.ctx.rank]

    @property
    def digest(self) -> int:
        """Call tag, a digest of the arguments that must be equal on all ranks."""
        return digest_of(self.to_heads, self.batch, self.lengths, self.widths, self.params.values)

    def blocks(self) -> Iterator[Block]:
        skipped = 0
        for part, (x, width) in enumerate(zip(self.x, self.widths, strict=True)):
            if x is not None:
                replicas = self.ctx.replicas if part else 1
                yield Block(part, x, width, skipped, replicas)
            skipped += width


def token_checks(
    ctx: UlyssesContext, name: str, shape: Sequence[int], lengths: Sequence[int] | None, local: bool
) -> Iterator[Check]:
    """Yield checks of ``seq_lens`` and of the tensor ``name``, whose ``shape`` begins with batch
    and tokens: of this rank if ``local`` is true, else of all ranks."""
    size, (batch, tokens, *_) = ctx.num_ranks, shape
    if lengths is not None:
        fits = isinstance(lengths, Sequence) and len(lengths) == size
        fits = fits and all(is_int(n) and n >= 0 for n in lengths)
        yield "seq_lens", lengths, fits, f"None, or the tokens of each of the {size} ranks"
        required = lengths[ctx.rank] if local else sum(lengths)
        fits, expected = tokens == required, f"{required} tokens, as seq_lens = {lengths} require"
    else:
        fits = local or tokens % size == 0
        expected = f"tokens that are a multiple of world_size = {size}, or seq_lens"
        lengths = [tokens if local else tokens // size] * size
    yield f"{name}.shape", tuple(shape), fits, expected
    expected = f"1 to {ctx.max_tokens} tokens of all ranks, the max_tokens of the context"
    fits = 1 <= batch * sum(lengths) <= ctx.max_tokens
    yield f"{name}.shape", tuple(shape), fits, expected
    expected = f"at most {ctx.max_local_tokens} tokens of a rank (max_local_tokens)"
    yield f"{name}.shape", tuple(shape), batch * max(lengths) <= ctx.max_local_tokens, expected


def default_params() -> LaunchParams:
    """Return the launch parameters of calls that pass none.

    The interpreter gets few programs, because it runs them one after the other.
    """
    return _INTERPRETED if current_device().interprets else _DEFAULT


def plan_of(call: HeadsCall) -> kernel.UlyssesPlan:
    ctx, params, (q, k, v) = call.ctx, call.params, call.widths
    return kernel.UlyssesPlan(
        ctx.num_ranks, triton.next_power_of_2(ctx.num_ranks),
        params.block_bytes // call.key.dtype.itemsize, params.num_chunks, params.num_ctas,
        call.to_heads, q, k, v, ctx.replicas, call.batch > 1,
    )  # fmt: skip


def pre_attn_call(
    q: Any, k: Any, v: Any, ctx: UlyssesContext, *options: Any, **others: Any
) -> HeadsCall:
    """Return the call of ``ulysses_pre_attn`` with the given arguments."""
    return HeadsCall(True, {"q": q, "k": k, "v": v}, ctx, *options, **others)


def post_attn_call(
    o: Any, ctx: UlyssesContext, k: Any = None, v: Any = None, *options: Any, **others: Any
) -> HeadsCall:
    """Return the call of ``ulysses_post_attn`` with the given arguments."""
    return HeadsCall(False, {"o": o, "k": k, "v": v}, ctx, *options, **others)


class _Algorithm(Algorithm[HeadsCall, HeadsKey]):
    """Base class of the algorithms of both ops."""

    def run(self, call: HeadsCall) -> Any:
        out = call.outputs()
        if call.ctx.num_ranks > 1:
            self.move(call, out)
        else:
            for block in call.blocks():
                out[block.part].copy_(block.x)
        return tuple(each for each in out if each is not None)

    @abstractmethod
    def move(self, call: HeadsCall, out: list[Any]) -> None:
        """Exchange blocks between several ranks, and store the results in ``out``."""


class Push(_Algorithm):
    """Programs store blocks in the slots of other ranks, and copy received blocks to ``out``."""

    name = "push"
    tunables = "num_ctas", "block_bytes", "num_chunks"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        candidates = dict.fromkeys((default_params(), *_PUSH))
        return (params.values for params in candidates)

    def fits(self, config: Mapping[str, Any], sizes: HeadsKey) -> bool:
        # Each program must have a block of q to send per chunk, or the config must be the smallest.
        nbytes = sizes.M // sizes.num_ranks * sizes.widths[0] * sizes.dtype.itemsize
        block, chunks = config["block_bytes"], config["num_chunks"]
        step = config["num_ctas"] * block * chunks
        return nbytes >= step or (config["num_ctas"], block, chunks) == _PUSH[0].values

    def compile(self, call: HeadsCall) -> None:
        if call.ctx.num_ranks > 1:
            self.launch(call, call.outputs()).compile()

    def move(self, call: HeadsCall, out: list[Any]) -> None:
        buffer, params = call.ctx.buffer, call.params
        buffer.begin(1, params.num_ctas, params.num_chunks)
        self.repeat(buffer.launcher, call, out)
        buffer.timeout_words.end()

    def repeat(self, launcher: Any, call: HeadsCall, out: list[Any]) -> None:
        """Launch the kernel, or repeat the launch of an earlier call with other addresses."""
        tensors = {
            f"{name}.{head}": each
            for name, each_of in (("x", call.x), ("results", out))
            for head, each in zip("qkv", each_of, strict=True)
            if each is not None
        }
        strides = tuple(None if x is None else row_stride(x) for x in call.x)
        slot = call.ctx.pushed.slots.index
        lengths = call.device_lengths
        key = (
            self.name, slot, call.key, call.batch, call.lengths, call.params, strides,
            call.to_heads, id(lengths),
        )  # fmt: skip
        launcher.run(key, lambda: self.launch(call, out), tensors, keep_alive=lengths)

    def launch(self, call: HeadsCall, out: Sequence[Any]) -> Launch:
        params, lengths = call.params, call.device_lengths
        x = [None if each is None else each.detach() for each in call.x]
        strides = [None if each is None else row_stride(each) for each in x]
        arguments = (
            kernel.Heads(*x), kernel.Heads(*strides), kernel.Heads(*out), kernel.Sequence(lengths),
            *self.memory(call), call.lengths[0] if lengths is None else 0, call.total, call.batch,
            call.digest, call.ctx.rank,
        )  # fmt: skip
        options = {"plan": plan_of(call), "num_warps": params.num_warps}
        return Launch(self.kernel, (self.programs * params.num_ctas,), arguments, options)

    programs: ClassVar[int] = 2
    """Number of programs per worker. One sends and one receives."""
    kernel: ClassVar[Any] = kernel.kernel_exchange_heads

    def memory(self, call: HeadsCall) -> tuple[Any, ...]:
        """Return the arguments of the kernel that describe the memory of the context."""
        return call.ctx.buffer.regions(call.key.dtype)


class Collective(_Algorithm):
    """All-to-all by ``torch.distributed`` (NCCL, or gloo on CPU ranks) between two permutations."""

    name = "collective"
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        # CPU ranks test the kernels of this package, so libraries are no candidates there.
        return [()] if current_device().has_nccl else []

    def fits(self, config: Mapping[str, Any], sizes: HeadsKey) -> bool:
        return sizes.num_ranks > 1

    def move(self, call: HeadsCall, out: list[Any]) -> None:
        ctx, batch, lengths, sent = call.ctx, call.batch, call.lengths, []
        for peer in range(ctx.num_ranks):
            for _, x, width, _, replicas in call.blocks():
                if call.to_heads:
                    heads = width // x.shape[3]
                    block = x.narrow(2, peer // replicas * heads, heads)
                else:
                    block = x.narrow(1, sum(lengths[:peer]), lengths[peer])
                sent.append(block.reshape(-1))
        per_token = batch * sum(call.widths)
        own_sizes = [per_token * call.own_tokens] * ctx.num_ranks
        peer_sizes = [per_token * tokens for tokens in lengths]
        sent_sizes, received_sizes = (
            (own_sizes, peer_sizes) if call.to_heads else (peer_sizes, own_sizes)
        )
        received = sent[0].new_empty(sum(received_sizes))
        dist.all_to_all_single(
            received, torch.cat(sent), received_sizes, sent_sizes, group=ctx.group
        )
        for part, _, width, skipped, replicas in call.blocks():
            rows = []
            for source, all_rows in enumerate(received.split(received_sizes)):
                tokens = lengths[source] if call.to_heads else call.own_tokens
                block = all_rows[batch * tokens * skipped :][: batch * tokens * width]
                rows.append(block.view(batch, tokens, width))
            target = out[part].flatten(2)
            if replicas == 1 or call.to_heads:
                torch.cat(rows, 1 if call.to_heads else 2, out=target)
            else:
                sums = torch.stack(rows).unflatten(0, (-1, replicas)).sum(1, dtype=torch.float32)
                target.copy_(torch.cat(tuple(sums), 2))


PRE_ATTN = Algorithms("ulysses_pre_attn", (Push(), Collective()))
POST_ATTN = Algorithms("ulysses_post_attn", (Push(), Collective()))
