"""GEMM on one GPU, its config space and its pruning functions."""

from triton_dist.kernels.common.gemm.spaces import (
    get_config_space,
    prune_fn_by_group_size_m,
    prune_fn_by_shared_memory,
)
from triton_dist.kernels.nvidia.gemm.op import gemm_non_persistent, gemm_persistent, matmul

__all__ = [
    "gemm_non_persistent",
    "gemm_persistent",
    "get_config_space",
    "matmul",
    "prune_fn_by_group_size_m",
    "prune_fn_by_shared_memory",
]
