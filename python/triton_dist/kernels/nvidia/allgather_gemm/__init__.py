"""AllGather-GEMM; ``op.py`` describes the op and its design."""

from triton_dist.kernels.common.gemm.sharded import (
    kernel_gemm_persistent as kernel_consumer_gemm_persistent,
)
from triton_dist.kernels.nvidia.allgather_gemm.context import (
    AllGatherGEMMTensorParallelContext,
    create_ag_gemm_context,
)
from triton_dist.kernels.nvidia.allgather_gemm.op import (
    ag_gemm,
    ag_gemm_persistent,
    local_copy_and_barrier_all,
)
from triton_dist.kernels.nvidia.gemm import gemm_non_persistent, gemm_persistent

__all__ = [
    "AllGatherGEMMTensorParallelContext",
    "ag_gemm",
    "ag_gemm_persistent",
    "create_ag_gemm_context",
    "gemm_non_persistent",
    "gemm_persistent",
    "kernel_consumer_gemm_persistent",
    "local_copy_and_barrier_all",
]
