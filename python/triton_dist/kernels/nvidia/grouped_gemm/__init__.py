"""Grouped GEMM; ``op.py`` describes the op and its design."""

from triton_dist.kernels.nvidia.grouped_gemm.op import grouped_gemm

__all__ = ["grouped_gemm"]
