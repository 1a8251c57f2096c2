"""Names of scripts for indices of routes by expert."""

from __future__ import annotations

import pytest
import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.moe_utils import NO_ROUTE, calc_gather_scatter_index_triton
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


def test_what_cannot_be_is_refused():
    with pytest.raises(InvalidArgument, match="alignment_by_expert is 0, expected at least 1"):
        calc_gather_scatter_index_triton(torch.zeros(2, 2, dtype=torch.int32), 2, 0)
    with pytest.raises(InvalidArgument, match=r"topk_ids\.dtype is torch\.float32"):
        calc_gather_scatter_index_triton(torch.zeros(2, 2), 2)
