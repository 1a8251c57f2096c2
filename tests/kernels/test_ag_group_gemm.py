"""AllGather + grouped GEMM: what is tried at which sizes, and one rank alone."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

from triton_dist.errors import ContextFinalized
from triton_dist.kernels.common.agreement import digest_text
from triton_dist.kernels.common.moe import rows as moe_rows
from triton_dist.kernels.common.moe import spaces
from triton_dist.kernels.nvidia import ag_group_gemm
from triton_dist.kernels.nvidia.allgather_group_gemm import algorithms
from triton_dist.kernels.nvidia.allgather_group_gemm.algorithms import ALGORITHMS, group_ends
from triton_dist.kernels.nvidia.allgather_group_gemm.context import RoutedKey
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.allgather_group_gemm import AG_GROUP_GEMM
from triton_dist.testing.opinfo.moe import FIRST_GEMMS, GroupedShape


@pytest.mark.parametrize(
    ("num_ranks", "ends"),
    [
        (1, [(1,)] * 4),
        (2, [(2,), (1, 2), (1, 2), (1, 2)]),
        (3, [(3,), (1, 3), (1, 2, 3), (1, 2, 3)]),
        (4, [(4,), (2, 4), (1, 2, 4), (1, 2, 3, 4)]),
        (8, [(8,), (3, 8), (1, 3, 8), (1, 3, 6, 8)]),
    ],
)
def test_groups_of_arrivals(num_ranks, ends):
    assert [group_ends(number, num_ranks) for number in range(1, 5)] == ends


@pytest.fixture
def on_h200(monkeypatch):
    """A space of a GPU, with NCCL."""
    device = CpuDevice()
    device.interprets, device.has_nccl = False, True
    device.facts = lambda: {"capability": "9.0"}
    for module in (algorithms, moe_rows, spaces):
        monkeypatch.setattr(module, "current_device", lambda: device)
    return device


def kept(name, M, num_ranks, dtype=torch.bfloat16, layout="row-major"):
    """Ways, groups and all-gathers that are tried for a model."""
    shape = FIRST_GEMMS[name]
    sizes = (M, shape.N // num_ranks, shape.K, shape.E, shape.topk)
    key = RoutedKey(*sizes, dtype, layout, num_ranks)
    configs = [
        each for each in ALGORITHMS.config_space() if ALGORITHMS[each["algorithm"]].fits(each, key)
    ]
    assert len(configs) <= 60  # a tuning stays one of seconds
    return {(each["algorithm"], each.get("num_groups"), each.get("gather")) for each in configs}


def test_groups_are_tried_where_they_have_rows(on_h200):
    push = "full_mesh_push"
    few = {("arrivals", 1, push), ("serial", None, "exchange")}
    library = {("library", None, "collective")}
    assert kept("DeepSeek-V3", 64, 4) == few | library | {("library", None, "exchange")}
    many = kept("Mixtral 8x7B", 8192, 8)
    assert many == library | {
        ("serial", None, "collective"),
        *(("arrivals", number, push) for number in (1, 2, 3, 4)),
    }
    # 512 rows an expert.
    assert {each for each in kept("Qwen3-30B-A3B", 8192, 2) if each[0] == "arrivals"} == {
        *itertools.product(["arrivals"], [1, 2], [push])
    }


def test_a_ring_is_tried_where_not_all_gpus_are_linked(on_h200, monkeypatch):
    def rings(num_ranks):
        return {
            each for each in kept("Mixtral 8x7B", 8192, num_ranks) if each[2] == algorithms.RING
        }

    assert not any(config.get("gather") == algorithms.RING for config in ALGORITHMS.config_space())
    monkeypatch.setattr(algorithms, "has_links_between_all_gpus", lambda: False)
    assert rings(8) == {("arrivals", number, algorithms.RING) for number in (1, 2)}
    assert not rings(2)  # a ring of two is a full mesh


def test_the_library_is_tried_where_it_has_a_kernel(on_h200):
    def has(**changes):
        return any(each[0] == "library" for each in kept("Mixtral 8x7B", 1024, 2, **changes))

    assert has()
    assert not has(dtype=torch.float16)
    assert not has(layout="strided")
    on_h200.facts = lambda: {"capability": "8.0"}
    assert not has()


def test_one_rank_gathers_nothing(on_h200):
    assert kept("Mixtral 8x7B", 1024, 1) == {
        ("arrivals", 1, "full_mesh_push"),
        ("library", None, "exchange"),
    }


def test_without_nccl_nothing_else_gathers(on_h200):
    on_h200.has_nccl = False
    assert all(each[2] != "collective" for each in kept("Mixtral 8x7B", 1024, 2))


SHAPE = GroupedShape(24, 48, 40, 5, 2)


@pytest.mark.parametrize(
    "options", [{"algorithm": algorithm} for algorithm in ALGORITHMS] + [{"num_groups": 3}]
)
def test_alone(options):
    data = AG_GROUP_GEMM.operands(SHAPE, torch.float16, 1, torch.Generator().manual_seed(1))
    data["full_topk_ids"][3] = -1
    with AG_GROUP_GEMM.context(SHAPE, torch.float16, BLOCK_SIZE_M=16, BLOCK_SIZE_N=32) as ctx:
        args, _ = AG_GROUP_GEMM.arguments(data, ctx)
        ag_group_gemm._hooks.prepare(*args, **options)
        C = ag_group_gemm.fn(*args, **options)
    limit = AG_GROUP_GEMM.tolerance(torch.float16, 1)
    assert_allclose(C, AG_GROUP_GEMM.reference(data), rtol=limit, atol=limit)
    assert not C[6:8].any()
    with pytest.raises(ContextFinalized):
        ag_group_gemm.fn(*args, **options)


def test_tiles_of_the_context_are_those_of_calls_that_name_none():
    given = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 4}
    with AG_GROUP_GEMM.context(SHAPE, torch.float16, **given, stages=2, num_warps=4) as ctx:
        args, kwargs = AG_GROUP_GEMM.arguments(AG_GROUP_GEMM.operands(SHAPE, torch.float16, 1), ctx)
        arguments = inspect.signature(ag_group_gemm.fn).bind(*args, **kwargs)
        arguments.apply_defaults()
        call = algorithms.Call(**arguments.arguments)
        assert call.tiles.kwargs == given
        assert (call.tiles.num_stages, call.tiles.num_warps) == (2, 4)


def test_text_of_ids_differs_where_they_do():
    ids = torch.arange(6).reshape(3, 2)
    assert digest_text("ids", ids) == digest_text("ids", ids.int())
    others = (ids, ids + 1, ids.reshape(2, 3), ids.flip(0))
    assert len({digest_text("ids", each) for each in others}) == 4
    assert digest_text("ids", ids.to("meta")) == "ids (3, 2)"


def test_costs_are_those_of_all_that_has_to_move():
    cost = AG_GROUP_GEMM.cost(GroupedShape(1024, 4096, 512, 8, 2), torch.bfloat16, 4)
    assert cost.flops == 2 * 2048 * 1024 * 512
    assert cost.link_bytes == 768 * 512 * 2
    assert cost.written_bytes == 2048 * 1024 * 2
    assert cost.read_bytes == pytest.approx((1024 * 512 + 8 * 512 * 1024) * 2)
