"""A GEMM-AllReduce in two shots: its launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

from triton_dist.kernels.common.launch import Launch
from triton_dist.kernels.common.scattered_gemm_launch import (
    add_left,
    copy_sums,
    scattered_gemm,
    slab_rows,
    tiles_of_slab,
)
from triton_dist.kernels.nvidia.gemm_allreduce_context import GEMMAllReduceTensorParallelContext
from triton_dist.kernels.nvidia.gemm_context import run_add_left, run_gemm


@dataclass  # made at each call: freezing it would take a us
class TwoShotCall:
    """Tiles go to the owners of their rows, who add them and send the sums to all.

    copy_to_local: the result is no memory of the context's.
    """

    A: torch.Tensor
    B: torch.Tensor
    bias: torch.Tensor | None
    ctx: GEMMAllReduceTensorParallelContext
    gemm_config: triton.Config
    persistent: bool
    num_chunks: int
    copy_to_local: bool

    def run(self, looks: object) -> torch.Tensor:
        """Launch it in the present slot, and return the result. ``looks``: one object for operands
        that look alike."""
        C = self._output()
        buffer = self.ctx.buffer
        to, launcher = buffer.describe(), buffer.slots.launcher
        key = (id(looks), id(to), id(self.gemm_config), self.persistent, self.num_chunks)
        alive = (looks, to, self.gemm_config)
        bias = C if self.bias is None else self.bias
        tensors = {"a_ptr": self.A, "b_ptr": self.B, "c_ptr": C, "bias_ptr": bias}
        run_gemm(launcher, key, lambda: self._gemm(C), tensors, alive)
        if self.persistent:
            run_add_left(launcher, key, lambda: self._left(C), C, self.bias, alive)
        address = C.data_ptr()
        launcher.run(
            ("copy", *key, self.copy_to_local, address % 16),
            lambda: self._copy(C),
            (address,),
            ("c_ptr",),
            alive,
        )
        return C

    def launches(self) -> Iterator[Launch]:
        """What ``run`` launches."""
        C = self._output()
        yield self._gemm(C)
        if self.persistent:
            yield self._left(C)
        yield self._copy(C)

    def awaited_tiles(self) -> int:
        """Tiles that its kernels wait for from each peer."""
        rows = slab_rows(self.A.shape[0], self.ctx.num_ranks)
        return tiles_of_slab(self.gemm_config, rows, self.ctx.N)

    def _output(self) -> torch.Tensor:
        if self.copy_to_local:
            return self.A.new_empty((self.A.shape[0], self.ctx.N))
        return self.ctx.buffer.sums(self.A.shape[0])

    def _gemm(self, C: torch.Tensor) -> Launch:
        return scattered_gemm(
            self.A, self.B, C, self.bias, self.gemm_config, self.ctx.buffer.describe(),
            num_sms=self.ctx.device.num_sms, persistent=self.persistent, num_chunks=self.num_chunks,
        )  # fmt: skip

    def _left(self, C: torch.Tensor) -> Launch:
        return add_left(
            C, self.bias, self.gemm_config, self.ctx.buffer.describe(),
            M=C.shape[0], num_sms=self.ctx.device.num_sms, num_chunks=self.num_chunks,
        )  # fmt: skip

    def _copy(self, C: torch.Tensor) -> Launch:
        buffer = self.ctx.buffer
        return copy_sums(
            C, buffer.sums(C.shape[0]), buffer.slots["sum_arrivals"].local, self.gemm_config,
            buffer.describe(), num_chunks=self.num_chunks, copy=self.copy_to_local,
        )  # fmt: skip
