"""Calls of ops that compute ``sum over ranks of A @ B`` plus ``bias``: checks and tuning keys."""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.context import (
    Check,
    ProductKey,
    checked_buffer,
    checked_once,
    layout_of,
    operand_checks,
    operand_signature,
    tensor_checks,
)
from triton_dist.kernels.common.gemm.scales import (
    BLOCK_ELEMENTS,
    FP8,
    NO_SCALING,
    Recipe,
    Scaling,
    blocks,
    scaling_of,
)
from triton_dist.kernels.common.gemm.spaces import fits_gemm, fits_rows, max_rows_of_key
from triton_dist.kernels.common.op import OpCall, check_straggler, check_tiles
from triton_dist.kernels.common.scatter.partials import (
    MAX_CHUNKS,
    SummingContext,
    chunks_of_row_block,
)
from triton_dist.runtime.launch import dot_precision

_CHUNKS = range(1, MAX_CHUNKS + 1)


@dataclass(eq=False, repr=False)  # Not frozen, because that would take 1 us more per call.
class SummingCall(OpCall):
    """Arguments of one call, common to these ops.

    Attributes:
        A: [M, K_per_rank].
        B: [K_per_rank, N].
        bias: [N] or ``None``.
        method: deprecated keyword that selects the algorithm.
        num_ctas, block_bytes: launch parameters of the sum, for algorithms that sum in a separate
            launch.
        A_scale, B_scale: scales of fp8 operands.
        operands: tuning key of the operands.
        scaling: the scales, ``use_fast_accum`` and the output's dtype, without the bias, which is
            added to the sum over ranks.
    """

    ctx_type: ClassVar[type[SummingContext[Any]]]
    A: torch.Tensor
    B: torch.Tensor
    ctx: Any
    gemm_config: triton.Config | None
    persistent: bool
    num_chunks: int
    bias: torch.Tensor | None
    straggler_option: tuple[int, int] | None
    method: enum.Enum | None
    algorithm: str | None
    num_ctas: int | None
    block_bytes: int | None
    A_scale: torch.Tensor | None
    B_scale: torch.Tensor | None
    use_fast_accum: bool
    accepted_key: tuple[Any, ...] | None
    operands: ProductKey = field(init=False)
    scaling: Scaling = field(init=False)

    def __post_init__(self) -> None:
        self.scaling = self.scaling_of(self.ctx, self.A_scale, self.B_scale, self.use_fast_accum)
        # If the tuner has already checked the operands, it passes their key.
        known = self.accepted_key
        if known is None:
            self.operands = self.check_operands(self.A, self.B, self.bias, self.ctx, self.scaling)
        else:
            self.operands = known[0]
        if self.straggler_option is not None:
            check_straggler(self.ctx_type.function, self.straggler_option)
        if self.num_chunks not in _CHUNKS:  # The slots have this number of flags.
            expected = f"1 to {MAX_CHUNKS}"
            raise InvalidArgument(self.ctx_type.function, "num_chunks", self.num_chunks, expected)

    def layouts(self) -> tuple[object, ...]:
        """Return the properties of the operands, except addresses, that determine the launches."""
        A, B = self.A, self.B
        return self.operands, A.stride(), B.stride(), self.bias is None, dot_precision(A.dtype)

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
    def requested(**_: Any) -> str | None:
        """Return the algorithm that deprecated keywords of a call select, or ``None``."""

    @staticmethod
    @abstractmethod
    def options_in_key(ctx: Any) -> bool:
        """Return the option in the key: ``reduce_st`` of gemm_rs, ``copy_to_local`` of gemm_ar."""

    @staticmethod
    def sums_on_arrival(ctx: Any, **_: Any) -> bool:
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
        key = (cls.check_operands(A, B, bias, ctx, scaling), cls.options_in_key(ctx, **options))
        requested = cls.requested(**options) if options else None
        return key if requested is None else (*key, requested)

    @classmethod
    def sizes(
        cls, A: torch.Tensor, B: torch.Tensor, ctx: Any, *_: Any, **options: Any
    ) -> SummingSizes:
        """Return the sizes that determine which configs are worth trying for a call."""
        M = cls.ctx_type.round_down_rows(max_rows_of_key(A.shape[0]), ctx.num_ranks)
        requested = cls.requested(**options)
        return SummingSizes(
            A, B, M, ctx.num_ranks, requested, cls.sums_on_arrival(ctx, **options),
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
                padded = blocks(K) * BLOCK_ELEMENTS
                expected = (
                    f"whole blocks of 128 on each rank: pad K_per_rank with zeros to {padded}"
                )
                yield "K_per_rank", K, ctx.num_ranks == 1 or padded == K, expected

        def key() -> ProductKey:
            (M, K), contiguous = A.shape, A.is_contiguous()
            key = ProductKey(M, ctx.N, K, A.dtype, layout_of(B), contiguous, ctx.num_ranks)
            return scaling.key_of(key, A, B)

        signature = (*operand_signature(B, A, B, bias), *scaling.signature(B))
        return checked_once(ctx.checked_keys, signature, function, checks, key)

    def check_tiles(self) -> None:
        check_tiles(self.ctx_type.function, self.gemm_config, self.chosen.name)

    def check_rows(self, max_rows: int) -> None:
        """Raise ``InvalidArgument`` if A has more rows than fit in the algorithm's memory."""
        if self.A.shape[0] > max_rows and self.ctx.num_ranks > 1:
            expected = f"another algorithm for M above {max_rows}"
            raise InvalidArgument(self.ctx_type.function, "algorithm", self.chosen.name, expected)


@dataclass(frozen=True)
class SummingSizes:
    """Sizes that determine which configs are worth trying for all calls of a key.

    Attributes:
        A, B: operands of one call. All calls of the key have operands with equal properties, except
            M.
        M: maximum number of rows over the calls of the key.
        requested: algorithm that deprecated keywords of the call select.
        scaling: scales of fp8 operands, and the output's dtype.
        adds_on_arrival: tiles are added to a single sum on the owner rank. This excludes algorithms
            that store the tiles of each rank separately.
    """

    A: torch.Tensor
    B: torch.Tensor
    M: int
    num_ranks: int
    requested: str | None
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
        number: int = config["num_chunks"]
        chunks = chunks_of_row_block(config["gemm_config"], rows, self.B.shape[1], number)
        return len(chunks.rows) == number
