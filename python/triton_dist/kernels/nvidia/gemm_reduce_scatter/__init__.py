"""GEMM-ReduceScatter: ``op.py`` says what it is and how it is built."""

from triton_dist.kernels.nvidia.gemm_reduce_scatter.context import (
    GEMMReduceScatterTensorParallelContext,
    create_gemm_rs_context,
)
from triton_dist.kernels.nvidia.gemm_reduce_scatter.op import gemm_rs

__all__ = [
    "GEMMReduceScatterTensorParallelContext",
    "create_gemm_rs_context",
    "gemm_rs",
]
