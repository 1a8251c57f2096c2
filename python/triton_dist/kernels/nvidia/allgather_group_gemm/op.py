"""AllGather + grouped GEMM: the first product of a mixture-of-experts layer whose tokens are spread
over ranks, with the transfer hidden behind the product.

Abstraction
    Each of W ranks has M / W tokens, [M / W, K], and a share of the columns of every expert's
    weights, [E, K, N / W]. A token goes to ``topk`` experts, and each such *route* is a row of the
    product. Every rank needs all tokens. Serial code gathers, sorts routes, multiplies.

Ways
    ``"arrivals"``: copy engines bring shards, as ``AllGatherMethod`` says, while routes are sorted
    (``common/moe/routing.py``) and multiplied (``common/moe/product.py``); a tile waits for the
    last shard that it has rows of. ``"serial"``: all shards, then the same product.
    ``"library"``: all shards, then torch's grouped product between two copies of rows, where it has
    a kernel of its own. The last two gather in one launch of ours, ``"exchange"``, or by NCCL,
    ``"collective"``.

Stream timeline of one call (W = 4, push, 2 groups)
    main stream   ─┬─ map ─ GEMM: groups {own, rank+1}, expert by expert │ {rank+2, rank+3} ─┬─ end
    copy stream    └─ shard → rank-1, flag │ → rank-2, flag │ → rank-3, flag ────────────────┘
    As in ``ag_gemm``: no barrier, no flag that is set back, no copy of the own shard in a push.

Which tile when
    Weights are what is read: a tile reads those of its expert for its rows. Ordered by expert, all
    tiles of one run together and its weights are read once; but they wait for the last shard.
    Ordered by shard, none waits, and weights are read W times. So shards are taken in *groups* of
    arrivals, within a group by expert; the number of groups is tuned. Inside an expert rows stand
    in order of arrival, so all its tiles but the last are full, however many groups there are.

Routing
    All of it is on the device: a captured graph serves any ids. All ranks must have the same; they
    are compared at the first call of a key, or at every call (``common/moe/routing.py``). Routes
    of nobody give rows of zeros.

Built this way because
    * whatever a waiting grid depends on must need no SM: rows and flags come by copy engine;
    * a program waits once for each shard, not once for each tile: an acquire takes about a us;
    * every source has a route, and tiles of nobody wait too. So a product that is done has seen
      every peer's shard, and the next call needs no look at the peers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.moe.routing import ids_as_text
from triton_dist.kernels.common.moe.spaces import other_batches
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.allgather_group_gemm.algorithms import ALGORITHMS, Call
from triton_dist.kernels.nvidia.allgather_group_gemm.context import (
    MoEAllGatherGroupGEMMTensorParallelContext,
    RoutedKey,
    check_operands,
)
from triton_dist.kernels.nvidia.grouped_gemm import grouped_gemm


def key_fn(
    a: torch.Tensor,
    b: torch.Tensor,
    ctx: MoEAllGatherGroupGEMMTensorParallelContext,
    full_topk_ids: torch.Tensor,
    **_: Any,
) -> RoutedKey:
    return check_operands(a, b, ctx, full_topk_ids)


@op(
    algorithms=ALGORITHMS,
    call=Call,
    sizes=key_fn,
    key_fn=key_fn,
    key_sizes=("M",),
    agree_fn=lambda a, b, ctx, full_topk_ids, **_: ids_as_text(full_topk_ids),
    input_variants_fn=lambda a, b, ctx, full_topk_ids, **_: [
        {"full_topk_ids": ids} for ids in other_batches(full_topk_ids, len(b))
    ],
    version="1",  # another one when results that are shipped (records/) should not be used any more
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
    accepted_key: RoutedKey | None = None,
) -> torch.Tensor:
    """Each token of all ranks times the weights of its experts; tuned over the ranks of ``ctx``.
    Returns [M * topk, N_per_rank], row ``t * topk + j`` for choice j of token t.

    All ranks call alike; more about calls: the docstring of ``triton_dist.kernels.nvidia``. fp32
    accumulation; fp32 operands are multiplied as ``torch.backends.cuda.matmul.allow_tf32`` says.

    Args:
        a: [M / W, K], this rank's tokens, contiguous; not to be overwritten on other streams before
            the call is done.
        b: [E, K, N_per_rank], any strides; TMA serves unit stride along K or N and multiples of 16
            bytes elsewhere, pointers the rest.
        ctx: from ``create_ag_group_gemm_context``; M may be less than its max_ntokens.
        full_topk_ids: [M, topk], int32 or int64, contiguous: the experts of all ranks' tokens, the
            same on every rank. An id that is not one of 0 to E - 1 is nobody's: its row is zero.
        way: ``"arrivals"`` (default), ``"serial"`` or ``"library"``, see the module (tuned).
        gemm_config: tiles of the first two (tuned); default: the context's.
        num_groups: groups of arrivals, 1 to 4 (tuned).
        gather: ``"full_mesh_push"`` or ``"ring_push_1d"`` of arrivals;
            ``"exchange"``, for an M of up to the context's ``exchanged_rows``, or ``"collective"``
            of the others; default: the first of them (tuned).
        straggler_option: (rank, cycles): that rank sleeps so long within the call, for tests.

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
        RankDisagreement: on every rank, at the first call of a key, if ids differ; at every call
            with ``TRITON_DIST_DEBUG=agree``.
    """
    return Call(
        a, b, ctx, full_topk_ids, gemm_config, num_groups, gather, straggler_option, algorithm,
        accepted_key,
    ).run()  # fmt: skip


def run_moe_ag_triton_non_overlap(
    x_shard: torch.Tensor,
    weights: torch.Tensor,
    chosen_experts: torch.Tensor,
    persistent: bool = False,
) -> torch.Tensor:
    """The same by the world's all-gather and ``grouped_gemm``, one after the other, without a
    context. Collective.

    Args:
        x_shard: [M / W, K], contiguous. weights: [E, K, N_per_rank]. chosen_experts: [M, topk].
        persistent: not used: our kernel always is.

    Raises:
        InvalidArgument: before anything is launched.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if x_shard.ndim != 2 or len(x_shard) * size != len(chosen_experts):
        expected = f"[{len(chosen_experts)} tokens over {size} ranks, K]"
        function = "run_moe_ag_triton_non_overlap"
        raise InvalidArgument(function, "x_shard.shape", tuple(x_shard.shape), expected)
    rows = x_shard.new_empty(len(chosen_experts), x_shard.shape[1])
    grouped_gemm.key_fn(rows, weights, chosen_experts)  # refuses what cannot work
    if size > 1:
        libraries.all_gather_into(rows, x_shard.detach().contiguous(), None)
    product: torch.Tensor = grouped_gemm(rows if size > 1 else x_shard, weights, chosen_experts)
    return product
