"""Names of scripts for indices of routes by expert."""

from __future__ import annotations

import pytest
import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.moe_utils import (
    NO_ROUTE,
    calc_gather_scatter_index_triton,
    sort_topk_ids_align_block_size,
)
from triton_dist.testing import poisoned_empty


@pytest.mark.parametrize(
    ("M", "topk", "E", "align"), [(40, 3, 5, 16), (7, 1, 1, 1), (1, 2, 9, 4), (100, 4, 3, 128)]
)
@pytest.mark.parametrize("low", [-1, 0])
def test_rows_are_sorted_and_filled_up(M, topk, E, align, low):
    ids = torch.randint(low, E - low, (M, topk), generator=torch.Generator().manual_seed(M))
    with poisoned_empty():
        counts, scatter, gather, experts, M_pad = calc_gather_scatter_index_triton(ids, E, align)
    routes, tiles = [], []
    for expert in range(E):
        own = (ids.flatten() == expert).nonzero().flatten().tolist()
        assert counts[expert] == len(own)
        used = -(-len(own) // align)
        routes += own + [NO_ROUTE] * (used * align - len(own))
        tiles += [expert] * used
    assert M_pad.tolist() == [len(routes)]
    most = -(-M * topk // align) + E
    assert gather.tolist() == routes + [NO_ROUTE] * (most * align - len(routes))
    assert experts.tolist() == tiles + [E] * (most - len(tiles))
    named = (ids >= 0) & (ids < E)
    assert (scatter[~named] == -1).all()
    assert gather[scatter[named]].tolist() == named.flatten().nonzero().flatten().tolist()
    assert {each.dtype for each in (counts, scatter, gather, experts, M_pad)} == {torch.int32}


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_tiles_stand_in_order_of_arrival(rank):
    num_ranks, align = 4, 3
    ids = torch.randint(0, 3, (12, 2), generator=torch.Generator().manual_seed(rank))
    gather, experts, places, first, last, used = sort_topk_ids_align_block_size(
        ids, 3, rank, num_ranks, num_ranks, align
    )
    assert torch.equal(gather, calc_gather_scatter_index_triton(ids, 3, align)[2])
    arrivals = []
    used_tiles = torch.stack([experts, places, first, last])[:, :used]
    for expert, place, begin, end in used_tiles.T.tolist():
        routes = [route for route in gather.view(-1, align)[place].tolist() if route != NO_ROUTE]
        sources = [route // (ids.numel() // num_ranks) for route in routes]
        assert {int(ids.flatten()[route]) for route in routes} == {expert}
        assert (min(sources), max(sources)) == (begin, end)
        assert sorted(sources) == sources
        span = range(begin, end + 1)
        arrivals.append(max((source - rank) % num_ranks for source in span))
    assert arrivals == sorted(arrivals)
    assert sorted(places.tolist()) == list(range(len(places)))


def test_what_cannot_be_is_refused():
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="num_local_ranks is 1, expected num_ranks = 2"):
        sort_topk_ids_align_block_size(ids, 2, 0, 2, 1, 4)
    with pytest.raises(InvalidArgument, match="tokens is 3, expected a multiple of num_ranks = 2"):
        sort_topk_ids_align_block_size(ids, 2, 0, 2, 2, 4)
    with pytest.raises(InvalidArgument, match="alignment_by_expert is 0, expected at least 1"):
        calc_gather_scatter_index_triton(torch.zeros(2, 2, dtype=torch.int32), 2, 0)
    with pytest.raises(InvalidArgument, match=r"topk_ids\.dtype is torch\.float32"):
        calc_gather_scatter_index_triton(torch.zeros(2, 2), 2)
