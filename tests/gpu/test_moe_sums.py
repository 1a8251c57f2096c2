"""Grouped GEMM, top-k sum, and ReduceScatter or AllReduce, on GPUs: compiled kernels, NVLink, and
graphs that serve any routing.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed import moe_sum_ranks
from tests.distributed.moe_sum_ranks import AR, INFOS
from tests.gpu.ranks import few_ranks
from triton_dist.testing.opinfo.moe import GroupedShape

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@pytest.fixture(params=INFOS)
def name(request):
    return request.param


def shape_on(num_ranks, rows=96):
    return GroupedShape(rows * num_ranks, 1536, 256 * num_ranks, 16, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_way_any_tokens_and_routing(on_gpus, name, dtype, num_ranks):
    rows = (300, 1, 64, 37, 200)
    counts = on_gpus(moe_sum_ranks.every_algorithm, name, dtype, shape_on(num_ranks), rows)
    assert len(set(counts)) == 1
    assert counts[0] >= len(rows) * (4 if name != AR.name else 5)


@few_ranks
def test_layouts_odd_sizes_many_choices_and_experts(on_gpus, name, num_ranks):
    M = 60 * num_ranks
    shapes = (GroupedShape(M, 355, 106, 1, 1), GroupedShape(M, 1024, 512, 300, 10))
    assert set(on_gpus(moe_sum_ranks.layouts, name, shapes)) == {8 if name == AR.name else 7}


def test_the_same_operands_give_the_same_bits(on_gpus, name, num_ranks, rounds):
    number = rounds(20)
    count = number * (5 if name == AR.name else 4)
    assert set(on_gpus(moe_sum_ranks.same_bits, name, shape_on(num_ranks), number)) == {count}


def test_captured_graphs_serve_any_routing(on_gpus, name, num_ranks, rounds):
    number = rounds(40)
    (count,) = set(on_gpus(moe_sum_ranks.replayed, name, shape_on(num_ranks), number))
    assert count >= number * (5 if name == AR.name else 4)


@few_ranks
def test_a_graph_serves_a_thousand_routings(on_gpus, name, num_ranks, rounds):
    number = rounds(1000)
    counts = on_gpus(moe_sum_ranks.replayed, name, shape_on(num_ranks, 24), number, 1)
    assert set(counts) == {number}


@few_ranks
def test_tuned_over_the_ranks_with_what_the_caller_fixes(on_gpus, name, num_ranks):
    for count, configs in on_gpus(moe_sum_ranks.tuned, name, shape_on(num_ranks)):
        assert count == 3
        assert configs[2] == "chunks"


@few_ranks
def test_other_tokens_on_one_rank_are_told_by_the_kernels(on_gpus, name, num_ranks):
    shape = shape_on(num_ranks)
    for told in on_gpus(moe_sum_ranks.other_tokens_on_one_rank, name, shape):
        assert all(each[1] == shape.M - num_ranks for each in told)
