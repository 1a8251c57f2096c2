"""What every rank does in the tests of layers with fp8 weights."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.fp8 import quantised_experts
from tests.layers.functional_ranks import drawn, part
from tests.layers.layer_ranks import model, token_ids
from triton_dist.errors import InvalidArgument, TritonDistWarning
from triton_dist.layers.nvidia import TP_MLP, EP_MoE, TP_Attn, TP_MoE
from triton_dist.layers.nvidia.fp8 import E4M3
from triton_dist.models import LLM, ModelConfig
from triton_dist.models.llama import MLP, RotaryEmbedding
from triton_dist.testing.timing import capture_graph


class Fp8Linear(torch.nn.Linear):
    """A linear layer as an fp8 checkpoint stores it, which multiplies in fp32.

    ``recipe``: ``block``, ``row``, ``tensor``, or ``static``, which has a scale of the input too.
    """

    def __init__(self, stock: torch.nn.Linear, recipe: str) -> None:
        super().__init__(stock.in_features, stock.out_features, bias=False)
        whole = stock.weight.detach()
        kind = "tensor" if recipe == "static" else recipe
        _, weight, scales = quantised_experts(whole[:1], whole[None], kind)
        self.weight = torch.nn.Parameter(weight[0].mT.contiguous(), requires_grad=False)
        self.end = "weight_scale_inv" if recipe == "block" else "weight_scale"
        scale = scales["B_scale"] if kind == "tensor" else scales["B_scale"][0]
        setattr(self, self.end, torch.nn.Parameter(scale, requires_grad=False))
        if recipe == "static":
            self.input_scale = torch.nn.Parameter(torch.tensor(0.02, device=whole.device))
        if stock.bias is not None:
            self.bias = stock.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = getattr(self, self.end)
        if self.end == "weight_scale_inv":
            scale = scale.repeat_interleave(128, 0)[: self.out_features]
            scale = scale.repeat_interleave(128, 1)[:, : self.in_features]
        return torch.nn.functional.linear(x, self.weight.float() * scale, self.bias)


def in_fp8(module: Any, recipe: str) -> Any:
    """The same module, whose linear layers are fp8, except a router."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear) and name != "gate":
            setattr(module, name, Fp8Linear(child, recipe))
        else:
            in_fp8(child, recipe)
    return module


def stock_of(kind: type, recipe: str, columns: int, **sizes: Any) -> Any:
    """A stock module of fp8 weights; ``columns`` of a feed-forward layer or an expert."""
    hidden = 136 if recipe == "block" else 32  # also a partial block
    sizes |= {"hidden_size": hidden, "moe_intermediate_size": columns}
    num_experts = {TP_MoE: 3, EP_MoE: 4}.get(kind, 0)
    sizes |= {"intermediate_size": columns, "num_experts": num_experts}
    if kind is TP_Attn and recipe == "block":
        sizes = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, **sizes}
    stock = model(**sizes).model.layers[0]
    if kind is EP_MoE:
        stock.mlp.shared_experts = MLP(hidden, columns).to(stock.mlp.gate.weight.device)
        stock.mlp.register_forward_hook(add_shared)
    if kind is TP_Attn:
        bias = drawn(4, stock.self_attn.q_proj.out_features)
        for name in "qkv":
            linear = getattr(stock.self_attn, f"{name}_proj")
            linear.bias = torch.nn.Parameter(bias[: linear.out_features])
    return in_fp8(stock.self_attn if kind is TP_Attn else stock.mlp, recipe)


def add_shared(stock: Any, args: Any, out: Any) -> torch.Tensor:
    y = out[0] if isinstance(out, tuple) else out
    return y + stock.shared_experts(args[0])


