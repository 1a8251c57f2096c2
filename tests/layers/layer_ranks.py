"""What every rank does in the tests of the tensor-parallel layers."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.layers.functional_ranks import drawn, part
from triton_dist.errors import InvalidArgument, TritonDistWarning
from triton_dist.kernels.nvidia import gemm_ar
from triton_dist.layers.nvidia import (
    TP_MLP,
    Collectives,
    EP_MoE,
    TP_Attn,
    TP_MoE,
    TrainingState,
    gather_state_dict,
    parallelize,
    sum_gradients,
)
from triton_dist.layers.nvidia.tp_attn import _set_cos_sin_cache
from triton_dist.models.kv_cache import KV_Cache
from triton_dist.models.llama import MLP, Llama, LlamaConfig, Output
from triton_dist.runtime.device import current_device
from triton_dist.testing.timing import capture_graph

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 24,
    "moe_intermediate_size": 24, "head_dim": 8, "qk_norm": True,
}  # fmt: skip


def model(**sizes: Any) -> Llama:
    """The same on all ranks."""
    torch.manual_seed(0)
    made = Llama(LlamaConfig(**{**SIZES, **sizes})).to(current_device().torch_device)
    for name, parameter in made.named_parameters():
        if name.endswith("norm.weight"):  # ones would hide one that is not used
            parameter.data.uniform_(0.5, 1.5)
    return made


def token_ids(batch: int, tokens: int) -> torch.Tensor:
    made = torch.randint(24, (batch, tokens), generator=torch.Generator().manual_seed(1))
    return made.to(current_device().torch_device)


def loss_of(output: Output, targets: torch.Tensor) -> torch.Tensor:
    """The sum over tokens, so that ranks' sums of their own add up."""
    logits, targets = output.logits.flatten(0, -2), targets.flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def shard_of(layer: Any, name: str, whole: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """This rank's share of a gradient of a stock weight."""
    if name in ("o_proj", "down_proj"):
        return part(whole, ranks, 1)
    if name in ("k_proj", "v_proj"):
        return whole.chunk(ranks.num_ranks // layer.kv_replicas, 0)[layer.kv_index]
    return part(whole, ranks, 0)


def training(kv_heads: int, is_spread: bool, num_experts: int = 0, rtol: float = 1e-4) -> int:
    """A step of a model that is shared out: loss, and all gradients, of the same model on one
    rank."""
    sizes = {"num_key_value_heads": kv_heads, "num_experts": num_experts}
    whole, shared = model(**sizes), model(**sizes)
    ids = token_ids(2, 5)
    loss = loss_of(whole(ids), ids)
    loss.backward()
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TritonDistWarning)
        ranks = parallelize(shared, max_M=10, sequence_parallel=is_spread, keep_gathered=True)
    if is_spread:
        own = loss_of(shared(ids, (ranks.rank, ranks.num_ranks)), part(ids.flatten(), ranks, 0))
        own.backward()
        found = ranks.all_reduce(own.detach().clone())
    else:
        found = loss_of(shared(ids), ids)
        found.backward()
    sum_gradients(shared)
    torch.testing.assert_close(found.detach(), loss.detach(), rtol=rtol, atol=rtol)
    attention, stock = shared.model.layers[0].self_attn, whole.model.layers[0].self_attn
    mlp, stock_mlp = shared.model.layers[0].mlp, whole.model.layers[0].mlp

    def shares(module: Any, *names: str) -> torch.Tensor:
        whole = ((name, getattr(module, name).weight.grad) for name in names)
        return torch.cat([shard_of(attention, name, grad, ranks) for name, grad in whole])

    pairs = [(attention.wqkv.grad, shares(stock, "q_proj", "k_proj", "v_proj"))]
    pairs.append((attention.wo.grad, shares(stock, "o_proj")))
    if num_experts:
        stacked = [
            torch.stack([shares(expert, *names).T for expert in stock_mlp.experts])
            for names in (("gate_proj", "up_proj"), ("down_proj",))
        ]
        pairs += zip((mlp.gate_up_proj.grad, mlp.down_proj.grad), stacked, strict=True)
        pairs.append((mlp.gate.grad, stock_mlp.gate.weight.grad))
    else:
        pairs.append((mlp.gate_up_proj.grad, shares(stock_mlp, "gate_proj", "up_proj")))
        pairs.append((mlp.down_proj.grad, shares(stock_mlp, "down_proj")))
    kept = dict(shared.named_parameters())
    for name, parameter in whole.named_parameters():
        if name in kept:
            pairs.append((kept[name].grad, parameter.grad))
    for one, other in pairs:
        assert one is not None
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)
        count += 1
    ranks.finalize()
    return count


