"""Ops for NVIDIA GPUs; the same sources run interpreted on CPU ranks.

What every op across ranks promises, and asks for: all ranks call alike. Calls may follow one
another without synchronisation and be captured in a CUDA graph, which all ranks then replay equally
often. On the device, calls with one context follow one another, whatever streams they are made on.
Arguments are checked before anything is launched: ``InvalidArgument``, or ``ContextFinalized``.

Arguments that are the same for every GEMM across ranks:
    A, B: of the context's dtype; sizes up to the context's. TMA serves a contiguous A, and a B of
        unit stride in one dimension and multiples of 16 bytes in the other; pointers serve others.
    ctx: from the op's ``create_…_context``.
    way: the algorithm (tuned). Older keywords of an op are names of a way too; tuned with one of
        them, the tuning is of that way. Where nothing is tuned they go before ``algorithm``.
    gemm_config, persistent: tiles and kind of the GEMM kernel (tuned), where the GEMM is ours.
    straggler_option: (rank, cycles): that rank sleeps so long in the call, for tests.

``accepted_key`` of each op is for the tuner alone: the key of operands that were checked already.

Creating a context is collective over its group (default: the world, else this process):
    rank, and num_ranks or world_size: this rank in the group, and the group's size.
    num_local_ranks or local_world_size: ranks on one host; clamped to the group's size, which must
        lie on one host.
    InvalidArgument: on every rank, for a value that cannot work.
    RankDisagreement: ranks ask for different contexts.
    SymmetricMemoryFull: on every rank, if some rank has too little memory.
    DeviceUnavailable: CPU ranks whose kernels were not decorated for the interpreter.
"""

from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.kernels.common.slots.gathered import AllGatherMethod
from triton_dist.kernels.nvidia.allgather import (
    AllGatherContext,
    GatherMethod,
    all_gather,
    create_all_gather_ctx,
)
from triton_dist.kernels.nvidia.allgather_gemm import (
    AllGatherGEMMTensorParallelContext,
    ag_gemm,
    create_ag_gemm_context,
    gemm_non_persistent,
    gemm_persistent,
)
from triton_dist.kernels.nvidia.allgather_group_gemm import (
    MoEAllGatherGroupGEMMTensorParallelContext,
    ag_group_gemm,
    create_ag_group_gemm_context,
    run_moe_ag_triton_non_overlap,
)
from triton_dist.kernels.nvidia.allreduce import (
    AllReduceContext,
    AllReduceMethod,
    all_reduce,
    create_allreduce_ctx,
    get_allreduce_methods,
    to_allreduce_method,
)
from triton_dist.kernels.nvidia.gemm import matmul
from triton_dist.kernels.nvidia.gemm_allreduce import (
    GEMMAllReduceMethod,
    GEMMAllReduceTensorParallelContext,
    create_gemm_ar_context,
    gemm_ar,
)
from triton_dist.kernels.nvidia.gemm_reduce_scatter import (
    GEMMReduceScatterTensorParallelContext,
    create_gemm_rs_context,
    gemm_rs,
)
from triton_dist.kernels.nvidia.grouped_gemm import grouped_gemm
from triton_dist.kernels.nvidia.moe_reduce_ar import (
    MoEReduceARContext,
    create_moe_ar_context,
    run_moe_reduce_ar,
    run_moe_reduce_ar_triton_non_overlap,
)
from triton_dist.kernels.nvidia.moe_reduce_rs import (
    MoEReduceRSContext,
    create_moe_rs_context,
    run_moe_reduce_rs,
    run_moe_reduce_rs_triton_non_overlap,
)
from triton_dist.kernels.nvidia.reduce_scatter import (
    ReduceScatterContext,
    ReduceScatterMethod,
    create_reduce_scatter_ctx,
    reduce_scatter,
)

__all__ = [
    "AllGatherContext",
    "AllGatherGEMMTensorParallelContext",
    "AllGatherMethod",
    "AllReduceContext",
    "AllReduceMethod",
    "GEMMAllReduceMethod",
    "GEMMAllReduceTensorParallelContext",
    "GEMMReduceScatterTensorParallelContext",
    "GatherMethod",
    "MoEAllGatherGroupGEMMTensorParallelContext",
    "MoEReduceARContext",
    "MoEReduceRSContext",
    "ReduceScatterContext",
    "ReduceScatterMethod",
    "LibraryAlgorithm",
    "ag_gemm",
    "ag_group_gemm",
    "all_gather",
    "all_reduce",
    "create_ag_gemm_context",
    "create_ag_group_gemm_context",
    "create_all_gather_ctx",
    "create_allreduce_ctx",
    "create_gemm_ar_context",
    "create_gemm_rs_context",
    "create_moe_ar_context",
    "create_moe_rs_context",
    "create_reduce_scatter_ctx",
    "gemm_ar",
    "gemm_non_persistent",
    "gemm_persistent",
    "gemm_rs",
    "get_allreduce_methods",
    "grouped_gemm",
    "matmul",
    "reduce_scatter",
    "run_moe_ag_triton_non_overlap",
    "run_moe_reduce_ar",
    "run_moe_reduce_ar_triton_non_overlap",
    "run_moe_reduce_rs",
    "run_moe_reduce_rs_triton_non_overlap",
    "to_allreduce_method",
]
