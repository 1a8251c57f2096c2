"""Index tensors that sort MoE routes by expert, under the names of Triton-distributed's scripts.

A route is a pair of a token and an expert that was chosen for it.
"""

from __future__ import annotations

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.moe.routing import block_map

__all__ = ["calc_gather_scatter_index_triton", "sort_topk_ids_align_block_size"]
NO_ROUTE = 0x7FFFFFFF


def calc_gather_scatter_index_triton(
    chosen_experts: torch.Tensor, nexperts: int, alignment_by_expert: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort routes by expert and pad the rows of each expert to ``alignment_by_expert``.

    The result is deterministic. The function does not wait for the device.

    Args:
        chosen_experts: [M, topk], int32 or int64, contiguous. Ids outside 0 to ``nexperts`` - 1
            get no row.
        nexperts: number of experts, 1 to 512.
        alignment_by_expert: rows of each expert are padded to a multiple of this number.

    Returns:
        Five int32 tensors, with T = cdiv(M * topk, alignment_by_expert) + nexperts:

        * ntokens_by_expert [nexperts];
        * scatter_index [M, topk]: row of each route, or -1;
        * gather_index [T * alignment_by_expert]: route of each row, or 2**31 - 1 for padding;
        * expert_index [T]: expert of each block of ``alignment_by_expert`` rows, or ``nexperts``;
        * M_pad [1]: number of rows in use, including padding.

    Raises:
        InvalidArgument: wrong shape or dtype of the ids, or a number out of range.
    """
    if alignment_by_expert < 1:
        function, expected = "calc_gather_scatter_index_triton", "at least 1"
        raise InvalidArgument(function, "alignment_by_expert", alignment_by_expert, expected)
    blocks = block_map(chosen_experts, nexperts, alignment_by_expert).queue()
    M, align = chosen_experts.numel(), alignment_by_expert
    max_tiles = triton.cdiv(M, align) + nexperts
    begins = torch.cat([blocks.ends.new_zeros(1), blocks.ends[:nexperts]])
    counts = begins.diff()
    tiles = (counts + align - 1) // align
    tile_ends = tiles.cumsum(0)
    shifts = (tile_ends - tiles) * align - begins[:-1]
    flat = chosen_experts.flatten()
    has_row = (flat >= 0) & (flat < nexperts)
    rows = blocks.rows + shifts[flat.clamp(0, nexperts - 1)]
    # Routes without a row write to one additional element, which is removed below.
    gather = counts.new_full((max_tiles * align + 1,), NO_ROUTE)
    gather[torch.where(has_row, rows, max_tiles * align)] = torch.arange(
        M, dtype=torch.int32, device=flat.device
    )
    scatter = torch.where(has_row, rows, -1).int().view_as(chosen_experts)
    tile_numbers = torch.arange(max_tiles, device=flat.device)
    experts = torch.searchsorted(tile_ends, tile_numbers, right=True).int()
    return counts, scatter, gather[:-1], experts, (tile_ends[-1:] * align).int()


def sort_topk_ids_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    rank: int,
    num_ranks: int,
    num_local_ranks: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the routes of all ranks by expert, and the tiles of rows in the order of arrival.

    Shards arrive in the order rank, rank + 1, …. Tiles that need only rows of ``rank`` come first,
    then tiles that also need rows of the next rank, and so on.

    Args:
        topk_ids: [M, topk]; the M / ``num_ranks`` tokens of rank 0, then of rank 1, and so on.
        num_experts: number of experts, 1 to 512.
        rank: this rank.
        num_ranks: number of ranks; must divide M.
        num_local_ranks: ranks on one host; must equal ``num_ranks``.
        block_size: rows per tile.

    Returns:
        Six int32 tensors:

        * gather_index: see ``calc_gather_scatter_index_triton``;
        * four tensors with an entry for each tile in the order of arrival: the expert; the index of
            the tile in ``gather_index``; the smallest and the largest rank with tokens in the tile;
        * the number of tiles in use, [1].

    Raises:
        InvalidArgument: wrong shape or dtype of the ids, or a number out of range.
    """
    function = "sort_topk_ids_align_block_size"
    if num_local_ranks != num_ranks:
        expected = f"num_ranks = {num_ranks}: all ranks are on one host"
        raise InvalidArgument(function, "num_local_ranks", num_local_ranks, expected)
    if topk_ids.shape[0] % num_ranks:
        expected = f"a multiple of num_ranks = {num_ranks}"
        raise InvalidArgument(function, "tokens", topk_ids.shape[0], expected)
    sorted_by_expert = calc_gather_scatter_index_triton(topk_ids, num_experts, block_size)
    _, _, gather, experts, M_pad = sorted_by_expert
    tiles = gather.view(-1, block_size)
    routes = topk_ids.numel() // num_ranks
    has_route = tiles != NO_ROUTE
    first = torch.where(has_route, tiles, NO_ROUTE).amin(1) // routes
    last = torch.where(has_route, tiles, -1).amax(1) // routes
    # Shards arrive in the order rank, …, num_ranks - 1, 0, …, rank - 1. A tile waits for the shards
    # ``first`` to ``last``. If rank - 1 is among them, its shard arrives last. Otherwise these
    # shards are all on one side of rank, and the shard of ``last`` arrives last.
    previous_rank = (rank - 1) % num_ranks
    awaited_rank = torch.where(
        (first <= previous_rank) & (previous_rank <= last), previous_rank, last
    )
    is_used = has_route.any(1)
    arrival = torch.where(is_used, (awaited_rank - rank) % num_ranks, num_ranks)
    order = arrival.argsort(stable=True)
    experts, first, last = (each[order].int() for each in (experts, first, last))
    return gather, experts, order.int(), first, last, M_pad // block_size