def compiled(backend: str, mode: str | None = None, is_quick: bool = False) -> int:
    """Models in one graph each, dense and spread, and of experts: losses and gradients of eager
    mode, for two numbers of tokens; and a forward without gradients. Quick: the first model and
    number."""
    torch.compiler.reset()
    count = 0
    for is_spread, num_experts in ((True, 0), (False, 4))[: 1 if is_quick else None]:
        shared = model(num_experts=num_experts)
        ranks = parallelize(shared, max_M=12, sequence_parallel=is_spread)
        shard = (ranks.rank, ranks.num_ranks) if is_spread else (0, 1)
        fast = torch.compile(shared, fullgraph=True, backend=backend, mode=mode)
        for tokens in (5,) if is_quick else (5, 6):
            ids, results = token_ids(2, tokens), []
            targets = ids.flatten().chunk(shard[1])[shard[0]]
            for module in (fast, shared):
                shared.zero_grad()
                loss = loss_of(module(ids, shard), targets)
                loss.backward()
                grads = [parameter.grad.clone() for parameter in shared.parameters()]
                results.append([loss.detach().clone(), *grads])
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
                count += 1
        if not is_quick:
            with torch.no_grad():
                found, wanted = fast(ids, shard).logits, shared(ids, shard).logits
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        ranks.finalize()
    return count


def each_in_one_graph() -> list[str]:
    """Compare compiled layers of experts with eager mode, without graph breaks, and gradients of
    the first. ``compiled`` and ``fp8_ranks.served`` compile the other layers."""
    torch.compiler.reset()
    done = []
    rows = part(drawn(1, 8, 32), Collectives(), 0)
    experts = model(num_experts=4).model.layers[0].mlp
    for kind in (TP_MoE, EP_MoE):
        layer = kind(sequence_parallel=True)
        layer._init_parameters(experts)
        layer._init_ctx(8)
        is_trained = kind is TP_MoE
        backend = "aot_eager" if is_trained else "eager"
        fast, found = torch.compile(layer, fullgraph=True, backend=backend), []
        for each in (fast, layer):
            x = rows.detach().clone().requires_grad_(is_trained)
            y, gradients = each(x), ()
            if is_trained:
                gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
            found.append([y.detach(), *gradients])
        assert len(found[0]) == (5 if is_trained else 1)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        assert gather_state_dict(fast).keys() == layer.state_dict().keys()
        assert TrainingState(fast).model is layer
        done.append(kind.__name__)
        layer.finalize()
    return done


