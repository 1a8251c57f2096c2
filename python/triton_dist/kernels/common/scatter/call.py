"""Calls of ops that compute ``sum over ranks of A @ B``, plus ``bias``: what they accept, and what
a tuning of them goes by."""

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
    accept,
    buffer_of,
    kind_checks,
    layout_of,
    signature_of,
    tensor_checks,
)
from triton_dist.kernels.common.gemm.spaces import fits_gemm, fits_rows, most_rows
from triton_dist.kernels.common.launch import dot_precision
from triton_dist.kernels.common.op import OpCall, check_straggler, check_tiles
from triton_dist.kernels.common.scatter.partials import (
    MAX_CHUNKS,
    SummingContext,
    chunks_of_row_block,
)

_CHUNKS = range(1, MAX_CHUNKS + 1)


@dataclass(eq=False, repr=False)  # made at each call: freezing it would take a us
class SummingCall(OpCall):
    """One call: the parameters that all such ops have.

    A: [M, K_per_rank]. B: [K_per_rank, N]. bias: [N] or none. method: older name of the way.
    num_ctas, block_bytes: launch of a sum by itself.
    """

    kind: ClassVar[type[SummingContext[Any]]]
    """Type of the op's contexts."""
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
    accepted_key: tuple[Any, ...] | None
    operands: ProductKey = field(init=False)

    def __post_init__(self) -> None:
        known = self.accepted_key
        if known is None:
            self.operands = self.accept(self.A, self.B, self.bias, self.ctx)
        else:
            self.operands = known[0]
        if self.straggler_option is not None:
            check_straggler(self.kind.function, self.straggler_option)
        if self.num_chunks not in _CHUNKS:  # there are flags for so many
            expected = f"1 to {MAX_CHUNKS}"
            raise InvalidArgument(self.kind.function, "num_chunks", self.num_chunks, expected)

    def layouts(self) -> tuple[object, ...]:
        """Return all of the operands that decides how they are launched, beside their addresses."""
        A, B = self.A, self.B
        precision = dot_precision(A.dtype)
        return self.operands, A.stride(), B.stride(), self.bias is None, precision

    @staticmethod
    @abstractmethod
    def asked(**_: Any) -> str | None:
        """Name the way that older keywords of a call ask for; ``None``: they ask for none."""

    @staticmethod
    @abstractmethod
    def choice(ctx: Any) -> bool:
        """Return what a tuning depends on beside the operands; takes keywords of the op."""

    @staticmethod
    def sums_on_arrival(ctx: Any, **_: Any) -> bool:
        """Tell whether tiles are added to one sum on their owner, as they arrive."""
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
        """Name what a tuning is for. A way that older keywords ask for is tuned by itself."""
        key = (cls.accept(A, B, bias, ctx), cls.choice(ctx, **options))
        asked = cls.asked(**options) if options else None
        return key if asked is None else (*key, asked)

    @classmethod
    def sizes(
        cls, A: torch.Tensor, B: torch.Tensor, ctx: Any, *_: Any, **options: Any
    ) -> SummingSizes:
        """Say what decides which configs are worth trying for a call."""
        M = cls.kind.whole_rows(most_rows(A.shape[0]), ctx.num_ranks)
        asked = cls.asked(**options)
        return SummingSizes(A, B, M, ctx.num_ranks, asked, cls.sums_on_arrival(ctx, **options))

    @classmethod
    def accept(
        cls, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, ctx: SummingContext[Any]
    ) -> ProductKey:
        """All that a tuning depends on; one object for operands of the same signature.

        Raises:
            InvalidArgument, ContextFinalized: the call cannot work.
        """
        function = cls.kind.function
        device = buffer_of(ctx, cls.kind, function, cls.kind.creator).slots.epoch.device

        def checks() -> Iterator[Check]:
            yield from tensor_checks(A=A, B=B, **({} if bias is None else {"bias": bias}))
            is_matrix = A.ndim == 2 and A.shape[1] >= 1
            yield "A.shape", tuple(A.shape), is_matrix, "[M, K_per_rank]"
            (M, K), N = A.shape, ctx.N
            yield "A.shape", tuple(A.shape), M >= 1, "[M, K_per_rank] with at least one row"
            yield cls.kind.rows_check("M", M, ctx.num_ranks)
            yield "M", M, ctx.max_M >= M, f"at most the context's max_M = {ctx.max_M}"
            yield "B.shape", tuple(B.shape), tuple(B.shape) == (K, N), f"[K_per_rank, N] = {(K, N)}"
            if bias is not None:
                yield "bias.shape", tuple(bias.shape), tuple(bias.shape) == (N,), f"[N] = {(N,)}"
                expected = "a contiguous bias; call bias.contiguous()"
                yield "bias.stride()", bias.stride(), bias.is_contiguous(), expected
            yield from kind_checks(ctx.output_dtype, device, A=A, B=B, bias=bias)

        def key() -> ProductKey:
            (M, K), contiguous = A.shape, A.is_contiguous()
            return ProductKey(M, ctx.N, K, A.dtype, layout_of(B), contiguous, ctx.num_ranks)

        return accept(ctx.accepted, signature_of(B, A, B, bias), function, checks, key)

    def check_tiles(self) -> None:
        """Refuse a call that has no tiles."""
        check_tiles(self.kind.function, self.gemm_config, self.chosen.name)

    def check_rows(self, most: int) -> None:
        """Refuse more rows than the memory of the way holds."""
        if self.A.shape[0] > most and self.ctx.num_ranks > 1:
            expected = f"another one for an M of more than {most}"
            raise InvalidArgument(self.kind.function, "algorithm", self.chosen.name, expected)


@dataclass(frozen=True)
class SummingSizes:
    """Sizes that decide which configs are worth trying: those of the key's largest M.

    A: [M, K_per_rank] of the call, for its other attributes. M: rows as the key counts them.
    asked: the way that older keywords of the call ask for. adds: tiles are added to one sum on
    their owner, a choice against all ways that keep them apart.
    """

    A: torch.Tensor
    B: torch.Tensor
    M: int
    num_ranks: int
    asked: str | None
    adds: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the product."""
        return self.M * self.B.shape[1] * self.B.element_size()

    def suit(self, config: Mapping[str, Any], rows: int) -> bool:
        """Return whether the tiles of a config are worth trying for ``rows`` rows."""
        return fits_rows(config["gemm_config"], rows) and fits_gemm(config, self.A, self.B)

    def have_chunks(self, config: Mapping[str, Any], rows: int) -> bool:
        """Tell whether there are as many chunks of so many rows as a config says."""
        number: int = config["num_chunks"]
        chunks = chunks_of_row_block(config["gemm_config"], rows, self.B.shape[1], number)
        return len(chunks.rows) == number
