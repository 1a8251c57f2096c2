"""The grouped GEMM on a GPU: every tile, both ways, and graphs that serve any routing."""

from __future__ import annotations

import pytest
import torch

from triton_dist.kernels.common.moe.routing import block_map
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.nvidia import grouped_gemm
from triton_dist.runtime.device import current_device
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.base import tolerance
from triton_dist.testing.opinfo.grouped_gemm import GROUPED_GEMM, GroupedShape
from triton_dist.testing.timing import capture_graph

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]
SHAPE = GroupedShape(500, 768, 1024, 16, 3)


def data(dtype=torch.bfloat16, shape=SHAPE):
    return GROUPED_GEMM.operands(shape, dtype, 1)


def check(C, operands):
    limit = GROUPED_GEMM.tolerance(C.dtype, 1)
    assert_allclose(C, GROUPED_GEMM.reference(operands), rtol=limit, atol=limit)


def algorithms():
    found = [{"gemm_config": grouped_tiles()[0]}, {"gemm_config": grouped_tiles()[-1]}]
    library = {"algorithm": "library"}
    fast = current_device().facts()["capability"] == "9.0"
    return [*found, library] if fast else found


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tile(dtype, column_major):
    operands = data(dtype)
    if column_major:
        operands["B"] = operands["B"].transpose(1, 2).contiguous().transpose(1, 2)
    operands["topk_ids"][::7] = -1
    for config in grouped_tiles():
        check(grouped_gemm.fn(**operands, gemm_config=config), operands)


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000, 5001])
@pytest.mark.parametrize(("E", "topk"), [(1, 1), (8, 2), (128, 8), (256, 8), (512, 10)])
def test_the_map_is_a_stable_sort(tokens, E, topk):
    ids = torch.randint(-1, E + 1, (tokens, topk), device="cuda")
    blocks = block_map(ids, E, 64).queue()
    named = torch.where((ids < 0) | (ids >= E), E, ids).flatten()
    assert torch.equal(blocks.routes.long(), named.argsort(stable=True))
    counts = torch.bincount(named, minlength=E + 1)
    assert torch.equal(blocks.ends.long(), counts.cumsum(0))
    assert blocks.num_tiles.item() == ((counts + 63) // 64).sum().item()


def test_a_graph_serves_any_routing():
    for algorithm in algorithms():
        operands, out = data(), []
        ids = operands["topk_ids"]
        replay = capture_graph(
            lambda o=operands, w=algorithm, c=out: c.append(grouped_gemm.fn(**o, **w))
        )
        for number in range(40):
            high = (17, 16, 1, 4)[number % 4]
            ids.copy_(torch.randint(-1 if high == 17 else 0, high, ids.shape, device="cuda"))
            out[-1].fill_(float("nan"))
            replay()
            check(out[-1], operands)
            first = out[-1].clone()
            replay()
            assert torch.equal(out[-1], first)


def test_orders_and_activation():
    operands = data()
    operands["topk_ids"][5:9] = 16
    ids = operands["topk_ids"].flatten().long()
    product = GROUPED_GEMM.reference(operands).float()
    gate, up = product.chunk(2, dim=1)
    limit = 2 * tolerance(torch.bfloat16)  # the reference is rounded before
    for algorithm in algorithms():
        gated = grouped_gemm.fn(**operands, activation="silu_mul", **algorithm)
        expected = (torch.nn.functional.silu(gate) * up).bfloat16()
        assert_allclose(gated, expected, rtol=limit, atol=limit)
        in_order = grouped_gemm.fn(**operands, **algorithm)
        by_expert = grouped_gemm.fn(**operands, order="sorted", **algorithm)
        assert torch.equal(by_expert, in_order[ids.argsort(stable=True)])


def test_tuned():
    operands = data(shape=GroupedShape(96, 512, 1024, 32, 4))
    grouped_gemm.clear()
    check(grouped_gemm(**operands), operands)
    record = grouped_gemm.tune(**operands)
    assert any(hasattr(trial.outcome, "median") for trial in record.trials)
