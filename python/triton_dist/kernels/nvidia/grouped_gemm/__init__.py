"""Grouped GEMM: ``op.py`` says what it is and how it is built."""

from triton_dist.kernels.nvidia.grouped_gemm.op import grouped_gemm

__all__ = ["grouped_gemm"]
