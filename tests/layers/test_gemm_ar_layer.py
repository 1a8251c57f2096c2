"""The linear layer on GEMM-AllReduce."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import triton

from tests.distributed.calls import some_configs
from tests.layers.conftest import FIRST_CONFIG
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia import all_reduce, gemm_ar
from triton_dist.layers.nvidia import GemmARLayer
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import assert_allclose
from triton_dist.utils import generate_data, nvshmem_barrier_all_on_stream


def as_a_linear_layer() -> int:
    """Any leading dimensions, with and without a bias, against the whole layer on one rank."""
    ranks, device = group_for(), current_device().torch_device
    torch.manual_seed(0)
    weight = (torch.rand(40, 48) - 0.5).half().to(device)
    count = 0
    for has_bias in (True, False):
        bias = torch.rand(40).half().to(device) if has_bias else None
        with GemmARLayer(
            None, 30, 40, 48, torch.float16, has_weight=True, has_bias=has_bias
        ) as layer:
            layer.load_weight(weight, bias)
            for leading in ((30,), (2, 7), (1,), (3, 2, 2), ()):
                x = torch.rand(*leading, 48).half().to(device)
                shard = x.chunk(ranks.size, dim=-1)[ranks.rank]
                y = layer(shard)
                whole = torch.nn.functional.linear(
                    x.float(), weight.float(), None if bias is None else bias.float()
                )
                assert y.shape == (*leading, 40)
                assert not y.requires_grad
                assert_allclose(y, whole.half(), rtol=1e-2, atol=1e-2)
                count += 1
    return count


def linear_layer(max_M: int, N: int, K: int, **options: bool) -> GemmARLayer:
    return GemmARLayer(None, max_M, N, K, torch.float32, has_weight=True, **options)


def by_a_state_dict() -> list[str]:
    """Names of what is saved; another layer that loads it gives the same."""
    with linear_layer(4, 16, 16, has_bias=True) as first:
        first.load_weight(torch.rand(16, 16), torch.rand(16))
        with linear_layer(4, 16, 16, has_bias=True) as second:
            second.load_state_dict(first.state_dict())
            x = torch.rand(4, first.K_per_rank)
            assert_allclose(second(x), first(x))
        return list(first.state_dict())


def mistakes() -> list[str]:
    """Messages of what a caller can get wrong."""
    seen = []

    def refused(call):
        try:
            call()
        except InvalidArgument as error:
            seen.append(str(error))

    refused(lambda: linear_layer(4, 16, 15))
    refused(lambda: linear_layer(0, 16, 16))
    with linear_layer(4, 16, 16) as layer:
        refused(lambda: layer.load_weight(torch.rand(16, 8)))
        refused(lambda: layer.load_weight(torch.rand(16, 16), torch.rand(16)))
        refused(lambda: layer(torch.rand(5, layer.K_per_rank)))
    with GemmARLayer(None, 4, 16, 16, torch.float32) as layer:
        refused(lambda: layer(torch.rand(4, layer.K_per_rank)))
        refused(lambda: layer.load_weight(torch.rand(16, 16)))
    return seen


def as_scripts_call_it() -> tuple[int, list[str]]:
    """Checked calls with one config and tuned, in one shot and in two; and what is refused."""
    group, dtype, local_k = dist.group.WORLD, torch.float16, 64
    tile = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
    config = triton.Config({**tile, "NUM_GEMM_SMS": 116}, num_stages=3, num_warps=8)
    entries = [
        ((9, local_k), dtype, (0.1, 0)),
        ((40, local_k), dtype, (0.1, 0)),
        ((40,), dtype, (1, 0)),
    ]
    count, refused = 0, list[str]()
    for low_latency, user_config in ((False, config), (True, config), (False, None)):
        layer = GemmARLayer(
            group, 9, 40, local_k * group.size(), dtype, dtype, group.size(),
            use_ll_kernel=low_latency, NUM_COMM_SMS=16, TILE_MAP_LEVEL=True,
            user_gemm_config=user_config,
        )  # fmt: skip
        x, weight, bias = next(generate_data(entries))
        dist.broadcast(bias, 0)
        product = x @ weight.T
        assert_allclose(layer.forward_gemm(x, weight), product, rtol=1e-2, atol=1e-2)
        whole = product.float()
        dist.all_reduce(whole)
        nvshmem_barrier_all_on_stream()
        with some_configs(gemm_ar, most=2), some_configs(all_reduce, most=2):
            total = layer.forward(x, weight, bias, None, None)
            reduced = layer.forward_ar(product)
        assert_allclose(total, (whole + bias).half(), rtol=1e-2, atol=1e-2)
        assert_allclose(reduced, whole.half(), rtol=1e-2, atol=1e-2)
        count += 3
        refused = scripts_mistakes(layer, x, weight)
        layer.finalize()
        layer.finalize()
    return count, refused


def scripts_mistakes(layer: GemmARLayer, x: torch.Tensor, weight: torch.Tensor) -> list[str]:
    group, dtype, scale = dist.group.WORLD, x.dtype, torch.ones(9)
    seen = []
    for call in (
        lambda: layer(x, weight, None, scale),
        lambda: layer.forward_gemm(x, weight, None, None, scale),
        lambda: GemmARLayer(group, 9, 40, 128, torch.int8, dtype),
        lambda: GemmARLayer(group, 9, 40, 128, torch.int8, torch.int8),
        lambda: GemmARLayer(group, 9, 40, 129, dtype, dtype),
    ):
        try:
            call()
        except InvalidArgument as error:
            seen.append(str(error))
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_a_linear_layer(on_ranks, world_size):
    calls = on_ranks(world_size)(as_a_linear_layer, env=FIRST_CONFIG)
    assert calls == [10] * world_size


def test_its_state_is_saved_and_loaded(on_two_ranks):
    saved = on_two_ranks(by_a_state_dict)
    assert saved == [["weight", "bias"]] * 2


def test_mistakes_are_said(on_two_ranks):
    starts = (
        "GemmARLayer: K is 15, expected a positive multiple of the group's size 2",
        "create_gemm_ar_context: max_M is 0, expected at least 1",
        "load_weight: weight.shape is (16, 8), expected [N, K] = (16, 16)",
        "load_weight: bias is ",
        "gemm_ar: M is 5, expected at most the context's max_M = 4",
        "GemmARLayer: weight is None, expected a tensor [N, K_per_rank]",
        "load_weight: self is 'GemmARLayer', expected has_weight=True",
    )
    for seen in on_two_ranks(mistakes):
        assert len(seen) == len(starts)
        assert all(map(str.startswith, seen, starts))


def test_as_scripts_call_it(spawn_ranks):
    starts = (
        "GemmARLayer: scale_a is (9,), expected None: products of int8 and fp8 are not supported",
        "GemmARLayer: scale_b is (9,), expected None",
        "GemmARLayer: output_dtype is torch.float16, expected input_dtype, torch.int8",
        "create_gemm_ar_context: output_dtype is torch.int8, expected ",
        "GemmARLayer: K is 129, expected a positive multiple of the group's size 2",
    )
    for count, refused in spawn_ranks(2, as_scripts_call_it):
        assert count == 9
        assert len(refused) == len(starts)
        assert all(map(str.startswith, refused, starts)), refused
