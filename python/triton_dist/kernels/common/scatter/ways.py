"""Ways of ops that compute ``sum over ranks of A @ B``, plus ``bias``: what they share, and the
launches of a call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

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
)
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer, shard_elements
from triton_dist.kernels.common.gemm.spaces import suits_gemm, suits_rows
from triton_dist.kernels.common.launch import Launch, dot_precision
from triton_dist.kernels.common.op import AskedWay, OpCall
from triton_dist.kernels.common.scatter.kernel import scattered_gemm
from triton_dist.kernels.common.scatter.one_launch import exchanged_gemm, programs_of
from triton_dist.kernels.common.scatter.partials import (
    MAX_CHUNKS,
    Scattering,
    SummingContext,
    chunks_of_row_block,
    tiles_of_row_block,
)
from triton_dist.kernels.common.scatter.tiles import add_deferred, copy_sums
from triton_dist.runtime.device import current_device


@dataclass(eq=False, repr=False)  # made at each call: freezing it would take a us
class SummingCall(OpCall):
    """One call: the parameters that all such ops have.

    A: [M, K_per_rank]. B: [K_per_rank, N]. bias: [N] or none. looks: one object for operands that
    look alike.
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
    way: str | None
    looks: object = field(init=False)

    @classmethod
    def accept(
        cls, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, ctx: SummingContext[Any]
    ) -> ProductKey:
        """All that a tuning depends on; one object for operands of the same signature.

        Raises:
            InvalidArgument, ContextFinalized: the call cannot work.
        """
        function = cls.kind.function
        device = buffer_of(ctx, function, cls.kind.creator).slots.epoch.device

        def checks() -> Iterator[Check]:
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

        signature = (signature_of(A, B, bias), B.data_ptr() % 16)
        return accept(ctx.accepted, signature, function, checks, key)

    def check_tiles(self) -> None:
        """Refuse a call that has no tiles, or chunks that no row block has."""
        if not isinstance(self.gemm_config, triton.Config):
            expected = f"a triton.Config for way={self.chosen.name!r}"
            raise InvalidArgument(self.kind.function, "gemm_config", self.gemm_config, expected)
        self.check_chunks()

    def check_chunks(self) -> None:
        """Refuse a number of chunks for which there are no flags."""
        if not 1 <= self.num_chunks <= MAX_CHUNKS:
            expected = f"1 to {MAX_CHUNKS}"
            raise InvalidArgument(self.kind.function, "num_chunks", self.num_chunks, expected)

    def check_rows(self, most: int) -> None:
        """Refuse more rows than the memory of the way holds."""
        if self.A.shape[0] > most and self.ctx.num_ranks > 1:
            expected = f"another one for an M of more than {most}"
            raise InvalidArgument(self.kind.function, "way", self.chosen.name, expected)


