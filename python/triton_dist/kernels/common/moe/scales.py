"""Scales of fp8 operands of grouped GEMMs, and packing of rows with their scales for sending.

``gemm/scales.py`` describes the recipes (which elements share a scale): TENSOR, ROW and BLOCK.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triton_dist.kernels.common.gemm.scales import (
    BLOCK_ELEMENTS,
    BLOCK_SCALES,
    FP8,
    Scaling,
    num_scale_blocks,
)

_ALIGNMENT = 16


class GroupedScales(NamedTuple):
    """Kernel argument: fp32 scales and their strides in elements.

    A stride is 0 along a dimension with equal scales. If peers send rows of A, ``a`` has the
    scales of received rows and ``own`` of this rank's rows; otherwise ``own`` is ``None``.
    """

    a: Any
    b: Any
    own: Any
    stride_am: Any
    stride_ak: Any
    stride_be: Any
    stride_bk: Any
    stride_bn: Any


class OperandScales(NamedTuple):
    """Scales of a call: a and b from ``Scaling.scales_by_block``, and the kernels' SCALING.

    ``own`` is described in ``GroupedScales``.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: int
    own: torch.Tensor | None = None

    @classmethod
    def of(cls, A: torch.Tensor, B: torch.Tensor, scaling: Scaling) -> OperandScales | None:
        """Return the scales of a checked call; ``None`` for operands that are not fp8."""
        if A.dtype not in FP8:
            return None
        recipe, a, b = scaling.scales_by_block(A, B)
        return cls(a, b, scaling.scaling_constant(recipe))

    @property
    def is_block(self) -> bool:
        return bool(self.scaling == BLOCK_SCALES.value)

    def columns(self, first: int, end: int) -> OperandScales:
        """Return the scales of columns ``first`` to ``end`` of B.

        With BLOCK scales, ``first`` must be a multiple of 128.
        """
        if self.is_block:
            first, end = first // BLOCK_ELEMENTS, num_scale_blocks(end)
        return self._replace(b=self.b[:, :, first:end])

    def of_packed_rows(self, rows: torch.Tensor, own: torch.Tensor | None = None) -> OperandScales:
        """Return these scales with the scales of A read from packed ``rows``.

        ``own`` are this rank's packed rows, if they are in other memory.
        """
        width = self.a.shape[1]
        return self._replace(a=rows[:, :width], own=None if own is None else own[:, :width])

    def kernel_argument(self) -> GroupedScales:
        return GroupedScales(self.a, self.b, self.own, *self.a.stride(), *self.b.stride())


def packed_format(K: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return (width, dtype) of the packed rows that ranks send for rows [K] of A.

    A packed fp8 row has the row's scales, then its elements. Both begin at multiples of 16 bytes.
    A packed row has dtype fp32, which every collective supports. Other dtypes are not packed.
    """
    if dtype not in FP8:
        return K, dtype
    return (_scale_bytes(K) + -(-K // _ALIGNMENT) * _ALIGNMENT) // 4, torch.float32


def _scale_bytes(K: int) -> int:
    """Return the bytes of a packed row before its elements: the scales, padded."""
    return -(-4 * num_scale_blocks(K) // _ALIGNMENT) * _ALIGNMENT


def pack(A: torch.Tensor, scales: OperandScales, out: torch.Tensor) -> None:
    """Copy the rows of A and their scales to ``out``, whose shape is from ``packed_format``."""
    out[:, : scales.a.shape[1]].copy_(scales.a)
    unpacked(out, A.dtype, A.shape[1]).view(torch.uint8).copy_(A.view(torch.uint8))


def unpacked(rows: torch.Tensor, dtype: torch.dtype, K: int) -> torch.Tensor:
    """Return the elements of packed rows as a view [rows, K]."""
    first = _scale_bytes(K)
    return rows.view(torch.uint8)[:, first : first + K].view(dtype)
