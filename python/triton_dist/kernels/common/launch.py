"""A kernel with everything that its launch needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from triton_dist.errors import CandidateFailed
from triton_dist.runtime.triton_compat import has_allocator, is_interpreting

_TMA_ALIGNMENT = 16


@dataclass(frozen=True)
class Launch:
    """One kernel launch that is ready to go: ``run`` it, or only ``compile`` what it would run."""

    kernel: Any
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        _ensure_allocator()
        self.kernel[self.grid](*self.args, **self.options)

    def compile(self) -> None:
        """Compile and load, launch nothing.

        Raises:
            CandidateFailed: it does not compile, or does not fit the device.
        """
        if is_interpreting():
            return
        try:
            self.kernel.warmup(*self.args, grid=self.grid, **self.options)._init_handles()
        except Exception as failure:  # Triton's compiler raises whatever its passes raise
            raise CandidateFailed(f"{type(failure).__name__}: {failure}") from failure


def _ensure_allocator() -> None:
    """Give Triton memory for the descriptors that a kernel builds; an allocator of the user's
    stays.

    Triton keeps it per thread context, so each launch sees to it instead of the first import.
    """
    if not has_allocator():
        triton.set_allocator(_allocate)


def _allocate(nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.int8, device="cuda")


def fits_descriptor(*matrices: torch.Tensor) -> bool:
    """Whether TMA can read and write these 2-D tensors as they lie: one unit stride, the other
    stride and the start multiples of 16 bytes."""
    return all(
        min(matrix.stride()) == 1
        and max(matrix.stride()) * matrix.element_size() % _TMA_ALIGNMENT == 0
        and matrix.data_ptr() % _TMA_ALIGNMENT == 0
        for matrix in matrices
    )


def dot_precision(dtype: torch.dtype) -> str:
    """``input_precision`` of ``tl.dot`` that means for ``dtype`` what torch's matmul means now."""
    return (
        "ieee" if dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32 else "tf32"
    )
