"""All-reduce: ``op.py`` says what it is and how it is built.

Beside the names in ``__all__``, which are for users, GEMM-AllReduce takes its limits and its way to
compile ahead from here.
"""

from triton_dist.kernels.nvidia.allreduce.context import (
    ONE_SHOT_BYTES as ONE_SHOT_BYTES,
)
from triton_dist.kernels.nvidia.allreduce.context import (
    PACKET_BYTES as PACKET_BYTES,
)
from triton_dist.kernels.nvidia.allreduce.context import (
    AllReduceContext,
    AllReduceMethod,
    create_allreduce_ctx,
    get_allreduce_methods,
    to_allreduce_method,
)
from triton_dist.kernels.nvidia.allreduce.op import all_reduce
from triton_dist.kernels.nvidia.allreduce.op import prepare as prepare

__all__ = [
    "AllReduceContext",
    "AllReduceMethod",
    "all_reduce",
    "create_allreduce_ctx",
    "get_allreduce_methods",
    "to_allreduce_method",
]
