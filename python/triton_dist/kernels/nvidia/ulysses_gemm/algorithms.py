"""Algorithms of the Ulysses ops with projections: their candidates, checks and launches."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from triton_dist.kernels.common.collective.pushed import rows_of
from triton_dist.kernels.common.context import (
    Check,
    checked_buffer,
    layout_of,
    operand_checks,
    raise_first_error,
    tensor_checks,
)
from triton_dist.kernels.common.exchange.buffer import LaunchParams, params_for_device
from triton_dist.kernels.common.exchange.pushed import Pushed
from triton_dist.kernels.common.gemm import spaces
from triton_dist.kernels.common.gemm.tile import Strides
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall, check_tiles
from triton_dist.kernels.common.scatter.tiles import Tile, tile_constants
from triton_dist.kernels.common.slots.epochs import PUSH_STREAMS
from triton_dist.kernels.nvidia.ulysses import UlyssesContext
from triton_dist.kernels.nvidia.ulysses.algorithms import (
    PRE_ATTN,
    HeadsCall,
    HeadsKey,
    Push,
    plan_of,
    post_attn_call,
    pre_attn_call,
    token_checks,
)
from triton_dist.kernels.nvidia.ulysses.kernel import Heads
from triton_dist.kernels.nvidia.ulysses.kernel import Sequence as Lengths
from triton_dist.kernels.nvidia.ulysses_gemm.kernel import (
    kernel_gemm_received,
    kernel_gemm_send,
    kernel_receive_heads,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.transfer import Copy, InputRows
from triton_dist.runtime.launch import Launch, dot_precision, fits_descriptor, normalise_strides

_RECEIVE = LaunchParams(128, 16384)
"""Launch parameters of the kernel that copies received blocks to the results."""
_MIN_TOKENS = 6000
"""Minimum tokens of all ranks for ``"fused"``; with fewer, ``"serial"`` was faster (2 H200)."""
_CHUNKS = (2, 4, 8)
_NUM_TILES = 3
"""Number of tile shapes that are tried with all ``_CHUNKS``, instead of the second of them."""


class HeadsProductKey(NamedTuple):
    """Tuning key of a call: the fields of ``HeadsKey``, and others."""

    M: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    replicas: int
    is_batched: bool
    has_lengths: bool
    num_ranks: int
    hidden: int
    """Number of columns of x, or of the result of ``ulysses_post_attn_gemm``."""
    layout: str
    """Layout of B."""
    has_bias: bool

    @property
    def exchange(self) -> HeadsKey:
        return HeadsKey(*self[:7])


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class ProductCall(OpCall):
    """The arguments of one call, and values derived from them.

    The call is of ``ulysses_gemm_pre_attn`` if ``to_heads`` is true, else of
    ``ulysses_post_attn_gemm``.
    """

    to_heads: bool
    x: torch.Tensor
    B: torch.Tensor
    ctx: UlyssesContext
    bias: torch.Tensor | None = None
    seq_lens: Sequence[int] | None = None
    gemm_config: triton.Config | None = None
    persistent: bool = True
    num_ctas: int | None = None
    block_bytes: int | None = None
    num_chunks: int | None = None
    algorithm: str | None = None
    validated_key: Any = None

    def __post_init__(self) -> None:
        algorithms = GEMM_PRE_ATTN if self.to_heads else POST_ATTN_GEMM
        self.function = function = algorithms.function
        is_new = self.validated_key is None
        self.chosen: _Algorithm = algorithms[self.algorithm or Fused.name]  # type: ignore[assignment]
        options = (
            self.seq_lens, self.num_ctas, self.block_bytes, self.num_chunks, self.chosen.exchange,
        )  # fmt: skip
        # An ``validated_key`` of () skips the checks of the exchange, which then makes the key.
        if self.to_heads:
            if is_new:
                checked_buffer(self.ctx, UlyssesContext, function, "create_ulysses_context")
                raise_first_error(function, self.token_checks())
            memory = self.x.new_empty(())
            q, k, v = (memory.expand(*self.x.shape[:2], *shape) for shape in self.head_shapes)
            self.exchange = pre_attn_call(q, k, v, self.ctx, *options, (), function)
        else:
            checked = None if is_new else ()
            self.exchange = post_attn_call(
                self.x, self.ctx, None, None, *options, checked, function
            )
        if is_new:
            raise_first_error(function, self.operand_checks())
        hidden = self.x.shape[2] if self.to_heads else self.B.shape[1]
        self.key = self.validated_key or HeadsProductKey(
            *self.exchange.key, hidden, layout_of(self.B), self.bias is not None
        )
        self.chosen.check(self)

    @property
    def head_shapes(self) -> tuple[tuple[int, int], ...]:
        """(heads, elements of a head) of q, k and v."""
        ctx, (dim, v_dim) = self.ctx, self.ctx.head_dims
        return (ctx.q_heads, dim), (ctx.kv_heads, dim), (ctx.kv_heads, v_dim)

    def token_checks(self) -> Iterator[Check]:
        x, ctx = self.x, self.ctx
        yield from tensor_checks(x=x)
        yield "x.shape", tuple(x.shape), x.ndim == 3, "[batch, tokens, hidden]"
        yield from operand_checks(ctx.dtype, ctx.device.torch_device, x=x)
        yield from token_checks(ctx, "x", x.shape, self.seq_lens, True)

    def operand_checks(self) -> Iterator[Check]:
        B, ctx, bias = self.B, self.ctx, self.bias
        yield from tensor_checks(B=B, **({} if bias is None else {"bias": bias}))
        heads = sum(heads * dim for heads, dim in self.head_shapes)
        if self.to_heads:
            expected = f"[hidden, elements of q, k and v] = [{self.x.shape[2]}, {heads}]"
            fits = tuple(B.shape) == (self.x.shape[2], heads)
        else:
            rows = ctx.q_heads * self.x.shape[3]
            expected = f"[heads of all ranks * head_dim = {rows}, features]"
            fits = B.ndim == 2 and B.shape[0] == rows and B.shape[1] > 0
        yield "B.shape", tuple(B.shape), fits, expected
        yield from operand_checks(ctx.dtype, ctx.device.torch_device, B=B, bias=bias)
        if bias is not None:
            fits = tuple(bias.shape) == (B.shape[1],) and bias.is_contiguous()
            yield "bias.shape", tuple(bias.shape), fits, f"[{B.shape[1]}], contiguous"

    @property
    def agreement(self) -> str:
        return self.exchange.agreement

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """B and the bias, without autograd."""
        return self.B.detach(), None if self.bias is None else self.bias.detach()

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows @ B + bias`` by the library, without autograd."""
        rows, (B, bias) = rows.detach(), self.weights
        return rows @ B if bias is None else torch.addmm(bias, rows, B)

    def set_projections(self, product: torch.Tensor) -> None:
        """Make q, k and v, the columns of ``product``, the tensors that are exchanged."""
        shapes, exchange = self.head_shapes, self.exchange
        parts = product.split([heads * dim for heads, dim in shapes], 1)
        tokens = self.x.shape[:2]
        exchange.x = [
            x.unflatten(1, shape).unflatten(0, tokens)
            for x, shape in zip(parts, shapes, strict=True)
        ]

    def descriptor_tile(self, *operands: torch.Tensor) -> tuple[Tile, dict[str, Any], bool]:
        """Return tile constants and options, and whether the kernel uses descriptors."""
        assert self.gemm_config is not None  # see ``Fused.run``
        tile, options = tile_constants(self.gemm_config, operands[0], self.B)
        usable = self.persistent and tile.PRECISION != "ieee" and fits_descriptor(*operands, self.B)
        return tile, options, usable