def call_forms() -> int:
    """The feed-forward layer as scripts call it, in both modes, of any leading dimensions."""
    torch.manual_seed(0)
    stock = MLP(32, 48).to(current_device().torch_device)
    layer = TP_MLP(rank=dist.get_rank(), world_size=dist.get_world_size(), group=dist.group.WORLD)
    layer._init_parameters(stock, verbose=True)
    layer._init_ctx(
        max_M=12, ag_intranode_stream=None, ag_internode_stream=None, BLOCK_M=128, stages=3
    )
    x, count = drawn(1, 2, 6, 32), 0
    with torch.no_grad():
        golden = stock(x)
    own = part(x.flatten(0, 1), layer.torch_collectives, 0)
    rows = layer.torch_ag_gemm(own)
    hidden = torch.nn.functional.silu(rows.chunk(2, -1)[0]) * rows.chunk(2, -1)[1]
    golden_rows = part(golden.flatten(0, 1), layer.torch_collectives, 0)
    for found, wanted in (
        (layer.torch_fwd(x), golden),
        (layer.dist_triton_fwd(own, ag_gemm_persistent=True, autotune=True), golden_rows),
        (layer.dist_triton_AR_fwd(x), golden),
        (layer.dist_triton_gemm_ar_fwd(x[0, :1]), golden[0, :1]),
        (layer.dist_triton_ag_gemm(own, persistent=True, autotune=True), rows),
        (layer.dist_triton_gemm_rs(hidden), golden_rows),
        (layer.torch_gemm_rs(hidden), golden_rows),
    ):
        assert not found.requires_grad
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        count += 1
    layer.finalize()
    layer.finalize()
    return count


class Stacked(torch.nn.Module):
    """The same experts in two tensors, with ``top_k`` at the gate."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.gate, self.experts = torch.nn.Module(), torch.nn.Module()
        self.gate.weight, self.gate.top_k = stock.gate.weight, stock.top_k
        both = [torch.cat([e.gate_proj.weight, e.up_proj.weight]) for e in stock.experts]
        down = [expert.down_proj.weight for expert in stock.experts]
        self.experts.gate_up_proj = torch.nn.Parameter(torch.stack(both))
        self.experts.down_proj = torch.nn.Parameter(torch.stack(down))
        self.experts.act_fn = stock.experts[0].act_fn


def experts_call_forms() -> int:
    """The experts as scripts call them, in both modes."""
    stock = model(num_experts=5).model.layers[0].mlp
    layer = TP_MoE(rank=dist.get_rank(), world_size=dist.get_world_size(), autotune=True)
    layer._init_parameters(stock, verbose=True)
    layer._init_ctx(M=12)
    stacked = TP_MoE()
    stacked._init_parameters(Stacked(stock))
    for one, other in zip(layer.parameters(), stacked.parameters(), strict=True):
        assert torch.equal(one, other)
    x, count = drawn(1, 4, 3, 32), 0
    with torch.no_grad():
        golden, _ = stock(x)
    for name in ("torch_fwd", "torch_fwd_no_loop", "dist_triton_fwd", "dist_triton_AR_fwd"):
        rows, wanted = x, golden
        if name == "dist_triton_fwd":
            rows, wanted = (
                part(x, layer.torch_collectives, 0),
                part(golden, layer.torch_collectives, 0),
            )
        torch.testing.assert_close(getattr(layer, name)(rows), wanted, rtol=1e-4, atol=1e-4)
        count += 1
    layer.finalize()
    return count


def with_a_cache(kv_heads: int = 2) -> int:
    """Prefill, then decode, of sequences of several lengths: what the stock layer gives for the
    whole sequence."""
    size = dist.get_world_size()
    whole = model(num_key_value_heads=kv_heads)
    stock, rotary = whole.model.layers[0].self_attn, whole.model.rotary_emb
    layer = TP_Attn(group=dist.group.WORLD)
    layer._init_parameters(stock)
    layer._init_ctx(8)
    x, first = drawn(1, 2, 5, 32), 3
    with torch.no_grad():
        positions = torch.arange(5, device=x.device)
        golden = stock(x, rotary(positions, x.dtype))[0]
    cos_sin = _set_cos_sin_cache(rotary.inv_freq, 8)
    count = 0
    for name in ("torch_fwd", "dist_triton_fwd", "dist_triton_AR_fwd", "dist_triton_gemm_ar_fwd"):
        forward = getattr(layer, name)
        is_spread = name == "dist_triton_fwd"
        cache = KV_Cache(1, 2, 8, kv_heads, 8, torch.float32, size)
        cache.rand_fill_kv_cache(8)  # nobody must see what lies behind
        for begin, end in ((0, first), (first, first + 1), (first + 1, 5)):
            at = positions[None, begin:end].expand(2, -1)
            rows, wanted = x[:, begin:end], golden[:, begin:end]
            if is_spread:
                rows, wanted = (
                    part(rows, layer.torch_collectives, 0),
                    part(wanted, layer.torch_collectives, 0),
                )
            found = forward(rows.contiguous(), at, cos_sin, cache, layer_idx=0)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            cache.inc_offset(end - begin)
            count += 1
    layer.finalize()
    return count


def shared_twice() -> tuple[int, int]:
    """Layers and parameters of a module whose two places have one feed-forward layer."""
    twice = MLP(32, 48).to(current_device().torch_device)
    net = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"mlp": twice}), "b": twice})
    with parallelize(net, max_M=4):
        layers = [each for each in net.modules() if isinstance(each, TP_MLP)]
        assert net["b"] is layers[0]
        return len(layers), len(list(net.parameters()))


def two_replicas() -> int:
    """Tokens that this rank's replica was called with, tuned without the other one."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    net = torch.nn.Sequential(MLP(32, 48)).to(current_device().torch_device)
    two = type(gemm_ar.config_space)(gemm_ar.config_space[:2])
    with mock.patch.object(gemm_ar, "config_space", two), parallelize(net, pairs[mine], max_M=64):
        return len(net(drawn(1, (6, 40)[mine], 32)))


