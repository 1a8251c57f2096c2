"""Ops that compute ``sum over ranks of A @ B`` plus ``bias``: their calls, with checks and tuning
keys, and base classes of their algorithms."""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.context import (
    Check,
    ProductKey,
    cached_after_checks,
    checked_buffer,
    layout_of,
    operand_checks,
    operand_signature,
    raise_first_error,
    tensor_checks,
)
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer, padded_shard_numel
from triton_dist.kernels.common.gemm.scales import (
    BLOCK_ELEMENTS,
    FP8,
    NO_SCALING,
    Recipe,
    Scaling,
    library_check,
    library_matmul,
    library_supports,
    num_scale_blocks,
    scaling_of,
)
from triton_dist.kernels.common.gemm.spaces import (
    MAX_SPLIT_K,
    fits_gemm,
    fits_rows,
    max_rows_of_key,
)
from triton_dist.kernels.common.op import (
    GEMMCall,
    SelectableAlgorithm,
    check_straggler,
    check_tiles,
)
from triton_dist.kernels.common.scatter.kernel import scattered_gemm
from triton_dist.kernels.common.scatter.one_launch import (
    exchanged_gemm,
    num_exchange_programs,
    num_splits_of,
)
from triton_dist.kernels.common.scatter.partials import (
    MAX_CHUNKS,
    SummingContext,
    TileMemory,
    chunks_of_row_block,
    tiles_of_row_block,
)
from triton_dist.kernels.common.scatter.tiles import add_deferred_tiles
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, dot_precision

_VALID_NUM_CHUNKS = range(1, MAX_CHUNKS + 1)


