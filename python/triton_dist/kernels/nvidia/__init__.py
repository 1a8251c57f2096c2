"""Ops for NVIDIA GPUs. The sources also run in Triton's interpreter on CPU ranks.

Rules for every op that runs across ranks:

* All ranks call the op in the same order with matching arguments.
* Consecutive calls need no synchronisation. Calls can be captured in a CUDA graph; all ranks must
  then replay the graph equally often.
* Calls with one context must execute in order on the device, even if they use several streams.
* Arguments are checked before any launch.
* The first call of a key tunes the op over all ranks. An argument marked "(tuned)" is chosen by the
  tuner unless the caller passes it. docs/reference/autotune.md lists the tuner's errors.

TMA requires a contiguous A, and a B with unit stride in one dimension and a multiple of 16 bytes in
the other. Other operands are read through pointers. The argument ``validated_key`` of an op is
reserved for the tuner, which passes the key of operands that it has already checked.

Creating a context is collective over its group, and the group must lie on one host. The default
group is the world if torch.distributed is initialised, else this process alone.
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
from triton_dist.kernels.nvidia.decode_attention import (
    SpDecodeContext,
    create_sp_decode_context,
    sp_decode_attn,
)
from triton_dist.kernels.nvidia.ep_group_gemm import ep_dispatch_group_gemm
from triton_dist.kernels.nvidia.expert_parallel import (
    EPContext,
    create_ep_context,
    ep_combine,
    ep_dispatch,
    ep_send,
)
from triton_dist.kernels.nvidia.flash_decode import (
    gqa_fwd_batch_decode,
    gqa_fwd_batch_decode_aot,
    gqa_fwd_batch_decode_persistent,
    gqa_fwd_batch_decode_persistent_aot,
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
from triton_dist.kernels.nvidia.low_latency_all_to_all import (
    all_to_all_post_process,
    create_all_to_all_context,
    fast_all_to_all,
)
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
from triton_dist.kernels.nvidia.sp_ag_attention import (
    SPAttentionContext,
    create_sp_ag_attention_context,
    sp_ag_attention,
)
from triton_dist.kernels.nvidia.sp_ag_attention_intra_node import (
    create_sp_ag_attention_context_intra_node,
    fused_sp_ag_attn_intra_node,
)
from triton_dist.kernels.nvidia.ulysses import (
    UlyssesContext,
    create_ulysses_context,
    ulysses_post_attn,
    ulysses_pre_attn,
)
from triton_dist.kernels.nvidia.ulysses_gemm import (
    ulysses_gemm_pre_attn,
    ulysses_post_attn_gemm,
)

__all__ = [
    "AllGatherContext",
    "AllGatherGEMMTensorParallelContext",
    "AllGatherMethod",
    "AllReduceContext",
    "AllReduceMethod",
    "EPContext",
    "GEMMAllReduceMethod",
    "GEMMAllReduceTensorParallelContext",
    "GEMMReduceScatterTensorParallelContext",
    "GatherMethod",
    "LibraryAlgorithm",
    "MoEAllGatherGroupGEMMTensorParallelContext",
    "MoEReduceARContext",
    "MoEReduceRSContext",
    "ReduceScatterContext",
    "ReduceScatterMethod",
    "SPAttentionContext",
    "SpDecodeContext",
    "UlyssesContext",
    "ag_gemm",
    "ag_group_gemm",
    "all_gather",
    "all_reduce",
    "all_to_all_post_process",
    "create_ag_gemm_context",
    "create_ag_group_gemm_context",
    "create_all_gather_ctx",
    "create_all_to_all_context",
    "create_allreduce_ctx",
    "create_ep_context",
    "create_gemm_ar_context",
    "create_gemm_rs_context",
    "create_moe_ar_context",
    "create_moe_rs_context",
    "create_reduce_scatter_ctx",
    "create_sp_ag_attention_context",
    "create_sp_ag_attention_context_intra_node",
    "create_sp_decode_context",
    "create_ulysses_context",
    "ep_combine",
    "ep_dispatch",
    "ep_dispatch_group_gemm",
    "ep_send",
    "fast_all_to_all",
    "fused_sp_ag_attn_intra_node",
    "gemm_ar",
    "gemm_non_persistent",
    "gemm_persistent",
    "gemm_rs",
    "get_allreduce_methods",
    "gqa_fwd_batch_decode",
    "gqa_fwd_batch_decode_aot",
    "gqa_fwd_batch_decode_persistent",
    "gqa_fwd_batch_decode_persistent_aot",
    "grouped_gemm",
    "matmul",
    "reduce_scatter",
    "run_moe_ag_triton_non_overlap",
    "run_moe_reduce_ar",
    "run_moe_reduce_ar_triton_non_overlap",
    "run_moe_reduce_rs",
    "run_moe_reduce_rs_triton_non_overlap",
    "sp_ag_attention",
    "sp_decode_attn",
    "to_allreduce_method",
    "ulysses_gemm_pre_attn",
    "ulysses_post_attn",
    "ulysses_post_attn_gemm",
    "ulysses_pre_attn",
]
