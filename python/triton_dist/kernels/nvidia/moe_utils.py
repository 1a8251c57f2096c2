"""Indices of routes by expert, under the names that scripts have for them."""

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
    """Sort routes by expert, the rows of each expert filled up to a multiple of
    ``alignment_by_expert``. Always the same for the same ids; nothing waits for the device.

    Args:
        chosen_experts: [M, topk], int32 or int64, contiguous; ids that are not one of 0 to
            ``nexperts`` - 1 have no row.
        nexperts: 1 to 512.

    Returns:
        Five tensors, int32, of which T is cdiv(M * topk, alignment_by_expert) + nexperts:
        ntokens_by_expert [nexperts]; scatter_index [M, topk], the row of each route, or -1;
        gather_index [T * alignment_by_expert], the route of each row, or 2**31 - 1; expert_index
        [T], the expert of each ``alignment_by_expert`` rows, or ``nexperts``; M_pad [1], rows that
        are used.

    Raises:
        InvalidArgument: ids, or numbers, that cannot be.
    """
    if alignment_by_expert < 1:
        function, expected = "calc_gather_scatter_index_triton", "at least 1"
        raise InvalidArgument(function, "alignment_by_expert", alignment_by_expert, expected)
    blocks = block_map(chosen_experts, nexperts, alignment_by_expert).make()
    M, align = chosen_experts.numel(), alignment_by_expert
    most = triton.cdiv(M, align) + nexperts
    begins = torch.cat([blocks.ends.new_zeros(1), blocks.ends[:nexperts]])
    counts = begins.diff()
    tiles = (counts + align - 1) // align
    tile_ends = tiles.cumsum(0)
    shifts = (tile_ends - tiles) * align - begins[:-1]
    flat = chosen_experts.flatten()
    has_row = (flat >= 0) & (flat < nexperts)
    rows = blocks.rows + shifts[flat.clamp(0, nexperts - 1)]
    # Routes without a row write behind the end.
    gather = counts.new_full((most * align + 1,), NO_ROUTE)
    gather[torch.where(has_row, rows, most * align)] = torch.arange(
        M, dtype=torch.int32, device=flat.device
    )
    scatter = torch.where(has_row, rows, -1).int().view_as(chosen_experts)
    numbers = torch.arange(most, device=flat.device)
    experts = torch.searchsorted(tile_ends, numbers, right=True).int()
    return counts, scatter, gather[:-1], experts, (tile_ends[-1:] * align).int()


def sort_topk_ids_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    rank: int,
    num_ranks: int,
    num_local_ranks: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the routes of all ranks' tokens by expert, and tiles of ``block_size`` of their rows by
    the rank whose tokens they wait for: ``rank`` itself, then the next ones.

    Args:
        topk_ids: [M, topk], of each rank's M / ``num_ranks`` tokens in turn.
        num_local_ranks: ranks of one host, which must be all.

    Returns:
        Six tensors, int32: the route of each row, or 2**31 - 1, as of
        ``calc_gather_scatter_index_triton``; of each tile in order of arrival its expert, its place
        among the rows, and the first and last rank whose tokens it has; and their number, [1].

    Raises:
        InvalidArgument: ids, or numbers, that cannot be.
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
    # The rank before this one comes last; else a tile's ranks come in their order.
    before = (rank - 1) % num_ranks
    waits_for = torch.where((first <= before) & (before <= last), before, last)
    is_used = has_route.any(1)
    arrival = torch.where(is_used, (waits_for - rank) % num_ranks, num_ranks)
    order = arrival.argsort(stable=True)
    experts, first, last = (each[order].int() for each in (experts, first, last))
    return gather, experts, order.int(), first, last, M_pad // block_size
