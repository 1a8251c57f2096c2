"""Grouped GEMM, top-k sum and AllReduce: the end of a tensor-parallel mixture-of-experts layer,
with the result on every rank, for any number of tokens.

It is grouped GEMM, top-k sum and ReduceScatter (``moe_reduce_rs/op.py``), but for who gets what:

Ways
    ``"chunks"``: each rank adds its share of the tokens as there, and sends it to all in one more
    launch. ``"serial"``: our all-reduce of the sums over choices, in one shot, which is for few
    tokens, or in two; one shot whose load adds the choices; or the group's.
    ``"library"``: the serial way with torch's grouped product.

Numerics
    As there; so every rank has the same bits, at every call, and in each of our own reductions.
"""

from __future__ import annotations

import torch
import triton

from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.moe.summing import agreed, summed_routes, varied
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.grouped_gemm import grouped_gemm
from triton_dist.kernels.nvidia.moe_reduce_ar.context import MoEReduceARContext
from triton_dist.kernels.nvidia.moe_reduce_ar.ways import WAYS, Call


@op(
    ways=WAYS,
    call=Call,
    sizes=Call.sizes,
    key_fn=Call.key_fn,
    key_sizes=("M",),
    agree_fn=agreed,
    vary_fn=varied,
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
    way: str | None = None,
) -> torch.Tensor:
    """The sum, over ranks and choices, of ``expert_weight * (x @ weights of the expert)``, on every
    rank; tuned over all ranks. Returns [M, N], contiguous.

    The same bits on every rank and at every call, but for ``reduction="collective"`` (see the
    module). Nothing of the routing goes by the host: a captured graph serves any ids.

    All ranks call alike; more about calls: the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        x: [M * topk, K_per_rank], a row for each route, route ``t * topk + j`` being choice j of
            token t; unit stride along K; of the context's dtype. Any M from 1 on.
        weights: [E, K_per_rank, N], any strides; TMA serves unit stride along K or N and multiples
            of 16 bytes elsewhere, pointers the rest.
        chosen_experts: [M, topk], int32 or int64, contiguous, the same on all ranks, which is
            checked at the first call of a key. An id that is not one of 0 to E - 1 adds nothing.
        expert_weight: [M, topk], fp16, bf16 or fp32, contiguous, the same on all ranks.
        ctx: from ``create_moe_ar_context``.
        n_chunks: of columns: fixes ``num_chunks``; the rest is tuned for it.
        persistent: accepted for scripts; the grouped product always is.
        config: fixes ``gemm_config``: BLOCK_SIZE_M, _N and _K at least.
        way: the algorithm: ``"chunks"``, ``"serial"`` or ``"library"``, see the module
            (tuned); default: ``"chunks"``.
        gemm_config: tiles of our grouped product (tuned).
        num_chunks: of columns, at most (tuned).
        reduction: of the serial ways: ``"two_shot"``, ``"one_shot"`` and ``"topk_exchange"``, for
            sums of up to 4 MB, or ``"collective"`` (tuned).

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
        RankDisagreement: at the first call of a key, if ranks have other ids; at every call with
            ``TRITON_DIST_DEBUG=agree``.
    """
    return Call(
        x, weights, chosen_experts, expert_weight, ctx, n_chunks, persistent, config, gemm_config,
        num_chunks, reduction, way,
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
    return vendor.all_reduce(total, None)
