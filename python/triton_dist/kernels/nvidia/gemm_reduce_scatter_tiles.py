"""A GEMM-ReduceScatter by tiles: its launches, the product and, with specialised warps, the sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from triton_dist.kernels.common.launch import Launch, Launcher
from triton_dist.kernels.common.scattered_gemm_launch import Scattering, scattered_gemm
from triton_dist.kernels.common.specialized_scatter import (
    HALVES,
    specialized_scatter,
    specializes_warps,
    sum_parts,
)
from triton_dist.kernels.nvidia.gemm_context import run_gemm
from triton_dist.kernels.nvidia.gemm_reduce_scatter_context import (
    GEMMReduceScatterTensorParallelContext,
)


class ScatteredCall:
    """One call; its operands are checked.

    C: [M / num_ranks, N], the result. count: what a tile adds to its chunk's counter.
    """

    def __init__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        ctx: GEMMReduceScatterTensorParallelContext,
        gemm_config: triton.Config,
        persistent: bool,
        to: Scattering,
        num_chunks: int,
    ) -> None:
        self.C = A.new_empty((A.shape[0] // ctx.num_ranks, B.shape[1]))
        self._A, self._B, self._bias, self._ctx = A, B, bias, ctx
        self._config, self._persistent = gemm_config, persistent
        self._to, self._num_chunks = to, num_chunks
        self._is_specialized = specializes_warps(A, B, self.C, gemm_config, to.scatter, persistent)
        self.count = HALVES if self._is_specialized else 1

    def run_gemm(self, looks: object) -> None:
        """Launch the product in the present slot. ``looks``: one object for operands that look
        alike."""
        tensors = {"a_ptr": self._A, "b_ptr": self._B}
        if not self._is_specialized:
            tensors |= self._sum_tensors()
        run_gemm(self._launcher, self._key(looks), self._gemm, tensors, self._alive(looks))

    def run_sum(self, looks: object) -> None:
        """Launch the sum of the own rows, where the product does not add them."""
        if not self._is_specialized:
            return
        tensors = self._sum_tensors()
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        key = ("sum", *self._key(looks), *(address % 16 for address in addresses))
        self._launcher.run(key, self._sum, addresses, tuple(tensors), self._alive(looks))

    def launches(self) -> Iterator[Launch]:
        """What is launched."""
        yield self._gemm()
        if self._is_specialized:
            yield self._sum()

    @property
    def _launcher(self) -> Launcher:
        return self._ctx.buffer.slots.launcher

    def _sum_tensors(self) -> dict[str, torch.Tensor]:
        return {"c_ptr": self.C, "bias_ptr": self.C if self._bias is None else self._bias}

    def _key(self, looks: object) -> tuple[Any, ...]:
        return id(looks), id(self._to), id(self._config), self._persistent, self._num_chunks

    def _alive(self, looks: object) -> object:
        return looks, self._to, self._config

    def _gemm(self) -> Launch:
        operands = self._A, self._B, self.C
        num_sms = self._ctx.device.num_sms
        if self._is_specialized:
            is_cut = self._config.kwargs.get("SPLIT_K", 1) > 1
            return specialized_scatter(
                *operands, self._config, self._to, num_sms=num_sms, num_chunks=self._num_chunks,
                split=self._ctx.split_workspace if is_cut else None,
            )  # fmt: skip
        return scattered_gemm(
            *operands, self._bias, self._config, self._to, num_sms=num_sms,
            persistent=self._persistent, num_chunks=self._num_chunks,
        )  # fmt: skip

    def _sum(self) -> Launch:
        return sum_parts(
            self.C, self._bias, self._config, self._to, num_sms=self._ctx.device.num_sms,
            num_chunks=self._num_chunks,
        )  # fmt: skip
