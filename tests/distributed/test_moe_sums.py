"""Grouped GEMM, top-k sum, and ReduceScatter or AllReduce, over real processes: the kernels in the
interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import moe_sum_ranks
from tests.distributed.moe_sum_ranks import AR, INFOS, RS
from triton_dist.testing.opinfo.moe import GroupedShape

SHAPE = GroupedShape(12, 72, 80, 5, 3)
SMALL = GroupedShape(4, 40, 32, 2, 2)


@pytest.fixture(params=INFOS)
def name(request):
    return request.param


@pytest.mark.parametrize(
    ("name", "size", "dtype"), [(RS.name, 2, torch.bfloat16), (AR.name, 2, torch.float16)]
)
def test_every_way_any_tokens_and_routing(on_ranks, name, size, dtype):
    shape = GroupedShape(0, 72, 40 * size, 5, 3)
    counts = on_ranks(size)(moe_sum_ranks.every_algorithm, name, dtype, shape, (5, 1))
    assert counts == [2 * (6 if name == RS.name else 7)] * size


def test_layouts_odd_sizes_many_choices_and_experts(on_two):
    shapes = (GroupedShape(6, 35, 42, 1, 1), GroupedShape(2, 24, 16, 24, 10))
    assert on_two(moe_sum_ranks.layouts, RS.name, shapes) == [7] * 2


def test_the_same_operands_give_the_same_bits(on_any):
    assert on_any(moe_sum_ranks.same_bits, AR.name, SHAPE, 1) == [5] * 3


@pytest.mark.parametrize("name", [RS.name])  # whose calls are those of the other op
def test_tuned_over_the_ranks_with_what_the_caller_fixes(on_two, name):
    for count, configs in on_two(moe_sum_ranks.tuned, name, SMALL):
        assert count == 3
        assert configs[2] == "chunks"


def test_without_a_context(on_two, name):
    on_two(moe_sum_ranks.without_context, name, SHAPE)


def test_what_is_launched(on_two, name):
    """The map's two launches once, a product and a sum for each chunk, and no copy of rows."""
    shape = GroupedShape(4, 72, 32, 2, 2)
    seen, other = on_two(moe_sum_ranks.launches, name, shape)
    assert seen == other
    blocks = ["kernel_count_routes", "kernel_map_blocks"]
    product = ["kernel_grouped_gemm", "kernel_topk_sum"]
    pushed = [*blocks, *product * 2, "kernel_add_columns", "kernel_finish_epoch"]
    if name == AR.name:
        reductions = {"two_shot": "kernel_all_reduce_two_shot"}
        assert seen.pop("serial one_shot")[:-1] == [*blocks, *product]
        assert seen.pop("chunks") == [*pushed, "kernel_all_gather"]
    else:
        reductions = {"push": "kernel_reduce_scatter"}
        assert seen.pop("chunks") == pushed
    # Few tokens: the sum over choices is no launch of its own.
    assert seen.pop("serial topk_exchange") == [*blocks, product[0], "kernel_topk_exchange"]
    expected = {
        f"serial {algorithm}": [*blocks, *product, last] for algorithm, last in reductions.items()
    }
    assert seen == expected


def test_other_ids_on_one_rank_are_an_error_on_all(on_two):
    name = RS.name
    for first, later in on_two(moe_sum_ranks.other_ids_on_one_rank, name, SHAPE):
        assert "disagree on the arguments of triton_dist.kernels.nvidia" in first
        assert f"disagree on the ids of a call of {name}" in later
        assert first.count("ids (12, 3), digest ") == later.count("ids (12, 3), digest ") == 2


def test_other_tokens_on_one_rank_are_told_by_the_kernels(on_two):
    env = {"TRITON_DIST_WAIT_TIMEOUT": "60"}
    for told in on_two(moe_sum_ranks.other_tokens_on_one_rank, RS.name, SHAPE, env=env):
        assert told == [{0: 12, 1: 10}] * 3
