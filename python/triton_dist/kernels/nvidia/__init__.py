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
from triton_dist.kernels.nvidia.gemm_reduce_scatter import (
    GEMMReduceScatterTensorParallelContext,
    create_gemm_rs_context,
    gemm_rs,
)
from triton_dist.kernels.nvidia.vendor import VendorMethod

__all__ = [
    "AllGatherGEMMTensorParallelContext",
    "AllGatherMethod",
    "GEMMReduceScatterTensorParallelContext",
    "VendorMethod",
    "ag_gemm",
    "create_ag_gemm_context",
    "create_gemm_rs_context",
    "gemm_non_persistent",
    "gemm_persistent",
    "gemm_rs",
    "matmul",
]
