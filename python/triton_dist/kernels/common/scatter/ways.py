"""Ways of ops that sum products over ranks: their bases, and the launches of their calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer, shard_elements
from triton_dist.kernels.common.launch import Launch, Launcher, dot_precision
from triton_dist.kernels.common.op import OpCall, Way
from triton_dist.kernels.common.scatter.kernel import scattered_gemm
from triton_dist.kernels.common.scatter.one_launch import exchanged_gemm, programs_of
from triton_dist.kernels.common.scatter.partials import MAX_CHUNKS, Scattering
from triton_dist.kernels.common.scatter.tiles import add_left, copy_sums
from triton_dist.runtime.device import current_device

S = TypeVar("S", bound="SummingSizes")


@dataclass  # made at each call: freezing it would take a us
class ScatteredCall:
    """``multiply``, then ``add_left``, in one slot.

    C, to, num_chunks: as of ``scattered_gemm``. looks: one object for operands that look alike.
    """

    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    bias: torch.Tensor | None
    gemm_config: triton.Config
    to: Scattering
    launcher: Launcher
    persistent: bool
    num_chunks: int
    looks: object

    def multiply(self) -> None:
        """Launch the GEMM, once all that comes behind it is loaded."""
        tensors = {"a_ptr": self.A, "b_ptr": self.B, **self._summed()}
        self.launcher.run(self.key(), self._gemm, tensors, self._alive())

    def add_left(self) -> None:
        """Launch what adds the tiles that the GEMM leaves, if it can leave any."""
        if self._may_leave():
            key = "left", *self.key()
            self.launcher.run(key, self._left, self._summed(), self._alive())

    def compile(self) -> None:
        """Compile and load all launches."""
        self._gemm().compile()

    def key(self) -> tuple[object, ...]:
        """Everything that launches depend on, beside the addresses of tensors."""
        return (
            id(self.looks), id(self.to), id(self.gemm_config), dot_precision(self.A.dtype),
            self.persistent, self.num_chunks,
        )  # fmt: skip

    def _alive(self) -> object:
        return self.looks, self.to, self.gemm_config  # what the key has the ids of

    def _summed(self) -> dict[str, torch.Tensor]:
        return {"c_ptr": self.C, "bias_ptr": self.C if self.bias is None else self.bias}

    def _may_leave(self) -> bool:
        return self.persistent and self.to.num_ranks > 1

    def _behind(self) -> Iterator[Launch]:
        """Launches after the GEMM."""
        if self._may_leave():
            yield self._left()

    def _gemm(self) -> Launch:
        return scattered_gemm(
            self.A, self.B, self.C, self.bias, self.gemm_config, self.to,
            num_sms=current_device().num_sms, persistent=self.persistent,
            num_chunks=self.num_chunks,
        ).followed_by(*self._behind())  # fmt: skip

    def _left(self) -> Launch:
        return add_left(
            self.C, self.bias, self.gemm_config, self.to,
            M=self.A.shape[0], num_sms=current_device().num_sms, num_chunks=self.num_chunks,
        )  # fmt: skip


@dataclass  # made at each call: freezing it would take a us
class TwoShotCall(ScatteredCall):
    """Tiles go to the owners of their rows, who add them and send the sums to all.

    sums, arrivals: where they come to, a matrix like C, and their flags. C may be ``sums``.
    """

    sums: torch.Tensor
    arrivals: torch.Tensor

    def run(self) -> None:
        """Launch it."""
        self.multiply()
        self.add_left()
        self.launcher.run(("copy", *self.key()), self._copy, {"c_ptr": self.C}, self._alive())

    def key(self) -> tuple[object, ...]:
        return *super().key(), self._copies()

    def _copies(self) -> bool:
        return self.C is not self.sums

    def _behind(self) -> Iterator[Launch]:
        yield from super()._behind()
        yield self._copy()

    def _copy(self) -> Launch:
        return copy_sums(
            self.C, self.sums, self.arrivals, self.gemm_config, self.to,
            num_chunks=self.num_chunks, copy=self._copies(),
        )  # fmt: skip


@dataclass  # made at each call: freezing it would take a us
class ExchangedCall:
    """``sum over ranks of A @ B``, plus ``bias``.

    to_owners: each row is added by one rank, else by all. pass_on: who then sends it to all; else
    the result is the own M / num_ranks rows.
    """

    A: torch.Tensor
    B: torch.Tensor
    bias: torch.Tensor | None
    buffer: ExchangeBuffer
    gemm_config: triton.Config
    persistent: bool
    to_owners: bool
    pass_on: bool = False

    def run(self, looks: object) -> torch.Tensor:
        """Launch it, and return the result. ``looks``: one object for operands that look alike.

        Raises:
            WaitTimeout: while candidates are tried, when a wait of this call gave up and nobody
                settles such things later.
        """
        C = self._output()
        M, N = self.A.shape[0], self.B.shape[1]
        num_ctas = programs_of(
            self.gemm_config, M, N, self.buffer.device.num_sms, self.buffer.num_ranks,
            self.to_owners,
        )  # fmt: skip
        self.buffer.begin(self.phases(), num_ctas, num_pieces=1)
        bias = C if self.bias is None else self.bias
        self.buffer.launcher.run(
            (
                type(self), id(looks), id(self.gemm_config), dot_precision(self.A.dtype),
                self.persistent, self.to_owners, self.pass_on,
            ),
            lambda: self.gemm(C),
            {"a_ptr": self.A, "b_ptr": self.B, "c_ptr": C, "bias_ptr": bias},
            alive=(looks, self.gemm_config),
        )  # fmt: skip
        self.buffer.end()
        return C

    def launch(self) -> Launch:
        """The launch of ``run``."""
        return self.gemm(self._output())

    def phases(self) -> int:
        """Count how often a program waits for flags of its peers."""
        return 2 if self.pass_on else 1

    def _output(self) -> torch.Tensor:
        is_scattered = self.to_owners and not self.pass_on
        rows = self.A.shape[0] // (self.buffer.num_ranks if is_scattered else 1)
        return self.A.new_empty((rows, self.B.shape[1]))

    def gemm(self, C: torch.Tensor) -> Launch:
        """Describe the launch that sums into C."""
        buffer = self.buffer
        rows = -(-self.A.shape[0] // buffer.num_ranks) if self.to_owners else self.A.shape[0]
        return exchanged_gemm(
            self.A, self.B, C, self.bias, self.gemm_config, buffer.regions(C.dtype),
            shard_elements(rows * C.shape[1]), rank=buffer.rank, num_ranks=buffer.num_ranks,
            num_sms=buffer.device.num_sms, persistent=self.persistent, to_owners=self.to_owners,
            pass_on=self.pass_on,
        )  # fmt: skip


class SummingCall(OpCall):
    """One call of an op that computes ``sum over ranks of A @ B``, plus ``bias``.

    A: [M, K_per_rank]. B: [K_per_rank, N]. bias: [N] or none. looks: one object for operands that
    look alike. The others are parameters of the op.
    """

    function: str
    """The op's name, for errors."""
    A: torch.Tensor
    B: torch.Tensor
    bias: torch.Tensor | None
    ctx: Any
    gemm_config: Any
    persistent: bool
    num_chunks: int
    straggler_option: tuple[int, int] | None
    looks: object

    def check_tiles(self) -> None:
        """Refuse a call that has no tiles, or chunks that no row block has."""
        if not isinstance(self.gemm_config, triton.Config):
            expected = f"a triton.Config for way={self.chosen.name!r}"
            raise InvalidArgument(self.function, "gemm_config", self.gemm_config, expected)
        self.check_chunks()

    def check_chunks(self) -> None:
        """Refuse a number of chunks for which there are no flags."""
        if not 1 <= self.num_chunks <= MAX_CHUNKS:
            expected = f"1 to {MAX_CHUNKS}"
            raise InvalidArgument(self.function, "num_chunks", self.num_chunks, expected)

    def check_rows(self, most: int) -> None:
        """Refuse more rows than the memory of the way holds."""
        if self.A.shape[0] > most and self.ctx.num_ranks > 1:
            expected = f"another one for an M of more than {most}"
            raise InvalidArgument(self.function, "way", self.chosen.name, expected)


