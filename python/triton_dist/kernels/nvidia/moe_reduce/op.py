"""Grouped GEMM, top-k sum, and ReduceScatter or AllReduce: the end of a tensor-parallel
mixture-of-experts layer.

Abstraction
    A token went to ``topk`` experts; each of those *routes* has a row of x, sharded by columns,
    [M * topk, K / W] on each of W ranks, and the experts' weights are sharded by rows, [E, K / W,
    N]. The result is the sum, over ranks and over a token's routes, of the route's weight times its
    product. ``run_moe_reduce_rs`` gives each rank its M / W tokens, ``run_moe_reduce_ar`` gives all
    ranks all tokens, for any M. Serial code multiplies expert by expert, weighs, adds, then
    reduces.

Timeline of one call in 3 chunks of columns, on every rank at once
    main stream   map │ GEMM 0 │ sum 0 │ GEMM 1 │ sum 1 │ GEMM 2 │ sum 2 │ add all chunks
    copy engines                       └ → owners       └ → owners       └ → owners
    *map*: routes sorted by expert, on the device. *sum*: over choices, in fp32, to one row a token.

Ways
    ``"chunks"``: the above; with one chunk, nothing is hidden, but no multiprocessor sends. For an
    all-reduce each rank then sends its tokens to all in one more launch.
    ``"serial"``: the whole product and sum, then our reduce-scatter in one launch, our all-reduce
    in one shot, which is for few tokens, or in two, or the group's collective; for few tokens also
    one launch whose load adds the choices (``common/moe/topk_exchange.py``).
    ``"library"``: the serial way with torch's grouped product in place of ours.
    Tried for bf16 on compute capability 9.0, where it has a kernel.

Numerics
    A product is accumulated in fp32 and rounded to the dtype; the weight is multiplied in fp32 and
    choices are added in their order; the sum is rounded once and travels; ranks are added in fp32
    in their order, and rounded once. Same operands and config: same bits, whichever rank is late;
    an all-reduce has the same bits on every rank. Not with ``reduction="collective"``, which adds
    as its library does.

Built this way because
    * columns, not tokens, are cut: the weights of an expert are read once. Cut by tokens, each
      piece would read all of them again;
    * choices are added before the wire: M rows cross it, not M * topk;
    * weights of routes are no part of the product's epilogue: it would round before the sum;
    * one chunk's products are all that is kept, so that narrow chunks stay in the L2 cache on their
      way to the sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import refuse
from triton_dist.kernels.common.moe.summing import agreed, summed_routes, varied
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
    agree_fn=agreed,
    input_variants_fn=varied,
    version="1",  # another one when results that are shipped (records/) should not be used any more
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
    accepted_key: Any = None,
) -> torch.Tensor:
    """This rank's tokens of the sum, over ranks and choices, of ``expert_weight * (x @ weights of
    the expert)``; tuned over all ranks. Returns [M / world size, N], contiguous.

    The same bits at every call, but for ``reduction="collective"`` (see the module). Nothing of the
    routing goes by the host: a captured graph serves any ids.

    All ranks call alike; more about calls: the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        x: [M * topk, K_per_rank], a row for each route, route ``t * topk + j`` being choice j of
            token t; unit stride along K; of the context's dtype. M is a multiple of the ranks.
        weights: [E, K_per_rank, N], any strides; TMA serves unit stride along K or N and multiples
            of 16 bytes elsewhere, pointers the rest.
        chosen_experts: [M, topk], int32 or int64, contiguous, the same on all ranks, which is
            checked at the first call of a key. An id that is not one of 0 to E - 1 adds nothing.
        expert_weight: [M, topk], fp16, bf16 or fp32, contiguous, the same on all ranks.
        ctx: from ``create_moe_rs_context``.
        n_chunks: of columns: fixes ``num_chunks``; the rest is tuned for it.
        persistent: accepted for scripts; the grouped product always is.
        config: fixes ``gemm_config``: BLOCK_SIZE_M, _N and _K at least.
        way: the algorithm: ``"chunks"``, ``"serial"`` or ``"library"``, see the module
            (tuned); default: ``"chunks"``.
        gemm_config: tiles of our grouped product (tuned).
        num_chunks: of columns, at most (tuned).
        reduction: of the serial ways: ``"push"``, for sums of up to 64 MB, ``"topk_exchange"``, for
            up to 4 MB, or ``"collective"`` (tuned).

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
        RankDisagreement: at the first call of a key, if ranks have other ids; at every call with
            ``TRITON_DIST_DEBUG=agree``.
    """
    return ReduceScatterCall(
        x, weights, chosen_experts, expert_weight, ctx, n_chunks, persistent, config, gemm_config,
        num_chunks, reduction, algorithm, accepted_key,
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
    """The same one part after the other, over the world, with no context: ``grouped_gemm``, tuned
    by each rank alone, the sum over choices, and the group's reduce-scatter.

    n_chunks, persistent: accepted for scripts. config: tiles, in place of tuned ones.

    Raises:
        InvalidArgument: before anything is launched.
    """
    function, routing = "run_moe_reduce_rs_triton_non_overlap", (chosen_experts, expert_weight)
    M, size = len(chosen_experts), dist.get_world_size()
    refuse(function, [MoEReduceRSContext.tokens_check("M", M, size)])
    total = summed_routes(function, grouped_gemm, x, weights, *routing, config)
    return libraries.reduce_scatter(total, None)


@op(
    algorithms=AllReduceCall.algorithms,
    call=AllReduceCall,
    sizes=AllReduceCall.sizes,
    key_fn=AllReduceCall.key_fn,
    key_sizes=("M",),
    agree_fn=agreed,
    input_variants_fn=varied,
    version="1",  # another one when results that are shipped (records/) should not be used any more
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
    accepted_key: Any = None,
) -> torch.Tensor:
    """The sum, over ranks and choices, of ``expert_weight * (x @ weights of the expert)``, on every
    rank; tuned over all ranks. Returns [M, N], contiguous.

    The same bits on every rank and at every call, but for ``reduction="collective"`` (see the
    module). Nothing of the routing goes by the host: a captured graph serves any ids.

    All ranks call alike; more about calls: the docstring of ``triton_dist.kernels.nvidia``. Errors,
    and arguments that are not here: those of ``run_moe_reduce_rs``.

    Args:
        x: for any M from 1 on.
        ctx: from ``create_moe_ar_context``.
        reduction: of the serial ways: ``"two_shot"``, ``"one_shot"`` and ``"topk_exchange"``, for
            sums of up to 4 MB, or ``"collective"`` (tuned).
    """
    return AllReduceCall(
        x, weights, chosen_experts, expert_weight, ctx, n_chunks, persistent, config, gemm_config,
        num_chunks, reduction, algorithm, accepted_key,
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
    """The same one part after the other, over the world, with no context: ``grouped_gemm``, tuned
    by each rank alone, the sum over choices, and the group's all-reduce.

    n_chunks, persistent: accepted for scripts. config: tiles, in place of tuned ones.

    Raises:
        InvalidArgument: before anything is launched.
    """
    total = summed_routes(
        "run_moe_reduce_ar_triton_non_overlap", grouped_gemm, x, weights, chosen_experts,
        expert_weight, config,
    )  # fmt: skip
    return libraries.all_reduce(total, None)
