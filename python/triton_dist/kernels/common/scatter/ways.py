"""Base of the ways of ops that sum products over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.op import OpCall, Way
from triton_dist.kernels.common.scatter.calls import ExchangedCall
from triton_dist.kernels.common.scatter.partials import MAX_CHUNKS


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
S = TypeVar("S", bound="SummingSizes")


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
