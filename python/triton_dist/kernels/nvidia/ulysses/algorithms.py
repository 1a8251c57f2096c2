"""Algorithms of the Ulysses ops, which differ only in the direction."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import InvalidArgument
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
    params_for_device,
)
from triton_dist.kernels.common.exchange.pushed import Pushed
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall
from triton_dist.kernels.common.peers import fold_to_tag
from triton_dist.kernels.common.slots.epochs import PUSH_STREAMS
from triton_dist.kernels.nvidia.ulysses import kernel
from triton_dist.kernels.nvidia.ulysses.context import UlyssesContext
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.transfer import Copy, InputRows, Step
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
_COPY_ENGINE = tuple(
    LaunchParams(ctas, 16384, chunks) for ctas in (32, 64, 128) for chunks in (2, 4, 8)
)
_MIN_COPY_ENGINE_BYTES = 1 << 20


class HeadsKey(NamedTuple):
    """Tuning key of a call, which is also its sizes."""

    M: int
    """Batch size times tokens of all ranks."""
    widths: tuple[int, int, int]
    """Elements of a token of q, k and v on a rank after ``ulysses_pre_attn``; 0 without it."""
    dtype: torch.dtype
    replicas: int
    is_batched: bool
    has_lengths: bool
    num_ranks: int


class HeadsCall(OpCall):
    """Base of the calls, which are dataclasses."""

    algorithms: ClassVar[Algorithms[Any, Any]]
    to_heads: ClassVar[bool]
    """True if the call exchanges the sequence for the heads."""
    ctx: UlyssesContext
    seq_lens: Sequence[int] | None
    num_ctas: int | None
    block_bytes: int | None
    num_chunks: int | None
    algorithm: str | None
    accepted_key: Any

    @property
    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors of the call by the names of its arguments, in the order q, k, v."""

    def __post_init__(self) -> None:
        function = self.algorithms.function
        if self.accepted_key is None:
            checked_buffer(self.ctx, UlyssesContext, function, "create_ulysses_context")
            raise_first_error(function, self.checks())
        self.x = list(self.tensors.values())
        first = self.x[0]
        assert first is not None
        self.batch, own = int(first.shape[0]), int(first.shape[1])
        ctx, lengths = self.ctx, self.seq_lens
        equal = own if self.to_heads else own // ctx.num_ranks
        self.lengths = (equal,) * ctx.num_ranks if lengths is None else tuple(map(int, lengths))
        self.total = sum(self.lengths)
        heads = [0 if each is None else each.shape[2] * each.shape[3] for each in self.x]
        if self.to_heads:
            heads = [
                width // (ctx.num_ranks // (ctx.replicas if part else 1))
                for part, width in enumerate(heads)
            ]
        self.widths = (heads[0], heads[1], heads[2])
        self.key = self.accepted_key or HeadsKey(
            self.batch * self.total, self.widths, first.dtype, ctx.replicas, self.batch > 1,
            lengths is not None, ctx.num_ranks,
        )  # fmt: skip
        self.chosen = self.algorithms[self.algorithm or Push.name]
        self.params = checked_params(
            function, self.num_ctas, self.block_bytes, self.num_chunks, default_params()
        )
        if self.params.num_ctas > MAX_CTAS // 2:
            raise InvalidArgument(function, "num_ctas", self.num_ctas, f"1 to {MAX_CTAS // 2}")

    def checks(self) -> Iterator[Check]:
        ctx, names = self.ctx, list(self.tensors)
        given = {name: each for name, each in self.tensors.items() if each is not None}
        yield from tensor_checks(**{names[0]: self.tensors[names[0]], **given})
        lengths, size = self.seq_lens, ctx.num_ranks
        if lengths is not None:
            expected = f"None, or the tokens of each of the {size} ranks"
            fits = isinstance(lengths, Sequence) and len(lengths) == size
            yield "seq_lens", lengths, fits and all(is_int(n) and n >= 0 for n in lengths), expected
        first = given[names[0]]
        for name, x in given.items():
            part = names.index(name)
            heads = ctx.kv_heads if part else ctx.q_heads
            replicas = ctx.replicas if part else 1
            local = heads if self.to_heads else heads * replicas // size
            dims = (ctx.head_dims[0],) if part == 1 else (ctx.head_dims[1],) if part else (
                ctx.head_dims[:1] if self.to_heads and len(given) > 1 else ctx.head_dims
            )  # fmt: skip
            shape, dim = tuple(x.shape), " or ".join(map(str, dict.fromkeys(dims)))
            fits = x.ndim == 4 and shape[2] == local and shape[3] in dims
            yield f"{name}.shape", shape, fits, f"[batch, tokens, {local}, {dim}]"
            fits = shape[:2] == tuple(first.shape[:2])
            expected = f"batch and tokens of {names[0]}, {tuple(first.shape[:2])}"
            yield f"{name}.shape", shape, fits, expected
            yield from operand_checks(ctx.dtype, ctx.device.torch_device, **{name: x})
            fits = self.has_rows(x) if self.to_heads else x.is_contiguous()
            rows = "contiguous heads, with one distance between all tokens"
            expected = rows if self.to_heads else "a contiguous tensor"
            yield f"{name}.stride()", x.stride(), fits, expected
        batch, tokens = int(first.shape[0]), int(first.shape[1])
        if lengths is not None:
            whole = lengths[ctx.rank] if self.to_heads else sum(lengths)
            expected = f"{whole} tokens, as seq_lens = {tuple(lengths)} require"
            yield f"{names[0]}.shape", tuple(first.shape), tokens == whole, expected
            most, total = max(lengths), sum(lengths)
        else:
            fits = self.to_heads or tokens % size == 0
            expected = f"tokens that are a multiple of world_size = {size}, or seq_lens"
            yield f"{names[0]}.shape", tuple(first.shape), fits, expected
            most = tokens if self.to_heads else tokens // size
            total = most * size
        fits = 1 <= batch * total <= ctx.max_tokens
        expected = f"1 to {ctx.max_tokens} tokens of all ranks, the max_tokens of the context"
        yield f"{names[0]}.shape", tuple(first.shape), fits, expected
        fits = batch * most <= ctx.max_local_tokens
        expected = f"at most {ctx.max_local_tokens} tokens of a rank (max_local_tokens)"
        yield f"{names[0]}.shape", tuple(first.shape), fits, expected
        v = tuple(given["v"].shape) if "v" in given else None
        yield "v", v, v is None or "k" in given, "None if k is None"

    @staticmethod
    def has_rows(x: torch.Tensor) -> bool:
        """Return whether heads are contiguous and all tokens have one distance."""
        batch, tokens, heads, dim = x.shape
        in_row = x.stride(3) == 1 and (heads == 1 or x.stride(2) == dim)
        one_distance = 1 in (batch, tokens) or x.stride(0) == tokens * x.stride(1)
        return x.is_contiguous() or (in_row and one_distance)

    @classmethod
    def key_fn(cls, *args: Any, **kwargs: Any) -> HeadsKey:
        """Return the key that a tuning is recorded under. Raise if the call cannot work."""
        key: HeadsKey = cls(*args, **kwargs).key
        return key

    @classmethod
    def agree_fn(cls, *args: Any, **kwargs: Any) -> str:
        """Return the text on which ranks must agree in addition to the key."""
        call = cls(*args, **kwargs)
        return f"{call.batch} batches, seq_lens {call.lengths}"

    def run_all(self) -> tuple[torch.Tensor, ...]:
        result: Any = self.run()
        return result  # type: ignore[no-any-return]

    def outputs(self) -> list[torch.Tensor | None]:
        """Return uninitialised results."""
        ctx, shape = self.ctx, (self.batch, self.total if self.to_heads else self.own_tokens)
        out: list[torch.Tensor | None] = []
        for part, (x, width) in enumerate(zip(self.x, self.widths, strict=True)):
            if x is None:
                out.append(None)
                continue
            shards = 1 if self.to_heads else ctx.num_ranks // (ctx.replicas if part else 1)
            out.append(x.new_empty(*shape, shards * width // x.shape[3], x.shape[3]))
        return out

    @property
    def own_tokens(self) -> int:
        return self.lengths[self.ctx.rank]

    @property
    def digest(self) -> int:
        """Value that must be equal on all ranks."""
        text = repr((self.to_heads, self.batch, self.lengths, self.widths, self.params.values))
        return fold_to_tag(zlib.crc32(text.encode()))

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield part, elements of a row, first column of rank 0, and replicas of each tensor."""
        skipped = 0
        for part, width in enumerate(self.widths):
            if width:
                yield part, width, skipped, self.ctx.replicas if part else 1
            skipped += width

    def start_of(self, source: int, target: int) -> int:
        """Return the begin of a block in the slot of ``target``, in rows of all tensors."""
        if self.to_heads:
            return self.batch * sum(self.lengths[:source])
        return source * self.batch * self.lengths[target]

    def arguments(self, out: Sequence[torch.Tensor | None]) -> tuple[tuple[Any, ...], ...]:
        """Return the arguments of a kernel before and after its memory."""
        ctx = self.ctx
        x = [None if each is None else each.detach() for each in self.x]
        strides = [None if each is None else row_stride(each) for each in x]
        lengths = ctx.lengths(self.lengths) if self.key.has_lengths else None
        before = (
            kernel.Heads(*x), kernel.Heads(*strides), kernel.Heads(*out), kernel.Sequence(lengths),
        )  # fmt: skip
        length = 0 if self.key.has_lengths else self.lengths[0]
        return before, (length, self.total, self.batch, self.digest, ctx.rank)

    def plan(self) -> kernel.UlyssesPlan:
        ctx, block = self.ctx, self.params.block_bytes // self.key.dtype.itemsize
        return kernel.UlyssesPlan(
            ctx.num_ranks, triton.next_power_of_2(ctx.num_ranks), block, self.params.num_chunks,
            self.params.num_ctas, self.to_heads, *self.widths, ctx.replicas, self.batch > 1,
        )  # fmt: skip


def default_params() -> LaunchParams:
    """Return the parameters of calls that pass none. The interpreter runs programs in sequence."""
    return _INTERPRETED if current_device().interprets else _DEFAULT


def row_stride(x: torch.Tensor) -> int:
    """Return the elements between two tokens."""
    if x.is_contiguous():  # whose strides of dimensions of size 1 are arbitrary
        return x.shape[2] * x.shape[3]
    return int(x.stride(1) if x.shape[1] > 1 else x.stride(0))


@dataclass(eq=False, repr=False)  # not frozen: created per call, and freezing costs 1 us
class PreAttnCall(HeadsCall):
    """One call of ``ulysses_pre_attn``: its arguments."""

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    ctx: UlyssesContext
    seq_lens: Sequence[int] | None = None
    num_ctas: int | None = None
    block_bytes: int | None = None
    num_chunks: int | None = None
    algorithm: str | None = None
    accepted_key: Any = None
    to_heads = True

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        return {"q": self.q, "k": self.k, "v": self.v}


@dataclass(eq=False, repr=False)
class PostAttnCall(HeadsCall):
    """One call of ``ulysses_post_attn``: its arguments."""

    o: torch.Tensor
    ctx: UlyssesContext
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    seq_lens: Sequence[int] | None = None
    num_ctas: int | None = None
    block_bytes: int | None = None
    num_chunks: int | None = None
    algorithm: str | None = None
    accepted_key: Any = None
    to_heads = False

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        return {"o": self.o, "k": self.k, "v": self.v}


class _Algorithm(Algorithm[HeadsCall, HeadsKey]):
    """Base of the algorithms of both ops."""

    def run(self, call: HeadsCall) -> Any:
        out = call.outputs()
        if call.ctx.num_ranks > 1:
            self.move(call, out)
        else:
            for target, x in zip(out, call.x, strict=True):
                if target is not None and x is not None:
                    target.copy_(x.detach())
        return tuple(each for each in out if each is not None)

    @abstractmethod
    def move(self, call: HeadsCall, out: list[torch.Tensor | None]) -> None:
        """Launch the exchange over several ranks."""


class Push(_Algorithm):
    """Programs store blocks into the slots of the other ranks and copy out what arrives."""

    name = "push"
    tunables = "num_ctas", "block_bytes", "num_chunks"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        candidates = dict.fromkeys((default_params(), *_PUSH))
        return (params.values for params in candidates)

    def fits(self, config: Mapping[str, Any], sizes: HeadsKey) -> bool:
        # Each program has a block of q to send per chunk, or the config is the smallest.
        nbytes = sizes.M // sizes.num_ranks * sizes.widths[0] * sizes.dtype.itemsize
        block, chunks = config["block_bytes"], config["num_chunks"]
        step = config["num_ctas"] * block * chunks
        return nbytes >= step or (config["num_ctas"], block, chunks) == _PUSH[0].values

    def compile(self, call: HeadsCall) -> None:
        if call.ctx.num_ranks > 1:
            self.launch(call, call.outputs()).compile()

    def move(self, call: HeadsCall, out: list[torch.Tensor | None]) -> None:
        buffer, params = call.ctx.buffer, call.params
        buffer.begin(1, params.num_ctas, params.num_chunks)
        self.repeat(buffer.launcher, call, out)
        buffer.timeout_words.end()

    def repeat(self, launcher: Any, call: HeadsCall, out: list[torch.Tensor | None]) -> None:
        """Launch the kernel, or repeat the launch of a call that differs only in addresses."""
        tensors = {
            f"{name}.{head}": each
            for name, each_of in (("x", call.x), ("results", out))
            for head, each in zip("qkv", each_of, strict=True)
            if each is not None
        }
        strides = tuple(None if x is None else row_stride(x) for x in call.x)
        slot = call.ctx.pushed.slots.index
        lengths = call.ctx.lengths(call.lengths) if call.key.has_lengths else None
        key = (
            self.name, slot, call.key, call.batch, call.lengths, call.params, strides,
            call.to_heads, id(lengths),
        )  # fmt: skip
        launcher.run(key, lambda: self.launch(call, out), tensors, keep_alive=lengths)

    def launch(self, call: HeadsCall, out: Sequence[torch.Tensor | None]) -> Launch:
        before, after = call.arguments(out)
        memory = self.memory(call)
        options = {"plan": call.plan(), "num_warps": call.params.num_warps}
        arguments = (*before, *memory, *after)
        grid = (self.programs * call.params.num_ctas,)
        return Launch(self.kernel, grid, arguments, options)

    programs: ClassVar[int] = 2
    """Programs per worker: one that sends and one that receives."""
    kernel: ClassVar[Any] = kernel.kernel_exchange_heads

    def memory(self, call: HeadsCall) -> tuple[Any, ...]:
        """Return the arguments of the kernel that describe the memory of the context."""
        return call.ctx.buffer.regions(call.key.dtype)


class CopyEngine(Push):
    """Copy engines push chunks of blocks; a kernel copies out what arrives."""

    name = "copy_engine"
    programs = 1
    kernel = kernel.kernel_receive_heads

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return (params.values for params in map(params_for_device, _COPY_ENGINE))

    def fits(self, config: Mapping[str, Any], sizes: HeadsKey) -> bool:
        nbytes = sizes.M * sum(sizes.widths) * sizes.dtype.itemsize
        return sizes.num_ranks > 1 and nbytes >= _MIN_COPY_ENGINE_BYTES

    def memory(self, call: HeadsCall) -> tuple[Any, ...]:
        slots = call.ctx.pushed.slots
        shards, arrivals = slots["shards"].local.view(call.key.dtype), slots["arrivals"].local
        return (Pushed(shards, arrivals, slots.epoch),)

    def move(self, call: HeadsCall, out: list[torch.Tensor | None]) -> None:
        pushed = call.ctx.pushed
        slots, awaited, transfer = pushed.slots, False, None
        slots.take(call.digest, copied=True)
        stream = call.ctx.device.current_stream()
        try:
            key = slots.index, call.to_heads, call.batch, call.lengths, call.key, call.params
            transfer = pushed.transfer(key, lambda: self.steps(call))
            transfer.start(tuple(rows_of(x.detach()) for x in call.x if x is not None), stream)
            self.repeat(slots.launcher, call, out)
            awaited = True
        finally:
            if transfer is not None:
                transfer.join(stream)
            flags = pushed.flags_of_peers(call.params.num_chunks)
            slots.finish(awaited, expected=lambda: {"arrivals": flags})

    def steps(self, call: HeadsCall) -> Iterator[Step]:
        """Yield the copies of this rank's blocks, chunk by chunk, as the kernel cuts them."""
        ctx, slots, chunks = call.ctx, call.ctx.pushed.slots, call.params.num_chunks
        for chunk in range(chunks):
            for step in range(1, ctx.num_ranks):
                stream = (chunk * (ctx.num_ranks - 1) + step) % PUSH_STREAMS
                peer = (ctx.rank + step) % ctx.num_ranks
                rows = call.batch * call.lengths[ctx.rank if call.to_heads else peer]
                chunk_rows = -(-rows // chunks)
                first, end = min(chunk * chunk_rows, rows), min((chunk + 1) * chunk_rows, rows)
                start = call.start_of(ctx.rank, peer) * sum(call.widths)
                target = slots["shards"].peers[peer].view(call.key.dtype)[start:]
                for tensor, (_, width, skipped, replicas) in enumerate(call.blocks()):
                    columns = None
                    if call.to_heads:
                        columns = (peer // replicas * width, (peer // replicas + 1) * width)
                    block = target[rows * skipped :][: rows * width].view(rows, width)
                    for begin, stop, source in self.pieces(call, peer, first, end):
                        part = InputRows(source, source + stop - begin, columns, tensor)
                        yield Copy(stream, block[begin:stop], part)
                flag = chunk * ctx.num_ranks + ctx.rank
                yield Copy(stream, slots["arrivals"].peers[peer][flag : flag + 1], slots.epoch[:1])

    @staticmethod
    def pieces(call: HeadsCall, peer: int, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield rows of a block that are adjacent in x: first, end, and first row of x."""
        if call.to_heads:
            if first < end:
                yield first, end, first
            return
        tokens, before = call.lengths[peer], sum(call.lengths[:peer])
        while first < end:
            number, token = divmod(first, tokens)
            stop = min(end, (number + 1) * tokens)
            yield first, stop, number * call.total + before + token
            first = stop


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return [batch * tokens, heads * dim] of a tensor."""
    batch, tokens, heads, dim = x.shape
    return x.as_strided((batch * tokens, heads * dim), (row_stride(x), 1))


class Collective(_Algorithm):
    """The group's all-to-all (NCCL; gloo on CPU ranks) between two permutations."""

    name = "collective"
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        # CPU ranks test our kernels, so the library is not a candidate there.
        return [()] if current_device().has_nccl else []

    def fits(self, config: Mapping[str, Any], sizes: HeadsKey) -> bool:
        return sizes.num_ranks > 1

    def move(self, call: HeadsCall, out: list[torch.Tensor | None]) -> None:
        ctx = call.ctx
        sent = [
            self.part(call, x.detach(), peer, width, replicas).reshape(-1)
            for peer in range(ctx.num_ranks)
            for (_, width, _, replicas), x in zip(
                call.blocks(), (x for x in call.x if x is not None), strict=True
            )
        ]
        total = sum(call.widths)
        own = call.batch * call.own_tokens * total
        others = [call.batch * tokens * total for tokens in call.lengths]
        owns = [own] * ctx.num_ranks
        sizes, received_sizes = (owns, others) if call.to_heads else (others, owns)
        received = sent[0].new_empty(sum(received_sizes))
        dist.all_to_all_single(
            received, torch.cat(sent), received_sizes, sizes, group=ctx.group
        )  # fmt: skip
        blocks = received.split(received_sizes)
        for part, width, skipped, replicas in call.blocks():
            target = out[part]
            assert target is not None
            rows = [
                self.rows_of_block(call, blocks, s, width, skipped) for s in range(ctx.num_ranks)
            ]
            if call.to_heads:
                torch.cat(rows, 1, out=target.view(call.batch, call.total, width))
                continue
            columns = ctx.num_ranks // replicas * width
            flat = target.view(call.batch, call.own_tokens, columns)
            if replicas == 1:
                torch.cat(rows, 2, out=flat)
                continue
            shared = [rows[shard : shard + replicas] for shard in range(0, len(rows), replicas)]
            sums = [torch.stack(each).sum(0, dtype=torch.float32) for each in shared]
            flat.copy_(torch.cat(sums, 2))

    @staticmethod
    def part(
        call: HeadsCall, x: torch.Tensor, peer: int, width: int, replicas: int
    ) -> torch.Tensor:
        """Return the block of x for a rank."""
        if call.to_heads:
            heads = width // x.shape[3]
            return x[:, :, peer // replicas * heads :][:, :, :heads]
        before = sum(call.lengths[:peer])
        return x[:, before : before + call.lengths[peer]]

    @staticmethod
    def rows_of_block(
        call: HeadsCall, blocks: Sequence[torch.Tensor], source: int, width: int, skipped: int
    ) -> torch.Tensor:
        """Return [batch, tokens, width] of the block of a rank."""
        tokens = call.lengths[source] if call.to_heads else call.own_tokens
        rows = call.batch * tokens
        block = blocks[source][rows * skipped :][: rows * width]
        return block.view(call.batch, tokens, width)


PRE_ATTN = Algorithms("ulysses_pre_attn", (Push(), CopyEngine(), Collective()))
POST_ATTN = Algorithms("ulysses_post_attn", (Push(), CopyEngine(), Collective()))
PreAttnCall.algorithms, PostAttnCall.algorithms = PRE_ATTN, POST_ATTN