@mock.patch.dict("os.environ", TRITON_DIST_AUTOTUNE="0")  # tests of the ops try all configs
def served(kind: type, recipe: str, columns: int, compiles: bool = True, **options: int) -> int:
    """Both modes, and the layer's torch products, against the stock module.

    The input of a product is rounded to 4 bits, so each addend errs by at most 1/16 of itself. The
    errors have random signs: compare norms.
    """
    stock = stock_of(kind, recipe, columns)
    layer = kind(sequence_parallel=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TritonDistWarning)  # of heads that ranks replicate
        layer._init_parameters(stock)
    size = layer.world_size
    layer._init_ctx(max_M=8)
    linear = next(each for each in stock.modules() if isinstance(each, Fp8Linear))
    x, rest = drawn(1, 2, 4, linear.in_features), ()
    if kind is TP_Attn:
        positions = RotaryEmbedding(stock.head_dim, 1e4)(torch.arange(4), x.dtype)
        rest = (tuple(each.to(x.device) for each in positions),)

    @torch.no_grad()
    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        y = module(x, *rest)
        return y[0] if isinstance(y, tuple) else y

    golden = run(stock, x)
    saved = {name: weight.clone() for name, weight in layer.state_dict().items()}
    assert saved.keys() == stock.state_dict().keys()
    for name, weight in stock.state_dict().items():
        assert saved[name].dtype == weight.dtype, name
        assert torch.equal(saved[name].float().cpu(), weight.float().cpu()), name
    found, own_collectives = {"AR": run(layer, x)}, layer.collectives
    layer.sequence_parallel = True
    rows = run(layer, part(x.flatten(0, 1), layer.torch_collectives, 0))
    assert len(rows) == 8 // size
    found["RS"] = layer.torch_collectives.all_gather(rows).view_as(x)
    layer.sequence_parallel, layer.collectives = False, layer.torch_collectives
    found["torch"] = run(layer, x)
    layer.collectives = own_collectives
    # Tensor cores sum fp8 products with few bits, which changes some roundings of activations.
    close = 2e-2 if x.is_cuda else 1e-3
    for name, y in found.items():
        assert (y - golden).norm() <= 0.06 * golden.norm(), name
        error = (y - found["torch"]).norm() / golden.norm()
        assert error <= close, (name, error)
    for name, parameter in layer.named_parameters():
        if name != "gate" and "norm" not in name and not name.startswith("b"):
            assert not parameter.requires_grad, name
            parameter.data.zero_()
    layer.load_state_dict(saved)
    if compiles:
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(run(compiled, x), found["AR"])
    other, y = drawn(7, *x.shape), torch.empty_like(x)
    fixed = x.clone()
    step = capture_graph(lambda: y.copy_(run(layer, fixed)))
    fixed.copy_(other)
    step()
    assert torch.equal(y, run(layer, other))
    with pytest.raises(InvalidArgument, match="no backward"):
        layer.forward(x.clone().requires_grad_(), *rest)
    if kind not in (TP_MoE, EP_MoE):
        with pytest.raises(InvalidArgument, match=r"x\.shape"):
            run(layer, x[..., 1:])
    with pytest.raises(RuntimeError, match="not converted"):
        layer.load_state_dict({name: weight.float() for name, weight in saved.items()})
    del step
    layer.finalize()
    return len(found)


@mock.patch.dict("os.environ", TRITON_DIST_AUTOTUNE="0")
def loaded(folder: Path, recipe: str) -> list[float]:
    """Load a folder with fp8 weights: the errors of a prefill and of a step, relative to the model.

    Rank 0 writes the folder."""
    sizes = {"hidden_size": 64, "num_experts": 2 if recipe == "block" else 0}
    sizes |= {"head_dim": 64, "num_key_value_heads": 4, "moe_intermediate_size": 136}
    whole = model(**sizes)
    in_fp8(whole.model, recipe)
    if dist.get_rank() == 0:
        whole.config.save(folder)
        settings = json.loads((folder / "config.json").read_text())
        settings["quantization_config"] = {"quant_method": "fp8"}
        (folder / "config.json").write_text(json.dumps(settings))
        state = {name: weight.contiguous() for name, weight in whole.state_dict().items()}
        importlib.import_module("safetensors.torch").save_file(state, folder / "model.safetensors")
    dist.barrier()
    size = dist.get_world_size()
    llm = LLM(ModelConfig(str(folder), 8, torch.float32, rank=dist.get_rank(), world_size=size))
    state, expected = llm.model.state_dict(), whole.state_dict()
    assert {name: str(each.dtype) for name, each in state.items()} == {
        name: str(each.dtype) for name, each in expected.items()
    }
    ids, at = token_ids(2, 4), torch.arange(4, device=llm.cos_sin_cache.device).expand(2, -1)
    with torch.no_grad():
        golden = whole(ids).logits
    llm.init_triton_dist_ctx(max_M=6)
    cache, errors = llm.new_cache(2), []
    for mode, begin, end in (("triton_dist", 0, 3), ("triton_dist_AR", 3, 4)):
        llm.set_fwd(mode)
        rows, wanted = ids[:, begin:end], golden[:, end - 1 : end]
        if mode == "triton_dist":
            rows, wanted = part(rows, llm.collectives, 0), part(wanted, llm.collectives, 0)
        found = llm.inference(rows, at[:, begin:end], cache)
        errors.append(float((found - wanted).norm() / wanted.norm()))
        cache.inc_offset(end - begin)
    llm.finalize()
    return errors


def refused() -> None:
    """Heads that split a block, and weights with different scales."""
    with pytest.raises(InvalidArgument, match=r"k_proj per rank is .*with zeros to 2 heads"):
        TP_Attn()._init_parameters(
            stock_of(TP_Attn, "block", 8, num_attention_heads=8, num_key_value_heads=2)
        )
    for kind in (TP_MoE, TP_MLP):
        stock = stock_of(kind, "row", 32)
        up = (stock.experts[1] if kind is TP_MoE else stock).up_proj
        up.weight_scale_inv = torch.ones(1, 2)
        with pytest.raises(InvalidArgument, match="equal names and shapes of scales"):
            kind()._init_parameters(stock)
        del up.weight_scale_inv, up.weight_scale
        with pytest.raises(InvalidArgument, match="up_proj"):
            kind()._init_parameters(stock)
        assert up.weight.dtype is E4M3
