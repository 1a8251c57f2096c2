"""What every rank does in the tests of layers."""

from __future__ import annotations

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia import GEMMARLayer
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import assert_allclose


def as_a_linear_layer() -> int:
    """Any leading dimensions, with and without a bias, against the whole layer on one rank."""
    ranks, device = group_for(), current_device().torch_device
    torch.manual_seed(0)
    weight = (torch.rand(40, 48) - 0.5).half().to(device)
    count = 0
    for has_bias in (True, False):
        bias = torch.rand(40).half().to(device) if has_bias else None
        with GEMMARLayer(None, 30, 40, 48, torch.float16, bias=has_bias) as layer:
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


def by_a_state_dict() -> list[str]:
    """Names of what is saved; another layer that loads it gives the same."""
    with GEMMARLayer(None, 4, 16, 16, torch.float32, bias=True) as first:
        first.load_weight(torch.rand(16, 16), torch.rand(16))
        with GEMMARLayer(None, 4, 16, 16, torch.float32, bias=True) as second:
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

    refused(lambda: GEMMARLayer(None, 4, 16, 15))
    refused(lambda: GEMMARLayer(None, 0, 16, 16))
    with GEMMARLayer(None, 4, 16, 16, torch.float32) as layer:
        refused(lambda: layer.load_weight(torch.rand(16, 8)))
        refused(lambda: layer.load_weight(torch.rand(16, 16), torch.rand(16)))
        refused(lambda: layer(torch.rand(5, layer.K_per_rank)))
    return seen
