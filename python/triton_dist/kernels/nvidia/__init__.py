"""Ops for NVIDIA GPUs; the same sources run interpreted on CPU ranks."""

from triton_dist.kernels.nvidia.allgather import AllGatherMethod
from triton_dist.kernels.nvidia.allgather_gemm import (
    AllGatherGEMMTensorParallelContext,
    ag_gemm,
    create_ag_gemm_context,
    gemm_non_persistent,
    gemm_persistent,
)
from triton_dist.kernels.nvidia.gemm import matmul

__all__ = [
    "AllGatherGEMMTensorParallelContext",
    "AllGatherMethod",
    "ag_gemm",
    "create_ag_gemm_context",
    "gemm_non_persistent",
    "gemm_persistent",
    "matmul",
]
