"""A GEMM whose tiles go to the owners of their rows and are added there: its launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

from triton_dist.kernels.common.launch import Launch, Launcher, dot_precision
from triton_dist.kernels.common.scattered_gemm_launch import Scattering, add_left, scattered_gemm
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
        """What launches depend on, beside the addresses of tensors."""
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
        """What is launched behind the GEMM."""
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