class _Algorithm(Algorithm[ProductCall, HeadsProductKey]):
    """Base class of the algorithms of both ops."""

    exchange: str
    """Algorithm of the exchange in ``ulysses.algorithms``."""


class Serial(_Algorithm):
    """A library's GEMM before or after the exchange by an algorithm of ``ulysses_pre_attn``."""

    def __init__(self, name: str, exchange: str) -> None:
        self.name, self.exchange, self.inner = name, exchange, PRE_ATTN[exchange]
        self.tunables = self.inner.tunables  # type: ignore[misc]
        self.is_fallback = self.inner.is_fallback  # type: ignore[misc]

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return self.inner.candidates()

    def fits(self, config: Mapping[str, Any], sizes: HeadsProductKey) -> bool:
        return self.inner.fits(config, sizes.exchange)

    def compile(self, call: ProductCall) -> None:
        if call.to_heads:
            call.set_projections(call.x.new_empty(call.x.shape[:2].numel(), call.B.shape[1]))
        call.exchange.compile()

    def run(self, call: ProductCall) -> Any:
        if call.to_heads:
            call.set_projections(call.product(call.x.flatten(0, 1)))
            return call.exchange.run()
        (rows,) = call.exchange.run()
        return call.product(rows.flatten(2).flatten(0, 1)).unflatten(0, rows.shape[:2])