def outputs(C: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Tensors that may lie elsewhere at each call, by the names that kernels have for them."""
    return {"out.c": C} if bias is None else {"out.c": C, "out.bias": bias}


@dataclass  # made at each call: freezing it would take a us
class Scattered:
    """Launches of a call whose tiles go ``to`` others and are summed into C (``scattered_gemm``),
    in one slot."""

    call: SummingCall
    C: torch.Tensor
    to: Scattering

    def __post_init__(self) -> None:
        self.key = self._key()
        """Everything that launches depend on, beside the addresses of tensors."""
        self._alive = self.call.looks, self.to, self.call.gemm_config  # what it has the ids of

    def run(self) -> None:
        """Launch all."""
        self.multiply()
        self.add_deferred()

    def multiply(self) -> None:
        """Launch the GEMM, once all that comes after it is loaded."""
        tensors = {"a_ptr": self.call.A, "b_ptr": self.call.B, **self._summed()}
        self._launch(self.key, self._gemm, tensors)

    def add_deferred(self) -> None:
        """Launch what adds the tiles that the GEMM defers, if it can defer any."""
        if self._may_defer():
            self._launch(("deferred", *self.key), self._deferred, self._summed())

    def compile(self) -> None:
        """Compile and load all launches."""
        self._gemm().compile()

    def _key(self) -> tuple[object, ...]:
        call = self.call
        return (
            id(call.looks), id(self.to), id(call.gemm_config), dot_precision(call.A.dtype),
            call.persistent, call.num_chunks,
        )  # fmt: skip

    def _launch(self, key: object, make: Any, tensors: dict[str, torch.Tensor]) -> None:
        self.call.ctx.buffer.slots.launcher.run(key, make, tensors, self._alive)

    def _summed(self) -> dict[str, torch.Tensor]:
        return outputs(self.C, self.call.bias)

    def _may_defer(self) -> bool:
        return self.call.persistent and self.to.num_ranks > 1

    def _after(self) -> Iterator[Launch]:
        """Launches after the GEMM."""
        if self._may_defer():
            yield self._deferred()

    def _gemm(self) -> Launch:
        call = self.call
        return scattered_gemm(
            call.A, call.B, self.C, call.bias, call.gemm_config, self.to,
            num_sms=current_device().num_sms, persistent=call.persistent,
            num_chunks=call.num_chunks,
        ).followed_by(*self._after())  # fmt: skip

    def _deferred(self) -> Launch:
        call = self.call
        return add_deferred(
            self.C, call.bias, call.gemm_config, self.to,
            M=call.A.shape[0], num_sms=current_device().num_sms, num_chunks=call.num_chunks,
        )  # fmt: skip


@dataclass  # made at each call: freezing it would take a us
class TwoShots(Scattered):
    """Tiles go to the owners of their rows, who add them and send the sums to all.

    sums, arrivals: where they come to, a matrix like C, and their flags. C may be ``sums``.
    """

    sums: torch.Tensor
    arrivals: torch.Tensor

    def run(self) -> None:
        super().run()
        self._launch(("copy", *self.key), self._copy, {"c_ptr": self.C})

    def _key(self) -> tuple[object, ...]:
        return *super()._key(), self._copies()

    def _copies(self) -> bool:
        return self.C is not self.sums

    def _after(self) -> Iterator[Launch]:
        yield from super()._after()
        yield self._copy()

    def _copy(self) -> Launch:
        return copy_sums(
            self.C, self.sums, self.arrivals, self.call.gemm_config, self.to,
            num_chunks=self.call.num_chunks, copy=self._copies(),
        )  # fmt: skip


@dataclass  # made at each call: freezing it would take a us
class Exchanged:
    """The one launch of a call that multiplies, sends, waits and adds.

    to_owners: each row is added by one rank, else by all. pass_on: who then sends it to all; else
    the result is the own M / num_ranks rows.
    """

    call: SummingCall
    buffer: ExchangeBuffer
    to_owners: bool
    pass_on: bool = False

    def run(self) -> torch.Tensor:
        """Launch it, and return the result.

        Raises:
            WaitTimeout: while candidates are tried, when a wait of this call gave up and nobody
                settles such things later.
        """
        call, buffer, C = self.call, self.buffer, self._output()
        num_ctas = programs_of(
            call.gemm_config, call.A.shape[0], C.shape[1], buffer.device.num_sms, buffer.num_ranks,
            self.to_owners,
        )  # fmt: skip
        buffer.begin(self.phases(), num_ctas, num_pieces=1)
        buffer.launcher.run(
            (
                type(self), id(call.looks), id(call.gemm_config), dot_precision(call.A.dtype),
                call.persistent, self.to_owners, self.pass_on,
            ),
            lambda: self.gemm(C),
            {"a_ptr": call.A, "b_ptr": call.B, **outputs(C, call.bias)},
            alive=(call.looks, call.gemm_config),
        )  # fmt: skip
        buffer.end()
        return C

    def compile(self) -> None:
        """Compile and load the launch."""
        self.gemm(self._output()).compile()

    def phases(self) -> int:
        """Count how often a program waits for flags of its peers."""
        return 2 if self.pass_on else 1

    def gemm(self, C: torch.Tensor) -> Launch:
        """Describe the launch that sums into C."""
        call, buffer = self.call, self.buffer
        rows = -(-call.A.shape[0] // buffer.num_ranks) if self.to_owners else call.A.shape[0]
        return exchanged_gemm(
            call.A, call.B, C, call.bias, call.gemm_config, buffer.regions(C.dtype),
            shard_elements(rows * C.shape[1]), rank=buffer.rank, num_ranks=buffer.num_ranks,
            num_sms=buffer.device.num_sms, persistent=call.persistent, to_owners=self.to_owners,
            pass_on=self.pass_on,
        )  # fmt: skip

    def _output(self) -> torch.Tensor:
        A, B = self.call.A, self.call.B
        is_scattered = self.to_owners and not self.pass_on
        rows = A.shape[0] // (self.buffer.num_ranks if is_scattered else 1)
        return A.new_empty((rows, B.shape[1]))


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
        """Tell whether tiles are worth trying where they are of so many rows."""
        return suits_rows(config["gemm_config"], rows) and suits_gemm(config, self.A, self.B)

    def have_chunks(self, config: Mapping[str, Any], rows: int) -> bool:
        """Tell whether there are as many chunks of so many rows as a config says."""
        number: int = config["num_chunks"]
        chunks = chunks_of_row_block(config["gemm_config"], rows, self.B.shape[1], number)
        return len(chunks.rows) == number


C = TypeVar("C", bound=SummingCall)


class SummingWay(AskedWay[C, SummingSizes]):
    """A way of such an op."""

    is_general: ClassVar[bool] = False
    """Also of one rank, and where tiles are added to one sum on their owner."""

    def suits(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        fits = self.is_general or (sizes.num_ranks > 1 and not sizes.adds)
        return fits and super().suits(config, sizes)


class Overlapped(SummingWay[C], Generic[C]):
    """Tiles travel while the next ones are multiplied."""

    copied: ClassVar[bool] = False
    """Copy engines bring them."""

    def check(self, call: C) -> None:
        call.check_tiles()

    def compile(self, call: C) -> None:
        self.scattered(call).compile()

    def run(self, call: C) -> torch.Tensor:
        ctx, units, awaited = call.ctx, self.units(call), False
        ctx.buffer.slots.take(call.A.shape[0], copied=self.copied)
        ctx.sleep(call.straggler_option)
        try:
            scattered = self.scattered(call)
            scattered.run()
            awaited = True  # an own tile waits for each peer
        finally:
            ctx.buffer.slots.finish(awaited, lambda: ctx.buffer.expected(units))
        return scattered.C

    def units(self, call: C) -> int:
        """Count what has a flag of each row block: its tiles."""
        rows = call.ctx.rows_of_rank(call.A.shape[0])
        return tiles_of_row_block(call.gemm_config, rows, call.ctx.N)

    @abstractmethod
    def scattered(self, call: C) -> Scattered:
        """Describe the launches in the present slot."""


class InOneLaunch(SummingWay[C], Generic[C]):
    """One launch that multiplies, sends, waits and adds."""

    def compile(self, call: C) -> None:
        self.exchanged(call).compile()

    def run(self, call: C) -> torch.Tensor:
        call.ctx.sleep(call.straggler_option)
        result: torch.Tensor = call.ctx.buffer.slots.beside(self.exchanged(call).run)
        return result

    @abstractmethod
    def exchanged(self, call: C) -> Exchanged:
        """Describe the launch."""


class WholeProduct(SummingWay[C], Generic[C]):
    """``torch.matmul`` of the whole product, which is summed then; the bias is added to the rounded
    sum."""

    def run(self, call: C) -> torch.Tensor:
        call.ctx.sleep(call.straggler_option)
        A, B = call.A.detach(), call.B.detach()  # like ours, without a history for autograd

        def whole() -> torch.Tensor:
            return torch.matmul(A, B) if call.ctx.num_ranks == 1 else self.multiply(call, A, B)

        C: torch.Tensor = call.ctx.buffer.slots.beside(whole)
        return C if call.bias is None else C.add_(call.bias.detach())

    def multiply(self, call: C, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Return what this rank gets of the sum of ``A @ B``; there are several ranks."""
        return self.sum(call, torch.matmul(A, B))

    @abstractmethod
    def sum(self, call: C, product: torch.Tensor) -> torch.Tensor:
        """Return what this rank gets of the sum of ``product``."""
