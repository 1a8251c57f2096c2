"""Grouped GEMM, top-k sum and ReduceScatter: ``op.py`` says what it is and how it is built."""

from triton_dist.kernels.nvidia.moe_reduce_rs.context import (
    MoEReduceRSContext,
    create_moe_rs_context,
)
from triton_dist.kernels.nvidia.moe_reduce_rs.op import (
    run_moe_reduce_rs,
    run_moe_reduce_rs_triton_non_overlap,
)

__all__ = [
    "MoEReduceRSContext",
    "create_moe_rs_context",
    "run_moe_reduce_rs",
    "run_moe_reduce_rs_triton_non_overlap",
]
