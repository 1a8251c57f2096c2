"""Algorithms of the Ulysses ops with projections: their candidates, checks and launches."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
    Push,
    UlyssesCall,
    UlyssesKey,
    call_checks,
    token_checks,
)
from triton_dist.kernels.nvidia.ulysses.kernel import Heads
from triton_dist.kernels.nvidia.ulysses_gemm.kernel import (
    kernel_gemm_received,
    kernel_gemm_send,
    kernel_receive_heads,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.transfer import Copy, InputRows
from triton_dist.runtime.launch import Launch, dot_precision, fits_descriptor, normalise_strides

_RECEIVE_PARAMS = LaunchParams(128, 16384)
"""Launch parameters of the kernel that copies received blocks to the results."""
_MIN_TOKENS = 6000
"""Minimum tokens of all ranks for ``"fused"``; with fewer, ``"serial"`` was faster (2 H200)."""
_NUM_CHUNKS = (2, 4, 8)
_NUM_TILES = 3
"""Number of tile shapes that are tried with all ``_NUM_CHUNKS``; others only with one."""


class UlyssesGEMMKey(NamedTuple):
    """Tuning key of a call."""

    exchange: UlyssesKey
    """Key of the exchange."""
    hidden: int
    """Number of columns of x, or of the result of ``ulysses_post_attn_gemm``."""
    layout: str
    """Layout of B."""
    has_bias: bool


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class UlyssesGEMMCall(OpCall):
    """The arguments of one call, and values derived from them.

    The call is of ``ulysses_gemm_pre_attn`` if ``is_pre_attn`` is true, else of
    ``ulysses_post_attn_gemm``.
    """

    is_pre_attn: bool
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
        algorithms = GEMM_PRE_ATTN if self.is_pre_attn else POST_ATTN_GEMM
        self.function = function = algorithms.function
        if self.validated_key is None:
            checked_buffer(self.ctx, UlyssesContext, function, "create_ulysses_context")
            raise_first_error(function, self.checks())
        self.chosen_algorithm: _Algorithm = algorithms[self.algorithm or Fused.name]  # type: ignore[assignment]
        tensors: dict[str, Any] = {"o": self.x, "k": None, "v": None}
        if self.is_pre_attn:  # tensors with the shapes of the projections, but without their memory
            memory, tokens = self.x.new_empty(()), self.x.shape[:2]
            tensors = {
                name: memory.expand(*tokens, *shape)
                for name, shape in zip("qkv", self.head_shapes, strict=True)
            }
        # A ``validated_key`` of () skips the checks of the exchange, which then makes its key.
        self.exchange = UlyssesCall(
            self.is_pre_attn, tensors, self.ctx, self.seq_lens, self.num_ctas, self.block_bytes,
            self.num_chunks, self.chosen_algorithm.exchange, (), function,
        )  # fmt: skip
        self.key = self.validated_key or UlyssesGEMMKey(
            self.exchange.key, self.x.shape[2] if self.is_pre_attn else self.B.shape[1],
            layout_of(self.B), self.bias is not None,
        )  # fmt: skip
        self.chosen_algorithm.check(self)

    @property
    def head_shapes(self) -> tuple[tuple[int, int], ...]:
        """(heads, elements of a head) of q, k and v."""
        ctx, (dim, v_dim) = self.ctx, self.ctx.head_dims
        return (ctx.q_heads, dim), (ctx.kv_heads, dim), (ctx.kv_heads, v_dim)

    def checks(self) -> Iterator[Check]:
        x, B, ctx, bias = self.x, self.B, self.ctx, self.bias
        dtype, device = ctx.dtype, ctx.device.torch_device
        if self.is_pre_attn:
            yield from tensor_checks(x=x)
            yield "x.shape", tuple(x.shape), x.ndim == 3, "[batch, tokens, hidden]"
            yield from operand_checks(dtype, device, x=x)
            yield from token_checks(ctx, "x", x.shape, self.seq_lens, True)
            rows, columns = x.shape[2], sum(heads * dim for heads, dim in self.head_shapes)
            expected = f"[hidden, elements of q, k and v] = [{rows}, {columns}]"
        else:
            yield from call_checks(False, {"o": x, "k": None, "v": None}, ctx, self.seq_lens)
            rows, columns = ctx.q_heads * x.shape[3], None
            expected = f"[heads of all ranks * head_dim = {rows}, features]"
        yield from tensor_checks(B=B, **({} if bias is None else {"bias": bias}))
        fits = B.ndim == 2 and B.shape[0] == rows and B.shape[1] == (columns or max(1, B.shape[1]))
        yield "B.shape", tuple(B.shape), fits, expected
        yield from operand_checks(dtype, device, B=B, bias=bias)
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

    def left_operand(self) -> torch.Tensor:
        """Return the matrix that this rank multiplies first: the rows of x, or this rank's block of
        the output of the attention (a copy if there are several batches)."""
        x, lengths, rank = self.x.detach(), self.exchange.lengths, self.ctx.rank
        if self.is_pre_attn:
            return normalise_strides(x.flatten(0, 1))
        own = x.narrow(1, sum(lengths[:rank]), lengths[rank])
        return normalise_strides(own.reshape(-1, self.exchange.widths[0]).contiguous())

    def outputs(self) -> list[torch.Tensor]:
        """Return uninitialised memory for the results."""
        if self.is_pre_attn:
            return self.exchange.outputs()
        return [self.x.new_empty(self.exchange.batch, self.exchange.own_tokens, self.B.shape[1])]

    def set_projections(self, product: torch.Tensor) -> None:
        """Make q, k and v, the columns of ``product``, the tensors that are exchanged."""
        shapes, exchange = self.head_shapes, self.exchange
        parts = product.split([heads * dim for heads, dim in shapes], 1)
        tokens = self.x.shape[:2]
        exchange.x = [
            x.unflatten(1, shape).unflatten(0, tokens)
            for x, shape in zip(parts, shapes, strict=True)
        ]

    def tile_and_options(self, *operands: torch.Tensor) -> tuple[Tile, dict[str, Any]]:
        """Return the tile constants, and the options of the launch.

        The kernel uses descriptors if they fit ``operands`` and B.
        """
        assert self.gemm_config is not None  # see ``Fused.run``
        tile, options = tile_constants(self.gemm_config, operands[0], self.B)
        descriptors = self.persistent and tile.PRECISION != "ieee"
        options["DESCRIPTORS"] = descriptors and fits_descriptor(*operands, self.B)
        return tile, options | {"tile": tile}


class _Algorithm(Algorithm[UlyssesGEMMCall, UlyssesGEMMKey]):
    """Base class of the algorithms of both ops."""

    exchange: str
    """Algorithm of the exchange in ``ulysses.algorithms``."""


class Serial(_Algorithm):
    """A library's GEMM before or after the exchange by an algorithm of ``ulysses_pre_attn``."""

    def __init__(self, name: str, exchange: str) -> None:
        self.name, self.exchange, self.exchange_algorithm = name, exchange, PRE_ATTN[exchange]
        self.tunables = self.exchange_algorithm.tunables  # type: ignore[misc]
        self.is_fallback = self.exchange_algorithm.is_fallback  # type: ignore[misc]

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return self.exchange_algorithm.candidates()

    def fits(self, config: Mapping[str, Any], sizes: UlyssesGEMMKey) -> bool:
        return self.exchange_algorithm.fits(config, sizes.exchange)

    def compile(self, call: UlyssesGEMMCall) -> None:
        if call.is_pre_attn:
            call.set_projections(call.x.new_empty(call.x.shape[:2].numel(), call.B.shape[1]))
        call.exchange.compile()

    def run(self, call: UlyssesGEMMCall) -> Any:
        if call.is_pre_attn:
            call.set_projections(call.product(call.x.flatten(0, 1)))
            return call.exchange.run()
        (rows,) = call.exchange.run()
        return call.product(rows.flatten(2).flatten(0, 1)).unflatten(0, rows.shape[:2])