class Fused(_Algorithm):
    """Base class of algorithms whose GEMM sends or waits for blocks."""

    name, exchange = "fused", Push.name

    def fits(self, config: Mapping[str, Any], sizes: HeadsProductKey) -> bool:
        if sizes.M < _MIN_TOKENS and sizes.num_ranks > 1 and not current_device().interprets:
            return False
        q, *_ = sizes.widths
        columns = sum(sizes.widths) if sizes.widths[1] else sizes.hidden
        K = sizes.hidden if sizes.widths[1] else q * sizes.num_ranks
        A = torch.empty(sizes.M // sizes.num_ranks, K, dtype=sizes.dtype, device="meta")
        B = torch.empty(K, columns, dtype=sizes.dtype, device="meta")
        return spaces.fits_gemm(config, A, B, sizes)

    def run(self, call: ProductCall) -> Any:
        check_tiles(call.function, call.gemm_config, self.name)
        return self.overlap(call)

    @abstractmethod
    def overlap(self, call: ProductCall) -> Any:
        """Queue the kernels and copies of the call, and return its result."""

    def repeat(
        self, call: ProductCall, launch: Callable[[], Launch], x: torch.Tensor, **results: Any
    ) -> None:
        """Launch the GEMM, or repeat the launch of an earlier call with other addresses."""
        exchange, slots, tensors = call.exchange, call.ctx.pushed.slots, {"b_ptr": call.B}
        if call.bias is not None:
            tensors["bias_ptr"] = call.bias
        lengths = exchange.device_lengths
        key = (
            self.name, slots.index, call.key, exchange.batch, exchange.lengths, exchange.params,
            id(call.gemm_config), call.persistent, call.B.stride(), dot_precision(call.key.dtype),
            call.to_heads, x.stride(), id(lengths),
        )  # fmt: skip
        tensors |= {"x_ptr": x, **results}
        slots.launcher.run(key, launch, tensors, keep_alive=(call.gemm_config, lengths))


class Receive(Push):
    """Copy the blocks of other ranks to the results, which already have this rank's block."""

    name, programs, kernel = "received tiles", 1, kernel_receive_heads

    def memory(self, call: HeadsCall) -> tuple[Any, ...]:
        return (pushed_slot(call),)


def pushed_slot(call: HeadsCall) -> Pushed:
    """Return the kernel argument for the slot that other ranks write."""
    slots = call.ctx.pushed.slots
    shards, arrivals = slots["shards"].local.view(call.key.dtype), slots["arrivals"].local
    return Pushed(shards, arrivals, slots.epoch)


class SendTiles(Fused):
    """Each tile is stored on the rank of its heads. A second kernel copies received blocks."""

    tunables = "gemm_config", "persistent"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return spaces.tiles_with_persistent(spaces.get_config_space)

    def check(self, call: ProductCall) -> None:
        call.exchange.params = params_for_device(_RECEIVE)

    def compile(self, call: ProductCall) -> None:
        out = call.exchange.outputs()
        self.launch(call, self.rows(call), out).compile()
        if call.ctx.num_ranks > 1:
            Receive().launch(call.exchange, out).compile()

    def overlap(self, call: ProductCall) -> Any:
        ctx, exchange, out = call.ctx, call.exchange, call.exchange.outputs()
        if ctx.num_ranks == 1:
            self.multiply(call, out)
        else:
            launcher = ctx.pushed.slots.launcher
            ctx.pushed.push(
                exchange.digest, self.name, lambda: self.flags(ctx), (),
                lambda: Receive().repeat(launcher, exchange, out), lambda: 1,
                lambda: self.multiply(call, out),
            )  # fmt: skip
        return tuple(out)

    @staticmethod
    def flags(ctx: UlyssesContext) -> Iterator[Copy]:
        """Yield the copies that set this rank's flag on each peer."""
        for step in range(1, ctx.num_ranks):
            arrivals = ctx.pushed.slots["arrivals"].peers[(ctx.rank + step) % ctx.num_ranks]
            yield Copy(0, arrivals[ctx.rank : ctx.rank + 1], ctx.pushed.slots.epoch[:1])

    @staticmethod
    def rows(call: ProductCall) -> torch.Tensor:
        return normalise_strides(call.x.detach().flatten(0, 1))

    def multiply(self, call: ProductCall, out: list[Any]) -> None:
        x = self.rows(call)
        if len(x):
            results = {f"results.{head}": each for head, each in zip("qkv", out, strict=True)}
            self.repeat(call, lambda: self.launch(call, x, out), x, **results)

    @staticmethod
    def launch(call: ProductCall, x: torch.Tensor, out: Sequence[torch.Tensor]) -> Launch:
        ctx, exchange, lengths = call.ctx, call.exchange, call.exchange.device_lengths
        tile, options, descriptors = call.descriptor_tile(x)
        (M, K), N = x.shape, call.B.shape[1]
        tiles = sum(triton.cdiv(width, tile.N) for width in exchange.widths)
        tiles *= triton.cdiv(M, tile.M) * ctx.num_ranks
        arguments = (
            x, *call.weights, Strides(*x.stride(), *call.B.stride()), Heads(*out), Lengths(lengths),
            ctx.pushed.slots["shards"].pointers, M, N, K,
            exchange.lengths[0] if lengths is None else 0, exchange.total, exchange.batch, ctx.rank,
        )  # fmt: skip
        options |= {
            "plan": plan_of(exchange), "tile": tile,
            "DESCRIPTORS": descriptors and exchange.batch == 1 and x.is_contiguous(),
        }  # fmt: skip
        grid = (max(1, min(ctx.device.num_sms, tiles)),)
        return Launch(kernel_gemm_send, grid, arguments, options)


class AwaitRows(Fused):
    """Copy engines push chunks of blocks. A tile waits for its rows of each block."""

    tunables = "gemm_config", "persistent", "num_chunks"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        pairs = spaces.tiles_with_persistent(spaces.get_config_space)
        for number, (tiles, persistent) in enumerate(pairs):
            for chunks in _CHUNKS if number < _NUM_TILES else _CHUNKS[1:2]:
                yield tiles, persistent, chunks

    def compile(self, call: ProductCall) -> None:
        self.launch(call, self.own(call), self.result(call)).compile()

    def overlap(self, call: ProductCall) -> torch.Tensor:
        ctx, exchange, C = call.ctx, call.exchange, self.result(call)
        if ctx.num_ranks == 1:
            self.multiply(call, C)
        else:
            key = self.name, exchange.batch, exchange.lengths, exchange.key, exchange.params
            ctx.pushed.push(
                exchange.digest, key, lambda: self.steps(exchange), (rows_of(call.x),),
                lambda: self.multiply(call, C), lambda: exchange.params.num_chunks,
            )  # fmt: skip
        return C.view(exchange.batch, exchange.own_tokens, C.shape[1])

    @staticmethod
    def steps(call: HeadsCall) -> Iterator[Copy]:
        """Yield the copies of the blocks for other ranks and of their flags, chunk by chunk."""
        ctx, slots, chunks, (width, *_) = (
            call.ctx, call.ctx.pushed.slots, call.params.num_chunks, call.widths,
        )  # fmt: skip
        for chunk, step in itertools.product(range(chunks), range(1, ctx.num_ranks)):
            stream = (chunk * (ctx.num_ranks - 1) + step) % PUSH_STREAMS
            peer = (ctx.rank + step) % ctx.num_ranks
            tokens, before = call.lengths[peer], sum(call.lengths[:peer])
            rows = call.batch * tokens
            first, end = (min(n * -(-rows // chunks), rows) for n in (chunk, chunk + 1))
            block = slots["shards"].peers[peer].view(call.key.dtype)[ctx.rank * rows * width :]
            block = block[: rows * width].view(rows, width)
            while first < end:  # one copy per batch
                number, token = divmod(first, tokens)
                stop = min(end, (number + 1) * tokens)
                source = number * call.total + before + token
                yield Copy(stream, block[first:stop], InputRows(source, source + stop - first))
                first = stop
            flag = chunk * ctx.num_ranks + ctx.rank
            yield Copy(stream, slots["arrivals"].peers[peer][flag : flag + 1], slots.epoch[:1])

    @staticmethod
    def result(call: ProductCall) -> torch.Tensor:
        rows = call.exchange.batch * call.exchange.own_tokens
        return call.x.new_empty(rows, call.B.shape[1])

    @staticmethod
    def own(call: ProductCall) -> torch.Tensor:
        """Return this rank's block [rows, width]; a copy if there are several batches."""
        exchange, before = call.exchange, sum(call.exchange.lengths[: call.ctx.rank])
        own = call.x.detach()[:, before : before + exchange.own_tokens]
        return normalise_strides(own.reshape(-1, exchange.widths[0]).contiguous())

    def multiply(self, call: ProductCall, C: torch.Tensor) -> None:
        own = self.own(call)
        self.repeat(call, lambda: self.launch(call, own, C), own, c_ptr=C)

    @staticmethod
    def launch(call: ProductCall, own: torch.Tensor, C: torch.Tensor) -> Launch:
        ctx, exchange = call.ctx, call.exchange
        tile, options, descriptors = call.descriptor_tile(own, C)
        (rows, N), (width, *_) = C.shape, exchange.widths
        chunk_rows = max(1, -(-rows // exchange.params.num_chunks))
        arguments = (
            own, pushed_slot(exchange), *call.weights, C, Strides(*own.stride(), *call.B.stride()),
            rows, N, chunk_rows, exchange.digest, ctx.rank, ctx.num_ranks, width,
        )  # fmt: skip
        options |= {
            "tile": tile, "DESCRIPTORS": descriptors and rows > 0 and width % tile.K == 0,
        }  # fmt: skip
        tiles = triton.cdiv(max(rows, 1), tile.M) * triton.cdiv(N, tile.N)
        return Launch(kernel_gemm_received, (min(ctx.device.num_sms, tiles),), arguments, options)


_SERIAL = Serial("serial", "push"), Serial("collective", "collective")
GEMM_PRE_ATTN = Algorithms("ulysses_gemm_pre_attn", (SendTiles(), *_SERIAL))
POST_ATTN_GEMM = Algorithms("ulysses_post_attn_gemm", (AwaitRows(), *_SERIAL))


def gemm_pre_attn_call(x: Any, B: Any, ctx: Any, *options: Any, **others: Any) -> ProductCall:
    """Return the call of ``ulysses_gemm_pre_attn`` with the given arguments."""
    return ProductCall(True, x, B, ctx, *options, **others)


def post_attn_gemm_call(o: Any, B: Any, ctx: Any, *options: Any, **others: Any) -> ProductCall:
    """Return the call of ``ulysses_post_attn_gemm`` with the given arguments."""
    return ProductCall(False, o, B, ctx, *options, **others)
