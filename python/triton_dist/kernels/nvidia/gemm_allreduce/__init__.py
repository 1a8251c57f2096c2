"""GEMM-AllReduce; ``op.py`` describes the op and its design."""

from triton_dist.kernels.nvidia.gemm_allreduce.context import (
    GEMMAllReduceMethod,
    GEMMAllReduceTensorParallelContext,
    create_gemm_ar_context,
)
from triton_dist.kernels.nvidia.gemm_allreduce.op import gemm_ar

__all__ = [
    "GEMMAllReduceMethod",
    "GEMMAllReduceTensorParallelContext",
    "create_gemm_ar_context",
    "gemm_ar",
]