class DynamicCache:
    """What was seen, as a cache of transformers keeps it."""

    def __init__(self) -> None:
        self.seen: tuple[torch.Tensor, ...] = ()

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, ...]:
        new = (k, v)
        if self.seen:
            new = tuple(torch.cat(each, 2) for each in zip(self.seen, new, strict=True))
        self.seen = new
        return new


def caches_of_every_name() -> int:
    """The last of four tokens, after three that a cache holds, by each name of the cache."""
    shared = model()
    with parallelize(shared, max_M=4), torch.no_grad():
        attention, x = shared.model.layers[0].self_attn, drawn(1, 1, 4, 32)
        cos_sin = shared.model.rotary_emb(torch.arange(4, device=x.device), x.dtype)
        whole, _ = attention(x, cos_sin)
        names = ("past_key_values", "past_key_value", "cache")
        for name in names:
            cache = DynamicCache()
            for rows in (slice(0, 3), slice(3, 4)):
                at = tuple(each[:, rows] for each in cos_sin)
                found, _ = attention(x[:, rows], at, **{name: cache})
            torch.testing.assert_close(found, whole[:, 3:], rtol=1e-4, atol=1e-5)
    return len(names)


class Around(torch.nn.Module):
    """An adapter that shows the weight of the layer inside."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base(x)


class Adapted(torch.nn.Linear):
    """A linear layer with something beside its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def mistakes() -> list[str]:
    """Messages of what a caller can get wrong; the warning of heads that several ranks keep."""
    seen, size = [], dist.get_world_size()

    def refused(call: Callable[[], object], kind: type[Exception] = InvalidArgument) -> None:
        try:
            call()
        except kind as error:
            seen.append(str(error))

    layer, stock = TP_MLP(), MLP(32, 48)
    refused(lambda: TP_MLP(rank=size))
    refused(lambda: TP_MLP(world_size=size + 1))
    refused(lambda: layer._init_parameters(torch.nn.Linear(4, 4)))
    refused(lambda: layer._init_parameters(MLP(32, 49)))
    stock.up_proj = torch.nn.Linear(32, 50, bias=False)
    refused(lambda: layer._init_parameters(stock))
    stock.up_proj = torch.nn.Linear(32, 48, bias=True)
    refused(lambda: layer._init_parameters(stock))
    stock.up_proj = torch.nn.Linear(32, 48, bias=False, dtype=torch.float16)
    refused(lambda: layer._init_parameters(stock))
    quantised = MLP(32, 48)
    quantised.gate_proj.weight = torch.nn.Parameter(
        torch.zeros(48, 32).to(torch.float8_e4m3fn), requires_grad=False
    )
    refused(lambda: layer._init_parameters(quantised))
    refused(lambda: layer._init_parameters(MLP(32, 48).to("meta")))
    layer._init_parameters(MLP(32, 48).to(current_device().torch_device))
    x = drawn(1, 4, 32)
    refused(lambda: layer(x))
    layer._init_ctx(4)
    refused(lambda: layer(drawn(1, 5, 32)))
    refused(lambda: layer(x.half()))
    refused(lambda: layer(x.to(torch.int8)))
    refused(lambda: layer(x.to("meta")))
    layer.finalize()
    refused(lambda: parallelize(torch.nn.Linear(4, 4), max_M=4))
    refused(lambda: parallelize(model(num_experts=2).model.layers[0].mlp, max_M=4))
    broken = model(num_attention_heads=3)
    refused(lambda: parallelize(broken, max_M=4))
    assert type(broken.model.layers[0].mlp) is MLP, "nothing is changed"
    asking = model(num_experts=2)
    asking.model.config = types.SimpleNamespace(output_router_logits=True)
    refused(lambda: parallelize(asking, max_M=4))
    assert type(asking.model.layers[0].self_attn).__name__ != "TP_Attn", "nothing is changed"
    asked = model(num_experts=2)
    with parallelize(asked, max_M=4):
        refused(lambda: asked(torch.zeros(1, 4, dtype=torch.int64), output_router_logits=True))
    for heads in ({"num_attention_heads": 3}, {"num_key_value_heads": 3}):
        attention = model(**heads).model.layers[0].self_attn
        refused(functools.partial(TP_Attn()._init_parameters, attention))
    refused(lambda: KV_Cache(kv_heads=3, world_size=2, max_length=1))
    experts = model(num_experts=2).model.layers[0].mlp
    experts.experts[1].down_proj = torch.nn.Linear(26, 32, bias=False)
    refused(lambda: TP_MoE()._init_parameters(experts))
    experts.shared_expert = stock
    refused(lambda: TP_MoE()._init_parameters(experts))
    attention = model().model.layers[0].self_attn
    for name, value in (("head_dim", 7), ("attention_dropout", 0.5), ("is_causal", False)):
        setattr(attention, name, value)
        refused(functools.partial(TP_Attn()._init_parameters, attention))
        setattr(attention, name, {"head_dim": 8, "attention_dropout": 0.0}.get(name, True))
    attention.q_norm = torch.nn.RMSNorm(32)
    refused(functools.partial(TP_Attn()._init_parameters, attention))
    router = model(num_experts=2).model.layers[0].mlp
    router.gate.bias = torch.nn.Parameter(torch.zeros(2))
    refused(lambda: TP_MoE()._init_parameters(router))
    adapted = MLP(32, 48)
    adapted.up_proj = Adapted(32, 48, bias=False)
    refused(lambda: TP_MLP()._init_parameters(adapted))
    adapted.up_proj = Around(torch.nn.Linear(32, 48, bias=False))
    refused(lambda: TP_MLP()._init_parameters(adapted))
    watched = model()
    watched.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda *_: None)
    refused(lambda: parallelize(watched, max_M=4))
    assert type(watched.model.layers[0].mlp) is MLP, "nothing is changed"
    cos_sin = (drawn(1, 4, 8), drawn(1, 4, 8))
    refused(lambda: TP_Attn()(drawn(1, 1, 4, 32), cos_sin, mask=torch.zeros(4, 4)))
    refused(lambda: TP_Attn()(drawn(1, 1, 4, 32), cos_sin, past=DynamicCache()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TP_Attn()._init_parameters(model(num_key_value_heads=1).model.layers[0].self_attn)
    seen.extend(str(each.message) for each in caught)
    return seen


def a_step(shared: Any, x: torch.Tensor, cache: Any, cos_sin: torch.Tensor) -> torch.Tensor:
    """Decode one token of each sequence by the first block, in all-reduce mode."""
    block = shared.model.layers[0]
    positions = cache.kv_offset[:, None].long()
    attention = block.self_attn.dist_triton_gemm_ar_fwd
    h = x + attention(block.input_layernorm(x), positions, cos_sin, cache, 0)
    return h + block.mlp.dist_triton_gemm_ar_fwd(block.post_attention_layernorm(h))


def steps_in_a_graph(dtype: torch.dtype, steps: int = 6) -> int:
    """A decode step captured once and replayed: at each step, what an eager one gives, with fresh
    inputs and a cache that grows."""
    shared = model(num_key_value_heads=2).to(dtype)
    inv_freq = shared.model.rotary_emb.inv_freq.float()
    with parallelize(shared, max_M=4) as ranks:
        caches = [KV_Cache(1, 4, 16, 2, 8, dtype, ranks.num_ranks) for _ in range(2)]
        cos_sin, x = _set_cos_sin_cache(inv_freq, 16), drawn(1, 4, 1, 32, dtype=dtype)
        found: list[torch.Tensor] = []

        def step() -> None:
            found[:] = [a_step(shared, x, caches[0], cos_sin)]

        with torch.no_grad():
            replay = capture_graph(step)
            caches[0].clear()
            for number in range(steps):
                x.copy_(drawn(2 + number, 4, 1, 32, dtype=dtype))
                replay()
                wanted = a_step(shared, x, caches[1], cos_sin)
                torch.testing.assert_close(found[0], wanted, rtol=1e-2, atol=1e-2)
                for cache in caches:
                    cache.inc_offset()
        del replay  # a graph ends before its contexts
        found.clear()
    return steps


def compiled_steps(steps: int = 6) -> int:
    """A feed-forward layer compiled with ``mode="reduce-overhead"``, whose CUDA graphs replay."""
    torch.compiler.reset()
    shared = model()
    with parallelize(shared, max_M=4) as ranks, torch.no_grad():
        layer = shared.model.layers[0].mlp
        fast = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        for number in range(steps):
            x = drawn(number, 4, 32)
            wanted = layer(x)
            torch.testing.assert_close(fast(x), wanted, rtol=1e-4, atol=1e-4)
        current_device().synchronize()
        torch.compiler.reset()  # graphs end before their contexts
        assert ranks.num_ranks == dist.get_world_size()
    return steps


def large_layers(tokens: int, hidden: int, columns: int) -> dict[str, float]:
    """bf16, sizes of a model: the largest difference from products in fp32, of the largest value;
    forward, and gradients of x and of weights."""
    torch.manual_seed(0)
    stock = MLP(hidden, columns).to(current_device().torch_device).bfloat16()
    apart, whole = {}, drawn(1, tokens, hidden, dtype=torch.bfloat16)
    reference = MLP(hidden, columns).to(whole.device)
    reference.load_state_dict(stock.state_dict())
    leaf = whole.float().requires_grad_()
    y = reference(leaf)
    y.sum().backward()
    for is_spread in (True, False):
        layer = TP_MLP(sequence_parallel=is_spread, keep_gathered=is_spread)
        layer._init_parameters(stock)
        layer._init_ctx(tokens)
        ranks = layer.torch_collectives
        x = (part(whole, ranks, 0) if is_spread else whole).clone().requires_grad_()
        out = layer(x)
        out.sum().backward()
        down = part(reference.down_proj.weight.grad, ranks, 1)
        for name, one, other in (
            ("y", out, part(y, ranks, 0) if is_spread else y),
            ("dx", x.grad, part(leaf.grad, ranks, 0) if is_spread else leaf.grad),
            ("dW", layer.down_proj.grad, down),
        ):
            difference = (one.detach().float() - other.detach()).abs().max()
            apart[f"{name} {is_spread}"] = float(difference / other.detach().abs().max())
        layer.finalize()
    return apart
