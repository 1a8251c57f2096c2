"""All-gather."""

from triton_dist.kernels.nvidia.allgather.op import (
    AllGatherContext,
    GatherMethod,
    all_gather,
    create_all_gather_ctx,
)

__all__ = [
    "AllGatherContext",
    "GatherMethod",
    "all_gather",
    "create_all_gather_ctx",
]
