"""Names that scripts import from ``triton_dist.kernels.allreduce``."""

from triton_dist.kernels.nvidia.allreduce.context import (
    AllReduceMethod,
    get_allreduce_methods,
    to_allreduce_method,
)

__all__ = ["AllReduceMethod", "get_allreduce_methods", "to_allreduce_method"]
