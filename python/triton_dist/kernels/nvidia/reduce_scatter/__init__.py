"""Reduce-scatter."""

from triton_dist.kernels.nvidia.reduce_scatter.op import (
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
