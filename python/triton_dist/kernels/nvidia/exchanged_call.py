"""A GEMM whose tiles go to who needs them, and are added there, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from triton_dist.kernels.common.exchanged_gemm import exchanged_gemm, programs_of
from triton_dist.kernels.common.launch import Launch, dot_precision
from triton_dist.kernels.common.packet_gemm import packet_gemm
from triton_dist.kernels.nvidia.exchange import ExchangeBuffer, shard_elements


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
        """What ``run`` launches."""
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
