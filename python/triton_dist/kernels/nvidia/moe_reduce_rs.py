"""Import path of grouped GEMM + top-k sum + ReduceScatter in Triton-distributed's scripts."""

from triton_dist.kernels.nvidia.moe_reduce import (
    MoEReduceRSContext,
    create_moe_rs_context,
    run_moe_reduce_rs,
    run_moe_reduce_rs_triton_non_overlap,
)

__all__ = [
    "MoEReduceRSContext",
    "create_moe_rs_context",
    "run_moe_reduce_rs",
    "run_moe_reduce_rs_triton_non_overlap",
]
