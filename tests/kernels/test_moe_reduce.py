"""The sum over choices, how columns are cut, and what a tuning of run_moe_reduce_rs and
run_moe_reduce_ar tries."""

from __future__ import annotations

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_keys import EXAMPLE_KEYS
from triton_dist.kernels.common.moe import rows, spaces
from triton_dist.kernels.common.moe.columns import divide_columns
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES, grouped_tiles
from triton_dist.kernels.common.moe.summing import SumSizes
from triton_dist.kernels.common.moe.topk_sum import topk_sum
from triton_dist.kernels.nvidia.moe_reduce import algorithms
from triton_dist.kernels.nvidia.moe_reduce.algorithms import AllReduceCall, ReduceScatterCall
from triton_dist.runtime.device import current_device
from triton_dist.testing import assert_allclose, poisoned_empty
from triton_dist.testing.opinfo.moe import SECOND_GEMMS, GroupedShape
from triton_dist.testing.opinfo.moe_reduce import MOE_REDUCE_AR as AR
from triton_dist.testing.opinfo.moe_reduce import MOE_REDUCE_RS as RS

BF16 = torch.bfloat16
ALGORITHMS = {RS.name: ReduceScatterCall.algorithms, AR.name: AllReduceCall.algorithms}
INFOS = pytest.mark.parametrize("info", [RS, AR], ids=lambda info: info.name)


def in_order(products, choices, ids, E):
    """Choices added one after another in fp32."""
    total = torch.zeros(len(ids), products.shape[1])
    by_token = products.view(*ids.shape, -1).float()
    for choice in range(ids.shape[1]):
        named = (ids[:, choice] >= 0) & (ids[:, choice] < E)
        addend = choices[:, choice, None].float() * by_token[:, choice]
        total += torch.where(named[:, None], addend, 0)
    return total.to(products.dtype)


@pytest.mark.parametrize(
    ("M", "topk", "N", "width", "rows_per_block"),
    [(8, 3, 40, 16, 4), (5, 1, 33, 33, 5), (7, 10, 24, 7, 3), (1, 2, 1, 1, 1)],
)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_choices_are_added_in_their_order(M, topk, N, width, rows_per_block, is_sorted):
    generator = torch.Generator().manual_seed(M)
    E = 4
    ids = torch.randint(-1, E + 1, (M, topk), generator=generator)
    choices = torch.rand(M, topk, generator=generator)
    choices[(ids < 0) | (ids >= E)] = float("nan")
    products = torch.randn(M * topk, N, generator=generator).to(BF16)
    expected = in_order(products, choices, ids, E)
    products[((ids < 0) | (ids >= E)).flatten()] = float("nan")
    order = torch.randperm(M * topk, generator=generator)
    number = order.argsort().int() if is_sorted else None
    blocks = -(-M // rows_per_block)
    with poisoned_empty():
        out = torch.empty(blocks * rows_per_block * N, dtype=BF16)
    for first in range(0, N, width):
        columns = products[:, first : first + width]
        columns = columns[order] if is_sorted else columns.contiguous()
        topk_sum(
            columns,
            choices,
            ids,
            number,
            out,
            E,
            rows_per_block=rows_per_block,
            first_column=first,
            N=N,
        ).run()
    for block, whole in enumerate(out.view(blocks, -1)):
        mine = expected[block * rows_per_block : (block + 1) * rows_per_block]
        for first in range(0, N, width):
            end = min(first + width, N)
            block = whole[rows_per_block * first : rows_per_block * end].view(rows_per_block, -1)
            assert torch.equal(block[: len(mine)], mine[:, first:end])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 64), st.sampled_from([32, 64, 256]))
