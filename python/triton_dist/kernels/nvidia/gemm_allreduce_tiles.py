"""A GEMM-AllReduce in two shots: its launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from triton_dist.kernels.common.launch import Launch
from triton_dist.kernels.common.scattered_gemm_launch import copy_sums
from triton_dist.kernels.nvidia.scattered_call import ScatteredCall


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
