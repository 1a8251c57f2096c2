"""All-gather and reduce-scatter; ``op.py`` describes the ops and their design."""

from triton_dist.kernels.nvidia.shard_collectives.algorithms import (
    GatherMethod,
    ReduceScatterMethod,
)
from triton_dist.kernels.nvidia.shard_collectives.context import (
    AllGatherContext,
    ReduceScatterContext,
    create_all_gather_ctx,
    create_reduce_scatter_ctx,
)
from triton_dist.kernels.nvidia.shard_collectives.op import all_gather, reduce_scatter

__all__ = [
    "AllGatherContext",
    "GatherMethod",
    "ReduceScatterContext",
    "ReduceScatterMethod",
    "all_gather",
    "create_all_gather_ctx",
    "create_reduce_scatter_ctx",
    "reduce_scatter",
]
