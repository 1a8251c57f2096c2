"""Import path of grouped GEMM + top-k sum + AllReduce in Triton-distributed's scripts."""

from triton_dist.kernels.nvidia.moe_reduce import (
    MoEReduceARContext,
    create_moe_ar_context,
    run_moe_reduce_ar,
    run_moe_reduce_ar_triton_non_overlap,
)

__all__ = [
    "MoEReduceARContext",
    "create_moe_ar_context",
    "run_moe_reduce_ar",
    "run_moe_reduce_ar_triton_non_overlap",
]
