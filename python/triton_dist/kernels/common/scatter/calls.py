"""GEMMs whose tiles go to who needs them and are added there: the launches of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer, shard_elements
from triton_dist.kernels.common.launch import Launch, Launcher, dot_precision
from triton_dist.kernels.common.scatter.launch import (
    Scattering,
    add_left,
    copy_sums,
    scattered_gemm,
)
from triton_dist.kernels.common.scatter.one_launch import exchanged_gemm, programs_of
from triton_dist.kernels.common.scatter.packets import packet_gemm
from triton_dist.runtime.device import current_device


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
    the result is the own M / num_ranks rows. in_packets: without flags; of what all ranks add.
    """

    A: torch.Tensor
    B: torch.Tensor
    bias: torch.Tensor | None
    buffer: ExchangeBuffer
    gemm_config: triton.Config
    persistent: bool
    to_owners: bool
    pass_on: bool = False
    in_packets: bool = False

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
        phases = 0 if self.in_packets else 2 if self.pass_on else 1
        self.buffer.begin(phases, num_ctas, num_pieces=1)
        bias = C if self.bias is None else self.bias
        self.buffer.launcher.run(
            (
                id(looks), id(self.gemm_config), dot_precision(self.A.dtype), self.persistent,
                self.to_owners, self.pass_on, self.in_packets,
            ),
            lambda: self._gemm(C),
            {"a_ptr": self.A, "b_ptr": self.B, "c_ptr": C, "bias_ptr": bias},
            alive=(looks, self.gemm_config),
        )  # fmt: skip
        self.buffer.end()
        return C

    def launch(self) -> Launch:
        """The launch of ``run``."""
        return self._gemm(self._output())

    def _output(self) -> torch.Tensor:
        is_scattered = self.to_owners and not self.pass_on
        rows = self.A.shape[0] // (self.buffer.num_ranks if is_scattered else 1)
        return self.A.new_empty((rows, self.B.shape[1]))

    def _gemm(self, C: torch.Tensor) -> Launch:
        buffer = self.buffer
        if self.in_packets:
            return packet_gemm(
                self.A, self.B, C, self.bias, self.gemm_config, buffer.packet_regions(),
                rank=buffer.rank, num_ranks=buffer.num_ranks, num_sms=buffer.device.num_sms,
                persistent=self.persistent,
            )  # fmt: skip
        rows = -(-self.A.shape[0] // buffer.num_ranks) if self.to_owners else self.A.shape[0]
        return exchanged_gemm(
            self.A, self.B, C, self.bias, self.gemm_config, buffer.regions(C.dtype),
            shard_elements(rows * C.shape[1]), rank=buffer.rank, num_ranks=buffer.num_ranks,
            num_sms=buffer.device.num_sms, persistent=self.persistent, to_owners=self.to_owners,
            pass_on=self.pass_on,
        )  # fmt: skip
