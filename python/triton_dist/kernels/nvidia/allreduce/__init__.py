"""All-reduce; ``op.py`` describes the op and its design."""

from triton_dist.kernels.nvidia.allreduce.context import (
    AllReduceContext,
    AllReduceMethod,
    create_allreduce_ctx,
    get_allreduce_methods,
    to_allreduce_method,
)
from triton_dist.kernels.nvidia.allreduce.op import all_reduce

__all__ = [
    "AllReduceContext",
    "AllReduceMethod",
    "all_reduce",
    "create_allreduce_ctx",
    "get_allreduce_methods",
    "to_allreduce_method",
]