@dataclass(eq=False, repr=False)  # Not frozen, because that would take 1 us more per call.
class SummingCall(GEMMCall):
    """Arguments of one call, common to these ops.

    Attributes:
        A: [M, K_per_rank].
        B: [K_per_rank, N].
        bias: [N] or ``None``.
        method: deprecated keyword that selects the algorithm.
        num_ctas, block_bytes: launch parameters of the sum, for algorithms that sum in a separate
            launch.
        A_scale, B_scale: scales of fp8 operands.
        gemm_key: tuning key of the operands.
        scaling: the scales, ``use_fast_accum`` and the output's dtype, without the bias, which is
            added to the sum over ranks.
    """

    ctx_type: ClassVar[type[SummingContext[Any]]]
    A: torch.Tensor
    B: torch.Tensor
    ctx: Any
    persistent: bool
    num_chunks: int
    bias: torch.Tensor | None
    straggler_option: tuple[int, int] | None
    method: enum.Enum | None
    num_ctas: int | None
    block_bytes: int | None
    gemm_key: ProductKey = field(init=False)
    scaling: Scaling = field(init=False)

    def __post_init__(self) -> None:
        self.scaling = self.scaling_of(self.ctx, self.A_scale, self.B_scale, self.use_fast_accum)
        # If the tuner has already checked the operands, it passes their key.
        if self.validated_key is None:
            self.gemm_key = self.check_operands(self.A, self.B, self.bias, self.ctx, self.scaling)
        else:
            self.gemm_key = self.validated_key[0]
        if self.straggler_option is not None:
            check_straggler(self.ctx_type.function, self.straggler_option)
        if self.num_chunks not in _VALID_NUM_CHUNKS:  # a slot has a flag per chunk
            expected = f"1 to {MAX_CHUNKS}"
            raise InvalidArgument(self.ctx_type.function, "num_chunks", self.num_chunks, expected)

    def launch_key(self) -> tuple[object, ...]:
        """Return all properties of the operands that determine the launches, except addresses."""
        A, B = self.A, self.B
        return self.gemm_key, A.stride(), B.stride(), self.bias is None, dot_precision(A.dtype)

    @staticmethod
    def scaling_of(
        ctx: Any,
        A_scale: torch.Tensor | None = None,
        B_scale: torch.Tensor | None = None,
        use_fast_accum: bool = False,
        **_: Any,
    ) -> Scaling:
        """Return the ``Scaling`` of a call's keywords, without the bias."""
        has_scales = A_scale is not None or B_scale is not None
        out_dtype = getattr(ctx, "output_dtype", None) if has_scales else None
        return scaling_of(A_scale, B_scale, None, out_dtype, use_fast_accum)

    @staticmethod
    @abstractmethod
    def requested_algorithm(**_: Any) -> str | None:
        """Return the algorithm that deprecated keywords of a call select, or ``None``."""

    @staticmethod
    @abstractmethod
    def key_option(ctx: Any) -> bool:
        """Return the option that is part of the tuning key.

        It is ``reduce_st`` for gemm_rs and ``copy_to_local`` for gemm_ar.
        """

    @staticmethod
    def adds_tiles_on_arrival(ctx: Any, **_: Any) -> bool:
        """Return whether tiles are added to a single sum on the owner rank as they arrive."""
        return False

    @classmethod
    def key_fn(
        cls,
        A: torch.Tensor,
        B: torch.Tensor,
        ctx: Any,
        *_: Any,
        bias: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Return the tuning key, which includes the algorithm that a deprecated keyword selects."""
        scaling = cls.scaling_of(ctx, **options)
        key = (cls.check_operands(A, B, bias, ctx, scaling), cls.key_option(ctx, **options))
        requested = cls.requested_algorithm(**options) if options else None
        return key if requested is None else (*key, requested)

    @classmethod
    def sizes(
        cls, A: torch.Tensor, B: torch.Tensor, ctx: Any, *_: Any, **options: Any
    ) -> SummingSizes:
        """Return the sizes that determine which configs are worth trying for a call."""
        M = cls.ctx_type.round_down_rows(max_rows_of_key(A.shape[0]), ctx.num_ranks)
        requested = cls.requested_algorithm(**options)
        return SummingSizes(
            A, B, M, ctx.num_ranks, requested, cls.adds_tiles_on_arrival(ctx, **options),
            cls.scaling_of(ctx, **options),
        )  # fmt: skip

    @classmethod
    def check_operands(
        cls,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        ctx: SummingContext[Any],
        scaling: Scaling = NO_SCALING,
    ) -> ProductKey:
        """Check the operands and return their key, one object for all equal keys."""
        function = cls.ctx_type.function
        device = checked_buffer(
            ctx, cls.ctx_type, function, cls.ctx_type.creator
        ).slots.epoch.device

        def checks() -> Iterator[Check]:
            yield from tensor_checks(A=A, B=B, **({} if bias is None else {"bias": bias}))
            is_matrix = A.ndim == 2 and A.shape[1] >= 1
            yield "A.shape", tuple(A.shape), is_matrix, "[M, K_per_rank]"
            (M, K), N = A.shape, ctx.N
            yield "A.shape", tuple(A.shape), M >= 1, "[M, K_per_rank] with at least one row"
            yield cls.ctx_type.rows_check("M", M, ctx.num_ranks)
            yield "M", M, ctx.max_M >= M, f"at most the context's max_M = {ctx.max_M}"
            yield "B.shape", tuple(B.shape), tuple(B.shape) == (K, N), f"[K_per_rank, N] = {(K, N)}"
            if bias is not None:
                yield "bias.shape", tuple(bias.shape), tuple(bias.shape) == (N,), f"[N] = {(N,)}"
                expected = "a contiguous bias; call bias.contiguous()"
                yield "bias.stride()", bias.stride(), bias.is_contiguous(), expected
            is_fp8 = A.dtype in FP8
            yield from operand_checks(A.dtype if is_fp8 else ctx.output_dtype, device, A=A)
            yield from operand_checks(B.dtype if is_fp8 else ctx.output_dtype, device, B=B)
            yield from operand_checks(ctx.output_dtype, device, bias=bias)
            yield from scaling.checks(A, B)
            if scaling.recipe(A, B) is Recipe.BLOCK:
                padded = num_scale_blocks(K) * BLOCK_ELEMENTS
                expected = (
                    f"whole blocks of 128 on each rank: pad K_per_rank with zeros to {padded}"
                )
                yield "K_per_rank", K, ctx.num_ranks == 1 or padded == K, expected

        def key() -> ProductKey:
            (M, K), contiguous = A.shape, A.is_contiguous()
            key = ProductKey(M, ctx.N, K, A.dtype, layout_of(B), contiguous, ctx.num_ranks)
            return scaling.extend_key(key, A, B)

        signature = (*operand_signature(B, A, B, bias), *scaling.signature(B))
        return cached_after_checks(ctx.checked_keys, signature, function, checks, key)

    def check_tiles(self) -> None:
        check_tiles(self.ctx_type.function, self.gemm_config, self.chosen_algorithm.name)

    def check_rows(self, max_rows: int) -> None:
        """Raise ``InvalidArgument`` if A has more rows than fit in the algorithm's memory."""
        if self.A.shape[0] > max_rows and self.ctx.num_ranks > 1:
            expected = f"another algorithm for M above {max_rows}"
            raise InvalidArgument(
                self.ctx_type.function, "algorithm", self.chosen_algorithm.name, expected
            )


@dataclass(frozen=True)
class SummingSizes:
    """Sizes that determine which configs are worth trying for all calls of a key.

    Attributes:
        A, B: operands of one call. All calls of the key have operands with equal properties, except
            M.
        M: maximum number of rows over the calls of the key.
        requested_algorithm: algorithm that deprecated keywords of the call select.
        scaling: scales of fp8 operands, and the output's dtype.
        adds_on_arrival: whether arriving tiles are added to a single sum on the owner rank.
            Algorithms that store the tiles of each rank separately then do not fit.
    """

    A: torch.Tensor
    B: torch.Tensor
    M: int
    num_ranks: int
    requested_algorithm: str | None
    adds_on_arrival: bool = False
    scaling: Scaling = NO_SCALING

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of the output."""
        return self.scaling.output_dtype(self.A).itemsize

    @property
    def nbytes(self) -> int:
        return self.M * self.B.shape[1] * self.item_bytes

    def tiles_fit(self, config: Mapping[str, Any], rows: int) -> bool:
        """Return whether a config fits the device and is worth trying for ``rows`` rows."""
        return fits_rows(config["gemm_config"], rows) and self.kernel_fits(config)

    def kernel_fits(self, config: Mapping[str, Any]) -> bool:
        return fits_gemm(config, self.A, self.B, **self.scaling._asdict())

    def has_chunks(self, config: Mapping[str, Any], rows: int) -> bool:
        """Return whether ``rows`` rows can be divided into the config's number of chunks."""
        num_chunks: int = config["num_chunks"]
        chunks = chunks_of_row_block(config["gemm_config"], rows, self.B.shape[1], num_chunks)
        return len(chunks.rows) == num_chunks


def output_tensors(C: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return output and bias by kernel argument name. Their addresses change between calls."""
    return {"out.c": C} if bias is None else {"out.c": C, "out.bias": bias}


def input_tensors(call: SummingCall) -> dict[str, torch.Tensor]:
    """Return the operands and their scales by kernel argument name."""
    tensors = {"a_ptr": call.A, "b_ptr": call.B}
    if call.A_scale is not None and call.B_scale is not None:
        tensors |= {"scales.a_scale": call.A_scale, "scales.b_scale": call.B_scale}
    return tensors


@dataclass  # Not frozen, because that would take 1 us more per call.
class ScatteredLaunches:
    """Launches of a call that sends tiles to the ranks that own their rows, and sums them in C.

    ``scattered_gemm`` is the main launch.
    """

    kernel: ClassVar[Any]
    """The persistent GEMM kernel."""
    call: SummingCall
    C: torch.Tensor
    tile_memory: TileMemory

    def __post_init__(self) -> None:
        self.key = self._key()
        """Key of the launches: all their properties except the addresses of tensors."""
        # The key contains the id() of these objects, so they must stay alive.
        self._keep_alive = self.tile_memory, self.call.gemm_config

    def run(self) -> None:
        self.multiply()
        self.add_deferred_tiles()

    def multiply(self) -> None:
        """Launch the GEMM, after loading the kernels that follow it."""
        self._launch(self.key, self._gemm_launch, input_tensors(self.call) | self._outputs())

    def add_deferred_tiles(self) -> None:
        """Launch the kernel that adds deferred tiles, if the GEMM may defer tiles.

        ``scatter/tiles.py`` describes deferred tiles.
        """
        if self._may_defer():
            self._launch(("deferred", *self.key), self._deferred_launch, self._outputs())

    def compile(self) -> None:
        self._gemm_launch().compile()

    def _key(self) -> tuple[object, ...]:
        call = self.call
        ids = id(self.tile_memory), id(call.gemm_config)
        return *call.launch_key(), *ids, call.persistent, call.num_chunks

    def _launch(self, key: object, make: Any, tensors: dict[str, torch.Tensor]) -> None:
        self.call.ctx.buffer.slots.launcher.run(key, make, tensors, self._keep_alive)

    def _outputs(self) -> dict[str, torch.Tensor]:
        return output_tensors(self.C, self.call.bias)

    def _may_defer(self) -> bool:
        return self.call.persistent and self.tile_memory.num_ranks > 1

    def _later_launches(self) -> Iterator[Launch]:
        if self._may_defer():
            yield self._deferred_launch()

    def _gemm_launch(self) -> Launch:
        call = self.call
        return scattered_gemm(
            call.A, call.B, self.C, call.bias, call.gemm_config, self.tile_memory,
            kernel=self.kernel, num_sms=current_device().num_sms, persistent=call.persistent,
            num_chunks=call.num_chunks, scales=call.scaling.kernel_argument(call.A, call.B),
        ).preload(*self._later_launches())  # fmt: skip

    def _deferred_launch(self) -> Launch:
        call = self.call
        return add_deferred_tiles(
            self.C, call.bias, call.gemm_config, self.tile_memory,
            M=call.A.shape[0], num_sms=current_device().num_sms, num_chunks=call.num_chunks,
        )  # fmt: skip


@dataclass  # Not frozen, because that would take 1 us more per call.
class ExchangeLaunch:
    """The single launch of a call that multiplies, sends, waits and adds.

    Without ``to_owners``, every rank adds and returns all M rows. With ``to_owners``, each rank
    adds and returns its M / num_ranks rows. With ``to_owners`` and ``broadcasts_sums``, each rank
    adds its rows and sends the sums to all ranks, so that every rank returns all M rows.
    """

    call: SummingCall
    buffer: ExchangeBuffer
    to_owners: bool
    broadcasts_sums: bool = False

    def run(self) -> torch.Tensor:
        call, buffer, C = self.call, self.buffer, self._output()
        num_ctas = num_exchange_programs(
            call.gemm_config, call.A.shape[0], C.shape[1], buffer.device.num_sms, buffer.num_ranks,
            self.to_owners,
        )  # fmt: skip
        buffer.begin(self.num_phases(), num_ctas, num_chunks=1)
        buffer.launcher.run(
            (
                type(self), *call.launch_key(), id(call.gemm_config), call.persistent,
                self.to_owners, self.broadcasts_sums,
            ),
            lambda: self.gemm(C),
            input_tensors(call) | output_tensors(C, call.bias),
            keep_alive=(call.gemm_config,),
        )  # fmt: skip
        buffer.timeout_words.end_call()
        return C

    def compile(self) -> None:
        self.gemm(self._output()).compile()

    def num_phases(self) -> int:
        """Return the number of times that a program waits for flags of its peers."""
        return 2 if self.broadcasts_sums else 1

    def gemm(self, C: torch.Tensor) -> Launch:
        call, buffer = self.call, self.buffer
        rows = -(-call.A.shape[0] // buffer.num_ranks) if self.to_owners else call.A.shape[0]
        return exchanged_gemm(
            call.A, call.B, C, call.bias, call.gemm_config, buffer.regions(C.dtype),
            padded_shard_numel(rows * C.shape[1]), rank=buffer.rank, num_ranks=buffer.num_ranks,
            num_sms=buffer.device.num_sms, persistent=call.persistent, to_owners=self.to_owners,
            broadcasts_sums=self.broadcasts_sums,
            scales=call.scaling.kernel_argument(call.A, call.B),
        )  # fmt: skip

    def _output(self) -> torch.Tensor:
        A, B = self.call.A, self.call.B
        is_scattered = self.to_owners and not self.broadcasts_sums
        rows = A.shape[0] // (self.buffer.num_ranks if is_scattered else 1)
        return A.new_empty((rows, B.shape[1]), dtype=self.call.ctx.output_dtype)


SummingCallT = TypeVar("SummingCallT", bound=SummingCall)


class SummingAlgorithm(SelectableAlgorithm[SummingCallT, SummingSizes]):
    """Base class of algorithms of ops that sum products over ranks."""

    supports_all_calls: ClassVar[bool] = False
    """True if the algorithm also supports a single rank and ``SummingSizes.adds_on_arrival``."""

    def fits(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        fits_sizes = self.supports_all_calls or (sizes.num_ranks > 1 and not sizes.adds_on_arrival)
        return fits_sizes and super().fits(config, sizes)


class OverlappedAlgorithm(SummingAlgorithm[SummingCallT], Generic[SummingCallT]):
    """Algorithm that sends tiles while the next tiles are multiplied."""

    uses_copy_engines: ClassVar[bool] = False
    """True if copy engines, not the GEMM kernel, send the tiles."""

    def check(self, call: SummingCallT) -> None:
        call.check_tiles()

    def compile(self, call: SummingCallT) -> None:
        self.scatter_launches(call).compile()

    def run(self, call: SummingCallT) -> torch.Tensor:
        ctx, num_flags, has_awaited_peers = call.ctx, self.flags_per_row_block(call), False
        ctx.buffer.slots.take(call.A.shape[0], copies_flag_word=self.uses_copy_engines)
        try:
            ctx.sleep(call.straggler_option)
            scattered = self.scatter_launches(call)
            scattered.run()
            has_awaited_peers = True  # the kernels wait for tiles of each peer
        finally:
            ctx.buffer.slots.finish(has_awaited_peers, lambda: ctx.buffer.awaited_flags(num_flags))
        return scattered.C

    def flags_per_row_block(self, call: SummingCallT) -> int:
        """Return the number of flags of a row block: by default one per tile."""
        rows = call.ctx.rows_of_rank(call.A.shape[0])
        return tiles_of_row_block(call.gemm_config, rows, call.ctx.N)

    @abstractmethod
    def scatter_launches(self, call: SummingCallT) -> ScatteredLaunches:
        """Return the launches that multiply the operands and send the tiles to their owners."""


class OneLaunchAlgorithm(SummingAlgorithm[SummingCallT], Generic[SummingCallT]):
    """Algorithm with a single launch that multiplies, sends, waits and adds."""

    tunables = ("gemm_config", "persistent")
    exchange_launch_class: ClassVar[type[ExchangeLaunch]] = ExchangeLaunch
    to_owners: ClassVar[bool] = False
    broadcasts_sums: ClassVar[bool] = False
    """``ExchangeLaunch`` describes ``to_owners`` and ``broadcasts_sums``."""

    def check(self, call: SummingCallT) -> None:
        call.check_tiles()
        splits, ranks = num_splits_of(call.gemm_config), call.ctx.num_ranks
        if splits == 1 or ranks == 1:
            return
        M, item_bytes = len(call.A), call.ctx.output_dtype.itemsize
        rows = M // ranks if self.to_owners else M
        split_bytes = ranks * padded_shard_numel(rows * call.ctx.N) * item_bytes
        largest = min(MAX_SPLIT_K, call.ctx.exchange.slot_bytes // split_bytes)
        if self.broadcasts_sums or splits not in range(1, largest + 1):
            expected = "1" if self.broadcasts_sums or largest < 2 else f"1 to {largest}"
            raise InvalidArgument(
                call.ctx_type.function, "SPLIT_K", splits, f"{expected} for M = {M}"
            )

    def compile(self, call: SummingCallT) -> None:
        self.make_launch(call).compile()

    def run(self, call: SummingCallT) -> torch.Tensor:
        call.ctx.sleep(call.straggler_option)
        result: torch.Tensor = call.ctx.buffer.slots.run_without_slots(self.make_launch(call).run)
        return result

    def make_launch(self, call: SummingCallT) -> ExchangeLaunch:
        return self.exchange_launch_class(
            call, call.ctx.exchange, self.to_owners, self.broadcasts_sums
        )


class UnfusedAlgorithm(SummingAlgorithm[SummingCallT], Generic[SummingCallT]):
    """Algorithm that computes the product with ``torch.matmul`` or ``scaled_mm``, then sums it.

    The bias is added after the sum is rounded to the output's dtype.
    """

    def fits(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        return library_supports(sizes.A, sizes.B, sizes.scaling) and super().fits(config, sizes)

    def check(self, call: SummingCallT) -> None:
        check = library_check(self.name, call.A, call.B, call.scaling)
        raise_first_error(call.ctx_type.function, [check])

    def run(self, call: SummingCallT) -> torch.Tensor:
        call.ctx.sleep(call.straggler_option)
        A, B = call.A.detach(), call.B.detach()  # like our kernels, without autograd history

        def run_unfused() -> torch.Tensor:
            if call.ctx.num_ranks == 1:
                return library_matmul(A, B, call.scaling)
            return self.multiply(call, A, B)

        C: torch.Tensor = call.ctx.buffer.slots.run_without_slots(run_unfused)
        return C if call.bias is None else C.add_(call.bias.detach())

    def multiply(self, call: SummingCallT, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Return this rank's result of the sum of ``A @ B`` over ranks, for several ranks."""
        return self.sum(call, library_matmul(A, B, call.scaling))

    @abstractmethod
    def sum(self, call: SummingCallT, product: torch.Tensor) -> torch.Tensor:
        """Return this rank's result of the sum of ``product`` over ranks."""
