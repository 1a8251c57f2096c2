"""Grouped GEMM; ``op.py`` describes the op and its design."""

from triton_dist.kernels.nvidia.grouped_gemm.algorithms import SILU_MUL as SILU_MUL
from triton_dist.kernels.nvidia.grouped_gemm.algorithms import Call as Call
from triton_dist.kernels.nvidia.grouped_gemm.op import grouped_gemm

__all__ = ["grouped_gemm"]
