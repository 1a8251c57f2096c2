"""Grouped GEMM, top-k sum and AllReduce: ``op.py`` says what it is and how it is built."""

from triton_dist.kernels.nvidia.moe_reduce_ar.context import (
    MoEReduceARContext,
    create_moe_ar_context,
)
from triton_dist.kernels.nvidia.moe_reduce_ar.op import (
    run_moe_reduce_ar,
    run_moe_reduce_ar_triton_non_overlap,
)

__all__ = [
    "MoEReduceARContext",
    "create_moe_ar_context",
    "run_moe_reduce_ar",
    "run_moe_reduce_ar_triton_non_overlap",
]