def test_columns_are_cut_where_tiles_end(N, num_chunks, multiple):
    columns = divide_columns(3, N, num_chunks, multiple)
    spans = list(columns)
    assert len(spans) == len(columns) <= num_chunks
    assert [first for first, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == N
    assert all((end - first) % multiple == 0 for first, end in spans[:-1])


@INFOS
def test_one_rank_needs_no_peer(info):
    shape = GroupedShape(5, 40, 24, 3, 2)
    data = info.operands(shape, BF16, 1)
    limit = info.tolerance(BF16, 1)
    with info.context(shape, BF16) as ctx:
        args, _ = info.arguments(data, ctx)
        tiles = {"gemm_config": grouped_tiles()[0]}
        for algorithm in (
            {"algorithm": "chunks", "num_chunks": 2, **tiles},
            {"algorithm": "serial", **tiles},
            {"algorithm": "library"},
            {"config": triton.Config({f"BLOCK_SIZE_{axis}": 32 for axis in "MNK"})},
        ):
            assert_allclose(info.op.fn(*args, **algorithm), info.reference(data), limit, limit)
        C = info.op(*args, autotune=False)
        assert_allclose(C, info.reference(data), limit, limit)
        assert 0.5 < C.float().std() < 2


class Gpu:
    """What a space asks of the device."""

    interprets, has_nccl = False, True
    shared_memory_bytes = current_device().shared_memory_bytes

    @staticmethod
    def facts():
        return {"capability": "9.0"}


def tried(monkeypatch, info, shape, dtype=BF16, num_ranks=4, **fixed):
    """Configs that a tuning on GPUs tries for a shape, by way."""
    for module in (rows, spaces, algorithms):
        monkeypatch.setattr(module, "current_device", Gpu)
    key = EXAMPLE_KEYS[info.name][0]._replace(
        M=shape.M, N=shape.N, K=shape.K // num_ranks, E=shape.E, topk=shape.topk, dtype=dtype,
        num_ranks=num_ranks,
    )  # fmt: skip
    sizes = SumSizes(key, fixed.get("n_chunks"), fixed.get("config"))
    found = {name: [] for name in ALGORITHMS[info.name]}
    for config in ALGORITHMS[info.name].config_space():
        if ALGORITHMS[info.name][config["algorithm"]].fits(config, sizes):
            found[config["algorithm"]].append(config)
    return found


def values(configs, name):
    return {config[name] for config in configs}


@INFOS
def test_what_is_tried_for_many_tokens(monkeypatch, info):
    found = tried(monkeypatch, info, SECOND_GEMMS["Mixtral 8x7B"])
    assert values(found["chunks"], "num_chunks") == {1, 2, 4, 8}
    own = {RS.name: {"push"}, AR.name: {"two_shot"}}[info.name]
    assert values(found["serial"], "reduction") == {*own, "collective"}
    assert values(found["library"], "reduction") == {*own, "collective"}
    assert {config["gemm_config"].kwargs["BLOCK_SIZE_M"] for config in found["chunks"]} == {128}


@INFOS
def test_nothing_is_cut_where_reading_weights_takes_longest(monkeypatch, info):
    shape = GroupedShape(64, 7168, 2048, 256, 8)
    found = tried(monkeypatch, info, shape)
    assert values(found["chunks"], "num_chunks") == {1}
    assert ("one_shot" in values(found["serial"], "reduction")) is (info is AR)
    # Choices are summed in the exchange's load where tokens are few alone.
    assert "topk_exchange" in values(found["serial"], "reduction")
    assert "topk_exchange" in values(found["library"], "reduction")


@INFOS
def test_the_library_is_tried_where_it_has_a_kernel(monkeypatch, info):
    for shape, dtype in (
        (SECOND_GEMMS["Qwen3-30B-A3B"], torch.float16),
        (GroupedShape(64, 2046, 1024, 8, 2), BF16),
    ):
        found = tried(monkeypatch, info, shape, dtype)
        assert not found["library"]
        assert found["chunks"]


@INFOS
def test_a_caller_fixes_chunks_or_tiles(monkeypatch, info):
    shape = SECOND_GEMMS["Mixtral 8x7B"]
    found = tried(monkeypatch, info, shape, n_chunks=3)
    assert values(found["chunks"], "num_chunks") == {1}  # for which the caller's stands
    assert not found["serial"]
    assert tried(monkeypatch, info, shape, n_chunks=1)["serial"]
    found = tried(monkeypatch, info, shape, config=GROUPED_TILES[5])
    assert not found["library"]
    assert len(found["chunks"]) == 4
    assert len({str(config["gemm_config"]) for config in found["chunks"]}) == 1


@INFOS
def test_one_rank_tries_products_alone(monkeypatch, info):
    found = tried(monkeypatch, info, SECOND_GEMMS["Qwen3-30B-A3B"], num_ranks=1)
    assert not found["serial"]
    assert values(found["chunks"], "num_chunks") == {1}


def test_work_of_a_call():
    rs, ar = (info.cost(GroupedShape(1000, 64, 32, 4, 2), BF16, 4) for info in (RS, AR))
    assert rs.flops == ar.flops == 2 * 2000 * 64 * 8
    assert rs.link_bytes == 1000 * 64 * 2 * 3 / 4
    assert ar.link_bytes == 2 * rs.link_bytes
    assert ar.written_bytes == 4 * rs.written_bytes == 1000 * 64 * 2
    assert rs.read_bytes == pytest.approx((2000 * 8 + 4 * 8 * 64) * 2)
