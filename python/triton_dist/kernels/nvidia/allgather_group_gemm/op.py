"""AllGather + grouped GEMM: the first GEMM of an MoE layer, overlapped with the all-gather.

Each of W ranks has M / W tokens, [M / W, K], and a shard of the columns of every expert's weights,
[E, K, N / W]. A token goes to ``topk`` experts; each pair of token and expert is a *route* and one
row of the output. Every rank needs all tokens.

Algorithms:
    * ``"arrivals"``: copy engines send shards while routes are sorted (``common/moe/routing.py``)
      and multiplied (``common/moe/product.py``). A tile waits for all shards that have its rows.
    * ``"serial"``: gather all shards, then run the kernel of ``"arrivals"``.
    * ``"library"``: gather all shards, sort the rows, run torch's grouped GEMM, and restore the
      order of the rows. Tried if torch has a native kernel.

The last two gather with ``"exchange"`` (our kernel) or ``"collective"`` (NCCL).

Timeline of one call (W = 4, push, 2 groups):
    main stream   ─┬─ sort ─ GEMM: group {own, rank+1}, expert by expert │ {rank+2, rank+3} ─┬─ end
    copy stream    └─ shard → rank-1, flag │ → rank-2, flag │ → rank-3, flag ────────────────┘

Tile order: the time to read the weights limits the kernel. If tiles were sorted by expert, the
weights would be read once, but every tile would wait for the last shard. If tiles were sorted by
shard, the weights would be read W times. Therefore shards are divided into *groups* in the
order of arrival, and tiles are sorted by expert within each group. The number of groups is tuned.
Within a group, the rows of an expert are packed without gaps in the order of arrival, so only the
expert's last tile is partial.

Routing runs on the device, so a captured graph serves any expert ids. All ranks must pass equal
ids. Ranks compare them at the first call of a key, or with ``TRITON_DIST_DEBUG=agree`` at every
call. Dropped choices (ids outside 0 to E - 1) give rows of zeros.

Design:
    * Waiting programs may occupy all SMs, so copy engines, which need no SM, write rows and flags.
    * A program waits once per shard, not once per tile, because an acquire takes about 1 us.
    * Every shard has at least one route, and tiles of dropped choices also wait. When the GEMM
      ends, all shards have therefore arrived, and the next call need not wait for the peers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.agreement import digest_text
from triton_dist.kernels.common.gemm.scales import scaling_of
from triton_dist.kernels.common.moe.skew import SkewedKey
from triton_dist.kernels.common.moe.spaces import other_batches
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.allgather_group_gemm.algorithms import ALGORITHMS, Call
from triton_dist.kernels.nvidia.allgather_group_gemm.context import (
    MoEAllGatherGroupGEMMTensorParallelContext,
    check_operands,
)
from triton_dist.kernels.nvidia.grouped_gemm import grouped_gemm


def key_fn(
    a: torch.Tensor,
    b: torch.Tensor,
    ctx: MoEAllGatherGroupGEMMTensorParallelContext,
    full_topk_ids: torch.Tensor,
    *,
    routing_skew: str | None = None,
    **options: Any,
) -> Any:
    key = check_operands(a, b, ctx, full_topk_ids, scaling_of(**options))
    return SkewedKey.of("ag_group_gemm", key, routing_skew)


@op(
    algorithms=ALGORITHMS,
    call=Call,
    key_fn=key_fn,
    key_sizes=("M",),
    agree_fn=lambda a, b, ctx, full_topk_ids, **_: digest_text("ids", full_topk_ids),
    input_variants_fn=lambda a, b, ctx, full_topk_ids, *, routing_skew=None, **_: [
        {"full_topk_ids": ids} for ids in other_batches(full_topk_ids, len(b), routing_skew)
    ],
    version="1",  # change when the shipped results (records/) must no longer be used
)
def ag_group_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    ctx: MoEAllGatherGroupGEMMTensorParallelContext,
    full_topk_ids: torch.Tensor,
    *,
    gemm_config: triton.Config | None = None,
    num_groups: int = 1,
    gather: str | None = None,
    straggler_option: tuple[int, int] | None = None,
    algorithm: str | None = None,
    A_scale: torch.Tensor | None = None,
    B_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    routing_skew: str | None = None,
    validated_key: Any = None,
) -> torch.Tensor:
    """Return the products of the tokens of all ranks with the weights of their experts.

    Tuned over all ranks. The rules for calls are in the docstring of
    ``triton_dist.kernels.nvidia``. Products are accumulated in fp32.
    ``torch.backends.cuda.matmul.allow_tf32`` applies to fp32 operands.

    Args:
        a: [M / W, K], tokens of this rank, contiguous. Do not overwrite it on another stream before
            the call has finished.
        b: [E, K, N_per_rank], any strides. TMA requires unit stride along K or N, and other
            strides that are multiples of 16 bytes; otherwise the kernel reads through pointers.
        ctx: context of ``create_ag_group_gemm_context``; M <= ``ctx.max_ntokens``.
        full_topk_ids: [M, topk], int32 or int64, contiguous: experts of all ranks' tokens, equal on
            every rank. A choice with an id outside 0 to E - 1 is dropped: its row is zero.
        gemm_config: tile sizes of ``"arrivals"`` and ``"serial"`` (tuned); default:
            ``ctx.gemm_config``.
        num_groups: number of groups of shards for ``"arrivals"``, 1 to 4 (tuned).
        gather: all-gather (tuned): ``"full_mesh_push"`` (default) or ``"ring_push_1d"`` for
            ``"arrivals"``; ``"exchange"`` (default; M <= ``ctx.max_exchange_M``) or
            ``"collective"`` for the other algorithms.
        straggler_option: ``(rank, cycles)``: delay ``rank`` by ``cycles`` clock cycles, for tests.
        algorithm: ``"arrivals"``, ``"serial"`` or ``"library"`` (tuned; ``"arrivals"`` if untuned).
        A_scale, B_scale, out_dtype, use_fast_accum: see ``grouped_gemm``; fp8 operands require a
            context of ``torch.float8_e4m3fn``. ``A_scale`` has the scales of this rank's tokens,
            which are sent with the tokens.
        routing_skew: see ``grouped_gemm``. Equal on all ranks.
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        [M * topk, N_per_rank]; row ``t * topk + j`` is choice j of token t.

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different ids; raised on every rank at the first call of a key,
            or at every call with ``TRITON_DIST_DEBUG=agree``.
    """
    return Call(
        gemm_config, algorithm, A_scale, B_scale, use_fast_accum, validated_key, a, b, ctx,
        full_topk_ids, num_groups, gather, straggler_option, out_dtype, routing_skew,
    ).run()  # fmt: skip


def run_moe_ag_triton_non_overlap(
    x_shard: torch.Tensor,
    weights: torch.Tensor,
    chosen_experts: torch.Tensor,
    persistent: bool = False,
) -> torch.Tensor:
    """Return the result of ``ag_group_gemm`` without overlap or context. Collective over the world.

    Gathers the tokens with ``torch.distributed``, then calls ``grouped_gemm``.

    Args:
        x_shard: [M / W, K], contiguous.
        weights: [E, K, N_per_rank].
        chosen_experts: [M, topk], experts of all ranks' tokens.
        persistent: ignored; our kernel is always persistent.

    Returns:
        [M * topk, N_per_rank].

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if x_shard.ndim != 2 or len(x_shard) * num_ranks != len(chosen_experts):
        expected = f"[{len(chosen_experts)} tokens over {num_ranks} ranks, K]"
        function = "run_moe_ag_triton_non_overlap"
        raise InvalidArgument(function, "x_shard.shape", tuple(x_shard.shape), expected)
    rows = x_shard.new_empty(len(chosen_experts), x_shard.shape[1])
    grouped_gemm.key_fn(rows, weights, chosen_experts)  # check before the collective
    if num_ranks > 1:
        libraries.all_gather_into(rows, x_shard.detach().contiguous(), None)
    product: torch.Tensor = grouped_gemm(
        rows if num_ranks > 1 else x_shard, weights, chosen_experts
    )
    return product