class Fused(_Algorithm):
    """Base class of algorithms whose GEMM sends or waits for blocks."""

    name, exchange = "fused", Push.name
    output_names: ClassVar[tuple[str, ...]]
    """Names of ``UlyssesGEMMCall.outputs`` in the kernel."""

    def fits(self, config: Mapping[str, Any], sizes: UlyssesGEMMKey) -> bool:
        (M, widths, dtype, *_, num_ranks), hidden = sizes.exchange, sizes.hidden
        if M < _MIN_TOKENS and num_ranks > 1 and not current_device().interprets:
            return False
        K, N = (hidden, sum(widths)) if widths[1] else (widths[0] * num_ranks, hidden)
        A = torch.empty(M // num_ranks, K, dtype=dtype, device="meta")
        B = torch.empty(K, N, dtype=dtype, device="meta")
        return spaces.fits_gemm(config, A, B, sizes)

    def compile(self, call: UlyssesGEMMCall) -> None:
        self.launch(call, call.left_operand(), call.outputs()).compile()

    def run(self, call: UlyssesGEMMCall) -> Any:
        check_tiles(call.function, call.gemm_config, self.name)
        out = call.outputs()
        if call.ctx.num_ranks == 1:
            self.multiply(call, out)
        else:
            self.overlap(call, out)
        return tuple(out) if call.is_pre_attn else out[0]

    def multiply(self, call: UlyssesGEMMCall, out: Sequence[torch.Tensor]) -> None:
        """Launch the GEMM, or repeat the launch of an earlier call with other addresses."""
        exchange, slots, x = call.exchange, call.ctx.pushed.slots, call.left_operand()
        tensors = {"x_ptr": x, "b_ptr": call.B, **dict(zip(self.output_names, out, strict=True))}
        if call.bias is not None:
            tensors["bias_ptr"] = call.bias
        if exchange.device_lengths is not None and call.is_pre_attn:
            tensors["lengths_ptr"] = exchange.device_lengths
        key = (
            self.name, slots.index, call.key, exchange.batch, exchange.lengths, exchange.params,
            id(call.gemm_config), call.persistent, call.B.stride(), dot_precision(x.dtype),
            call.is_pre_attn, x.stride(),
        )  # fmt: skip
        slots.launcher.run(
            key, lambda: self.launch(call, x, out), tensors, keep_alive=call.gemm_config
        )

    @abstractmethod
    def launch(self, call: UlyssesGEMMCall, x: torch.Tensor, out: Sequence[torch.Tensor]) -> Launch:
        """Return the launch of the GEMM whose left operand is x."""

    @abstractmethod
    def overlap(self, call: UlyssesGEMMCall, out: Sequence[torch.Tensor]) -> None:
        """Queue the kernels and copies of a call of several ranks."""


class Receive(Push):
    """Copy the blocks of other ranks to the results, which already have this rank's block."""

    name, programs_per_worker, kernel = "received tiles", 1, kernel_receive_heads

    def memory(self, call: UlyssesCall) -> tuple[Any, ...]:
        return (pushed_slot(call),)


def pushed_slot(call: UlyssesCall) -> Pushed:
    """Return the kernel argument for the slot that other ranks write."""
    slots = call.ctx.pushed.slots
    shards, arrivals = slots["shards"].local.view(call.key.dtype), slots["arrivals"].local
    return Pushed(shards, arrivals, slots.epoch)


class SendTiles(Fused):
    """Each tile is stored on the rank of its heads. A second kernel copies received blocks."""

    tunables = "gemm_config", "persistent"
    output_names = "results.q", "results.k", "results.v"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return spaces.tiles_with_persistent(spaces.get_config_space)

    def check(self, call: UlyssesGEMMCall) -> None:
        call.exchange.params = params_for_device(_RECEIVE_PARAMS)

    def compile(self, call: UlyssesGEMMCall) -> None:
        super().compile(call)
        if call.ctx.num_ranks > 1:
            Receive().launch(call.exchange, call.outputs()).compile()

    def overlap(self, call: UlyssesGEMMCall, out: Sequence[torch.Tensor]) -> None:
        ctx, exchange, slots = call.ctx, call.exchange, call.ctx.pushed.slots

        def flags() -> Iterator[Copy]:
            for step in range(1, ctx.num_ranks):
                arrivals = slots["arrivals"].peers[(ctx.rank + step) % ctx.num_ranks]
                yield Copy(0, arrivals[ctx.rank : ctx.rank + 1], slots.epoch[:1])

        ctx.pushed.push(
            exchange.digest, self.name, flags, (),
            lambda: Receive().repeat(slots.launcher, exchange, out), lambda: 1,
            lambda: self.multiply(call, out) if call.x.numel() else None,
        )  # fmt: skip

    def launch(self, call: UlyssesGEMMCall, x: torch.Tensor, out: Sequence[torch.Tensor]) -> Launch:
        ctx, exchange, lengths = call.ctx, call.exchange, call.exchange.device_lengths
        tile, options = call.tile_and_options(x)
        (M, K), N = x.shape, call.B.shape[1]
        arguments = (
            x, *call.weights, Strides(*x.stride(), *call.B.stride()), Heads(*out), lengths,
            ctx.pushed.slots["shards"].pointers, M, N, K,
            exchange.lengths[0] if lengths is None else 0, exchange.total, exchange.batch, ctx.rank,
        )  # fmt: skip
        options["plan"] = exchange.plan
        options["DESCRIPTORS"] &= exchange.batch == 1 and x.is_contiguous()
        tiles = sum(triton.cdiv(width, tile.N) for width in exchange.widths)
        tiles *= triton.cdiv(M, tile.M) * ctx.num_ranks
        grid = (max(1, min(ctx.device.num_sms, tiles)),)
        return Launch(kernel_gemm_send, grid, arguments, options)


class AwaitRows(Fused):
    """Copy engines push chunks of blocks. A tile waits for its rows of each block."""

    tunables = "gemm_config", "persistent", "num_chunks"
    output_names = ("c_ptr",)

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        pairs = spaces.tiles_with_persistent(spaces.get_config_space)
        for number, (tiles, persistent) in enumerate(pairs):
            for chunks in _NUM_CHUNKS if number < _NUM_TILES else _NUM_CHUNKS[1:2]:
                yield tiles, persistent, chunks

    def overlap(self, call: UlyssesGEMMCall, out: Sequence[torch.Tensor]) -> None:
        exchange = call.exchange
        key = self.name, exchange.batch, exchange.lengths, exchange.key, exchange.params
        call.ctx.pushed.push(
            exchange.digest, key, lambda: self.steps(exchange), (rows_of(call.x),),
            lambda: self.multiply(call, out), lambda: exchange.params.num_chunks,
        )  # fmt: skip

    @staticmethod
    def steps(call: UlyssesCall) -> Iterator[Copy]:
        """Yield the copies of the blocks for other ranks and of their flags, chunk by chunk."""
        ctx, slots, chunks, width = (
            call.ctx, call.ctx.pushed.slots, call.params.num_chunks, call.widths[0],
        )  # fmt: skip
        for chunk, step in itertools.product(range(chunks), range(1, ctx.num_ranks)):
            stream = (chunk * (ctx.num_ranks - 1) + step) % PUSH_STREAMS
            peer = (ctx.rank + step) % ctx.num_ranks
            tokens, first_token = call.lengths[peer], sum(call.lengths[:peer])
            rows = call.batch * tokens
            first, end = (min(n * -(-rows // chunks), rows) for n in (chunk, chunk + 1))
            block = slots["shards"].peers[peer].view(call.key.dtype)[ctx.rank * rows * width :]
            block = block[: rows * width].view(rows, width)
            while first < end:  # one copy per batch
                number, token = divmod(first, tokens)
                stop = min(end, (number + 1) * tokens)
                source = number * call.total + first_token + token
                yield Copy(stream, block[first:stop], InputRows(source, source + stop - first))
                first = stop
            flag = chunk * ctx.num_ranks + ctx.rank
            yield Copy(stream, slots["arrivals"].peers[peer][flag : flag + 1], slots.epoch[:1])

    def launch(self, call: UlyssesGEMMCall, x: torch.Tensor, out: Sequence[torch.Tensor]) -> Launch:
        ctx, exchange, width = call.ctx, call.exchange, call.exchange.widths[0]
        C = out[0].flatten(0, 1)
        tile, options = call.tile_and_options(x, C)
        rows, N = C.shape
        chunk_rows = max(1, -(-rows // exchange.params.num_chunks))
        arguments = (
            x, pushed_slot(exchange), *call.weights, C, Strides(*x.stride(), *call.B.stride()),
            rows, N, chunk_rows, exchange.digest, ctx.rank, ctx.num_ranks, width,
        )  # fmt: skip
        options["DESCRIPTORS"] &= rows > 0 and width % tile.K == 0
        tiles = triton.cdiv(max(rows, 1), tile.M) * triton.cdiv(N, tile.N)
        return Launch(kernel_gemm_received, (min(ctx.device.num_sms, tiles),), arguments, options)


_SERIAL = Serial("serial", "push"), Serial("collective", "collective")
GEMM_PRE_ATTN = Algorithms("ulysses_gemm_pre_attn", (SendTiles(), *_SERIAL))
POST_ATTN_GEMM = Algorithms("ulysses_post_attn_gemm", (AwaitRows(), *_SERIAL))


def gemm_pre_attn_call(x: Any, B: Any, ctx: Any, *options: Any, **others: Any) -> UlyssesGEMMCall:
    """Return the call of ``ulysses_gemm_pre_attn`` with the given arguments."""
    return UlyssesGEMMCall(True, x, B, ctx, *options, **others)


def post_attn_gemm_call(o: Any, B: Any, ctx: Any, *options: Any, **others: Any) -> UlyssesGEMMCall:
    """Return the call of ``ulysses_post_attn_gemm`` with the given arguments."""
    return UlyssesGEMMCall(False, o, B, ctx, *options, **others)
