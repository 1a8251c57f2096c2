"""Import path of reduce-scatter in scripts written for Triton-distributed."""

from triton_dist.kernels.nvidia.shard_collectives import (
    ReduceScatterContext,
    ReduceScatterMethod,
    create_reduce_scatter_ctx,
    reduce_scatter,
)

__all__ = [
    "ReduceScatterContext",
    "ReduceScatterMethod",
    "create_reduce_scatter_ctx",
    "reduce_scatter",
]
