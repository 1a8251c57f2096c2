"""Import path of all-gather in scripts written for Triton-distributed."""

from triton_dist.kernels.nvidia.shard_collectives import (
    AllGatherContext,
    GatherMethod,
    all_gather,
    create_all_gather_ctx,
)

__all__ = ["AllGatherContext", "GatherMethod", "all_gather", "create_all_gather_ctx"]
