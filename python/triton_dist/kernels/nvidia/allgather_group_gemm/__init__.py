"""AllGather + grouped GEMM; ``op.py`` describes the op and its design."""

from triton_dist.kernels.common.moe.product import (
    kernel_grouped_gemm as kernel_consumer_m_parallel_scatter_group_gemm,
)
from triton_dist.kernels.nvidia.allgather_group_gemm.context import (
    MoEAllGatherGroupGEMMTensorParallelContext,
    create_ag_group_gemm_context,
)
from triton_dist.kernels.nvidia.allgather_group_gemm.op import (
    ag_group_gemm,
    run_moe_ag_triton_non_overlap,
)
from triton_dist.kernels.nvidia.moe_utils import sort_topk_ids_align_block_size

__all__ = [
    "MoEAllGatherGroupGEMMTensorParallelContext",
    "ag_group_gemm",
    "create_ag_group_gemm_context",
    "kernel_consumer_m_parallel_scatter_group_gemm",
    "run_moe_ag_triton_non_overlap",
    "sort_topk_ids_align_block_size",
]
