"""GEMM-ReduceScatter; ``op.py`` describes the op and its design."""

from triton_dist.kernels.nvidia.gemm_reduce_scatter.context import (
    GEMMReduceScatterTensorParallelContext,
    create_gemm_rs_context,
)
from triton_dist.kernels.nvidia.gemm_reduce_scatter.op import gemm_rs

__all__ = ["GEMMReduceScatterTensorParallelContext", "create_gemm_rs_context", "gemm_rs"]
