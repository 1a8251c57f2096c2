"""What every rank does in the tests of layers with fp8 weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.layers.functional_ranks import drawn, part
from tests.layers.layer_ranks import model
from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia import TP_MoE
from triton_dist.layers.nvidia.fp8 import FP8
from triton_dist.testing.opinfo.scaled import quantised_experts


class Fp8Linear(torch.nn.Linear):
    """A linear layer as an fp8 checkpoint stores it, which multiplies in fp32."""

    def __init__(self, stock: torch.nn.Linear, recipe: str) -> None:
        super().__init__(stock.in_features, stock.out_features, bias=False)
        whole = stock.weight.detach()
        _, weight, scales = quantised_experts(whole[:1], whole[None], recipe)
        self.weight = torch.nn.Parameter(weight[0].mT.contiguous(), requires_grad=False)
        self.end = "weight_scale_inv" if recipe == "block" else "weight_scale"
        setattr(self, self.end, torch.nn.Parameter(scales["B_scale"][0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = getattr(self, self.end)
        if self.end == "weight_scale_inv":
            scale = scale.repeat_interleave(128, 0)[: self.out_features]
            scale = scale.repeat_interleave(128, 1)[:, : self.in_features]
        return x @ (self.weight.float() * scale).T


def experts(recipe: str, columns: int) -> Any:
    """A stock mixture of experts whose weights are fp8."""
    hidden = 136 if recipe == "block" else 32  # also a partial block
    sizes = {"num_experts": 3, "hidden_size": hidden, "moe_intermediate_size": columns}
    stock = model(**sizes).model.layers[0].mlp
    for expert in stock.experts:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(expert, name, Fp8Linear(getattr(expert, name), recipe))
    return stock


def served(recipe: str, columns: int) -> int:
    """Both modes, and the layer's torch products, against the stock module.

    The input of a product is rounded to 4 bits, so each addend errs by at most 1/16 of itself. The
    errors have random signs: compare norms.
    """
    stock = experts(recipe, columns)
    layer = TP_MoE()
    layer._init_parameters(stock)
    layer._init_ctx(max_M=6)
    x = drawn(1, 2, 3, stock.gate.in_features)
    with torch.no_grad():
        golden, _ = stock(x)
    saved = {name: weight.clone() for name, weight in layer.state_dict().items()}
    assert saved.keys() == stock.state_dict().keys()
    for name, weight in stock.state_dict().items():
        assert saved[name].dtype == weight.dtype, name
        assert torch.equal(saved[name].float().cpu(), weight.float().cpu()), name
    found = {"torch_fwd": layer.torch_fwd(x), "dist_triton_AR_fwd": layer.dist_triton_AR_fwd(x)}
    own = part(x.flatten(0, 1), layer.torch_ranks, 0)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, layer.dist_triton_fwd(own))
    found["dist_triton_fwd"] = torch.cat(rows).view_as(x)
    for name, y in found.items():
        assert (y - golden).norm() <= 0.06 * golden.norm(), name
        torch.testing.assert_close(y, found["torch_fwd"], rtol=1e-3, atol=1e-3)
    for parameter in layer.parameters():
        if parameter is not layer.gate:
            assert not parameter.requires_grad
            torch.nn.init.zeros_(parameter.data.view(torch.uint8))
    assert layer.torch_fwd(x).norm() == 0
    layer.load_state_dict(saved)
    assert torch.equal(layer.dist_triton_AR_fwd(x), found["dist_triton_AR_fwd"])
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), found["dist_triton_AR_fwd"])
    with pytest.raises(InvalidArgument, match="no backward"):
        layer.forward(x.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="not converted"):
        layer.load_state_dict({name: weight.float() for name, weight in saved.items()})
    layer.finalize()
    return len(found)


def refused() -> None:
    """Shards that split a block, and experts with different scales."""
    if dist.get_world_size() > 1:
        with pytest.raises(InvalidArgument, match="with zeros to 512"):
            TP_MoE()._init_parameters(experts("block", 384))
    stock = experts("row", 32)
    stock.experts[1].up_proj.weight_scale_inv = torch.ones(1, 2)
    with pytest.raises(InvalidArgument, match="scales of one name"):
        TP_MoE()._init_parameters(stock)
    stock = experts("row", 32)
    del stock.experts[0].up_proj.weight_scale
    with pytest.raises(InvalidArgument, match=r"experts\.0\.up_proj"):
        TP_MoE()._init_parameters(stock)
    assert stock.experts[0].up_proj.weight.dtype is FP8
