"""Grouped GEMM, top-k sum, and ReduceScatter or AllReduce: the end of a tensor-parallel MoE layer.

A token goes to ``topk`` experts; each pair of token and expert is a *route*. Each route has a row
of x, sharded by columns, [M * topk, K / W] on each of W ranks. The weights are sharded by rows,
[E, K / W, N]. The result is the sum, over ranks and over a token's routes, of the route's weight
times its product. ``run_moe_reduce_rs`` returns M / W tokens on each rank; ``run_moe_reduce_ar``
returns all tokens on every rank, for any M.

Timeline of one call with 3 chunks of columns, on every rank at the same time:
    main stream   map │ GEMM 0 │ sum 0 │ GEMM 1 │ sum 1 │ GEMM 2 │ sum 2 │ add all chunks
    copy engines                       └ → owners       └ → owners       └ → owners

*map* sorts routes by expert, on the device. *sum* adds the routes of each token (its *choices*) in
fp32.

Algorithms:
    * ``"chunks"``: the timeline above. With one chunk, nothing overlaps, but copy engines, not SMs,
      send the sums. For an all-reduce, one more launch sends each rank's tokens to all ranks.
    * ``"serial"``: the whole GEMM and sum, then our reduce-scatter, our one-shot or two-shot
      all-reduce, or ``torch.distributed``. For few tokens, one launch can add the choices and
      exchange the sums (``common/moe/topk_sum.py``).
    * ``"library"``: like ``"serial"``, with torch's grouped GEMM. Tried for bf16 and fp8 on compute
      capability 9.0, where torch has a native kernel.

Numerics: docs/reference/run_moe_reduce_rs.md.

Design:
    * The columns are divided into chunks. Chunks of tokens would each read all weights again.
    * Choices are added before the transfer, so M rows are sent instead of M * topk.
    * Route weights are not applied in the GEMM's epilogue, because it rounds before the sum.
    * All chunks use one memory for their products, so the products of narrow chunks stay in the L2
      cache until the sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import raise_first_error
from triton_dist.kernels.common.moe.summing import id_variants, ids_digest_text, sum_routes
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.grouped_gemm import grouped_gemm
from triton_dist.kernels.nvidia.moe_reduce.algorithms import AllReduceCall, ReduceScatterCall
from triton_dist.kernels.nvidia.moe_reduce.context import MoEReduceARContext, MoEReduceRSContext


@op(
    algorithms=ReduceScatterCall.algorithms,
    call=ReduceScatterCall,
    sizes=ReduceScatterCall.sizes,
    key_fn=ReduceScatterCall.key_fn,
    key_sizes=("M",),
    agree_fn=ids_digest_text,
    input_variants_fn=id_variants,
    version="1",  # change when the shipped results (records/) must no longer be used
)
def run_moe_reduce_rs(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen_experts: torch.Tensor,
    expert_weight: torch.Tensor,
    ctx: MoEReduceRSContext,
    n_chunks: int | None = None,
    persistent: bool | None = None,
    config: triton.Config | None = None,
    gemm_config: triton.Config | None = None,
    num_chunks: int | None = None,
    reduction: str | None = None,
    algorithm: str | None = None,
    A_scale: torch.Tensor | None = None,
    B_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False,
    routing_skew: str | None = None,
    validated_key: Any = None,
) -> torch.Tensor:
    """Return this rank's tokens of the weighted sum over ranks and choices. Tuned over all ranks.

    Choices are the topk experts of a token. Each choice adds ``expert_weight * (x @
    weights[expert])``. Results are deterministic except with ``reduction="collective"``. Routing
    runs on the device, so a captured graph serves any ids. The rules for calls are in the docstring
    of ``triton_dist.kernels.nvidia``.

    Args:
        x: [M * topk, K_per_rank], dtype of the context or fp8, unit stride along K. Row
            ``t * topk + j`` is choice j of token t. M is a multiple of the number of ranks.
        weights: [E, K_per_rank, N], any strides. TMA requires unit stride along K or N, and other
            strides that are multiples of 16 bytes; otherwise the kernel reads through pointers. If
            x is fp8, weights are e4m3 with unit stride along K.
        chosen_experts: [M, topk], int32 or int64, contiguous, equal on all ranks (checked at the
            first call of a key). A choice with an id outside 0 to E - 1 adds nothing.
        expert_weight: [M, topk], fp16, bf16 or fp32, contiguous, equal on all ranks.
        ctx: context of ``create_moe_rs_context``.
        n_chunks: older name of ``num_chunks``. If passed, other arguments are tuned for this value.
        persistent: ignored; the grouped GEMM is always persistent.
        config: older name of ``gemm_config``: at least BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K.
        gemm_config: tile sizes of our grouped GEMM (tuned).
        num_chunks: maximum number of chunks of columns (tuned).
        reduction: reduce-scatter of ``"serial"`` and ``"library"``: ``"push"`` (for sums of up to
            64 MB), ``"topk_exchange"`` (up to 4 MB) or ``"collective"`` (tuned).
        algorithm: ``"chunks"``, ``"serial"`` or ``"library"`` (tuned; ``"chunks"`` if untuned).
        A_scale, B_scale, use_fast_accum: scales of fp8 operands x and weights, see
            ``grouped_gemm``. The result has the dtype of the context.
        routing_skew: see ``grouped_gemm``. Equal on all ranks.
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        [M / W, N], contiguous, dtype of the context, for W ranks.

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different ids; raised at the first call of a key, or at every
            call with ``TRITON_DIST_DEBUG=agree``.
    """
    return ReduceScatterCall(
        gemm_config, algorithm, A_scale, B_scale, use_fast_accum, validated_key, x, weights,
        chosen_experts, expert_weight, ctx, n_chunks, persistent, config, num_chunks, reduction,
        routing_skew,
    ).run()  # fmt: skip


def run_moe_reduce_rs_triton_non_overlap(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen_experts: torch.Tensor,
    expert_weight: torch.Tensor,
    n_chunks: int | None = None,
    persistent: bool | None = None,
    config: triton.Config | None = None,
) -> torch.Tensor:
    """Return the result of ``run_moe_reduce_rs`` without overlap or context, over the world.

    Calls ``grouped_gemm``, which each rank tunes alone, then the sum over choices, then the
    reduce-scatter of ``torch.distributed``.

    Args:
        x, weights, chosen_experts, expert_weight: see ``run_moe_reduce_rs``.
        n_chunks, persistent: ignored.
        config: tile sizes; ``None``: tuned.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match.
    """
    function, routing = "run_moe_reduce_rs_triton_non_overlap", (chosen_experts, expert_weight)
    M, num_ranks = len(chosen_experts), dist.get_world_size()
    raise_first_error(function, [MoEReduceRSContext.tokens_check("M", M, num_ranks)])
    total = sum_routes(function, grouped_gemm, x, weights, *routing, config)
    return libraries.reduce_scatter(total, None)


@op(
    algorithms=AllReduceCall.algorithms,
    call=AllReduceCall,
    sizes=AllReduceCall.sizes,
    key_fn=AllReduceCall.key_fn,
    key_sizes=("M",),
    agree_fn=ids_digest_text,
    input_variants_fn=id_variants,
    version="1",  # change when the shipped results (records/) must no longer be used
)
def run_moe_reduce_ar(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen_experts: torch.Tensor,
    expert_weight: torch.Tensor,
    ctx: MoEReduceARContext,
    n_chunks: int | None = None,
    persistent: bool | None = None,
    config: triton.Config | None = None,
    gemm_config: triton.Config | None = None,
    num_chunks: int | None = None,
    reduction: str | None = None,
    algorithm: str | None = None,
    A_scale: torch.Tensor | None = None,
    B_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False,
    routing_skew: str | None = None,
    validated_key: Any = None,
) -> torch.Tensor:
    """Return the weighted sum over ranks and choices on every rank. Tuned over all ranks.

    Choices are the topk experts of a token. Each choice adds ``expert_weight * (x @
    weights[expert])``. Except with ``reduction="collective"``, the result is bitwise equal on all
    ranks and in all calls. Routing runs on the device, so a captured graph serves any ids. The
    rules for calls are in the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        x: [M * topk, K_per_rank], dtype of the context or fp8, unit stride along K; any M >= 1.
        ctx: context of ``create_moe_ar_context``.
        reduction: all-reduce of ``"serial"`` and ``"library"``: ``"two_shot"``, ``"one_shot"`` or
            ``"topk_exchange"`` (for sums of up to 4 MB each), or ``"collective"`` (tuned).
        weights, chosen_experts, expert_weight, n_chunks, persistent: see ``run_moe_reduce_rs``.
        config, gemm_config, num_chunks, algorithm, validated_key: see ``run_moe_reduce_rs``.
        A_scale, B_scale, use_fast_accum, routing_skew: see ``run_moe_reduce_rs``.

    Returns:
        [M, N], contiguous, dtype of the context.

    Raises:
        InvalidArgument, ContextFinalized, RankDisagreement: see ``run_moe_reduce_rs``.
    """
    return AllReduceCall(
        gemm_config, algorithm, A_scale, B_scale, use_fast_accum, validated_key, x, weights,
        chosen_experts, expert_weight, ctx, n_chunks, persistent, config, num_chunks, reduction,
        routing_skew,
    ).run()  # fmt: skip


def run_moe_reduce_ar_triton_non_overlap(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen_experts: torch.Tensor,
    expert_weight: torch.Tensor,
    n_chunks: int | None = None,
    persistent: bool | None = None,
    config: triton.Config | None = None,
) -> torch.Tensor:
    """Return the result of ``run_moe_reduce_ar`` without overlap or context, over the world.

    Calls ``grouped_gemm``, which each rank tunes alone, then the sum over choices, then the
    all-reduce of ``torch.distributed``.

    Args:
        x, weights, chosen_experts, expert_weight: see ``run_moe_reduce_ar``.
        n_chunks, persistent: ignored.
        config: tile sizes; ``None``: tuned.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match.
    """
    total = sum_routes(
        "run_moe_reduce_ar_triton_non_overlap", grouped_gemm, x, weights, chosen_experts,
        expert_weight, config,
    )  # fmt: skip
    return libraries.all_reduce(total, None)