C = TypeVar("C", bound=SummingCall)


class SummingSizes:
    """Fields of a key's sizes that all such ways look at."""

    num_ranks: int
    asked: str | None
    """The way that older keywords of the call ask for."""
    adds: bool
    """Tiles are added to one sum on their owner: a choice against all ways that keep them apart."""


class SummingWay(Way[C, S]):
    """A way that needs peers."""

    def suits(self, config: Mapping[str, Any], sizes: S) -> bool:
        if sizes.asked not in (None, self.name) or sizes.num_ranks == 1 or sizes.adds:
            return False
        return self.fits(config, sizes)

    def fits(self, config: Mapping[str, Any], sizes: S) -> bool:
        """Tell whether a config is worth trying among several ranks. It must not go by the rows
        that a context holds: others have the same key."""
        raise NotImplementedError


class OneLaunch(SummingWay[C, S], Generic[C, S]):
    """One launch that multiplies, sends, waits and adds."""

    def compile(self, call: C) -> None:
        self.exchanged(call).launch().compile()

    def run(self, call: C) -> torch.Tensor:
        call.ctx.sleep(call.straggler_option)
        exchanged = self.exchanged(call)
        result: torch.Tensor = call.ctx.buffer.slots.beside(lambda: exchanged.run(call.looks))
        return result

    def exchanged(self, call: C) -> ExchangedCall:
        """Describe the launch."""
        raise NotImplementedError


class WholeProduct(SummingWay[C, S], Generic[C, S]):
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

    def sum(self, call: C, product: torch.Tensor) -> torch.Tensor:
        """Return what this rank gets of the sum of ``product``."""
        raise NotImplementedError
