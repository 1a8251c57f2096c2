"""Last ops of an MoE layer; ``op.py`` describes them and their design."""

from triton_dist.kernels.nvidia.moe_reduce.context import (
    MoEReduceARContext,
    MoEReduceRSContext,
    create_moe_ar_context,
    create_moe_rs_context,
)
from triton_dist.kernels.nvidia.moe_reduce.op import (
    run_moe_reduce_ar,
    run_moe_reduce_ar_triton_non_overlap,
    run_moe_reduce_rs,
    run_moe_reduce_rs_triton_non_overlap,
)

__all__ = [
    "MoEReduceARContext",
    "MoEReduceRSContext",
    "create_moe_ar_context",
    "create_moe_rs_context",
    "run_moe_reduce_ar",
    "run_moe_reduce_ar_triton_non_overlap",
    "run_moe_reduce_rs",
    "run_moe_reduce_rs_triton_non_overlap",
]
