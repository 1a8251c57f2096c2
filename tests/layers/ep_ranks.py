"""Functions that every rank runs in the tests of expert-parallel layers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import silu

from tests.layers.functional_ranks import drawn, same
from tests.layers.layer_ranks import SIZES, Stacked, model
from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia import EP_MoE, TensorParallel, clip_grad_norm_, sum_gradients
from triton_dist.layers.nvidia.expert_parallel import ep_experts
from triton_dist.models.llama import MLP
from triton_dist.runtime.device import current_device
from triton_dist.testing.timing import capture_graph

EXPERTS, HIDDEN, COLUMNS = 12, 24, 16


def of_one_process(
    x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, gate_up: Any, down: Any
) -> torch.Tensor:
    """Return the sums over all experts, by a product for each route."""
    y = torch.zeros_like(x)
    for token, experts in enumerate(ids.tolist()):
        for choice, expert in enumerate(experts):
            if expert >= 0:
                gate, up = (x[token] @ gate_up[expert]).chunk(2)
                y = y.index_add(
                    0,
                    torch.tensor([token], device=x.device),
                    (scales[token, choice] * ((silu(gate) * up) @ down[expert]))[None],
                )
    return y


def check(found: list[Any], wanted: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Compare elements in fp32; norms in 16 bits, where sums of many addends cancel."""
    if dtype is torch.float32:
        same(found, wanted)
        return
    for one, other in zip(found, wanted, strict=True):
        difference = (one.float() - other).norm()
        assert difference <= 2e-2 * other.norm() + 1e-6, (one.shape, float(difference))


def random_routings(seed: int, rounds: int, dtype: torch.dtype = torch.float32) -> int:
    """Compare results and gradients with one process; return the number of checked tensors.

    Ranks have different numbers of tokens, one none in most rounds; a quarter of the ids is masked.
    """
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device().torch_device
    shared, count, limit = random.Random(seed), 0, 9
    own = EXPERTS // size
    with TensorParallel(limit * size) as ranks:
        for number in range(rounds):
            topk = shared.choice([1, 2, 4])
            counts = [shared.choice([0, 1, 5, 7]) for _ in range(size)]
            counts[shared.randrange(size)] = 7
            rng = random.Random(1000 * seed + number)
            rows = [
                [e if rng.random() < 0.75 else -1 for e in rng.sample(range(EXPERTS), topk)]
                for _ in range(sum(counts))
            ]
            ids = torch.tensor(rows, dtype=torch.int32, device=device).view(-1, topk)
            whole = [
                drawn(10 * number, len(ids), HIDDEN),
                drawn(10 * number + 1, len(ids), topk).abs(),
                drawn(2, EXPERTS, HIDDEN, 2 * COLUMNS) / 5,
                drawn(3, EXPERTS, COLUMNS, HIDDEN) / 4,
            ]
            mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
            parts = [mine, mine, *[slice(rank * own, (rank + 1) * own)] * 2]
            local = [each[part].clone() for each, part in zip(whole, parts, strict=True)]
            local = [each if n == 1 else each.to(dtype) for n, each in enumerate(local)]
            whole = [each.requires_grad_() for each in whole]
            golden = of_one_process(whole[0], ids, *whole[1:])
            weights = drawn(4, *golden.shape)
            (golden * weights).sum().backward()
            expected = [golden.detach()[mine], *(
                each.grad[part] for each, part in zip(whole, parts, strict=True)
            )]  # fmt: skip
            for keep in (False, True):
                leaves = [each.clone().requires_grad_() for each in local]
                y = ep_experts(
                    leaves[0], ids[mine], *leaves[1:], ranks, shared.choice([7, 9]),
                    keep_gathered=keep, exact_sizes=number % 2 == 1,
                )  # fmt: skip
                (y * weights[mine].to(dtype)).sum().backward()
                check([y, *(each.grad for each in leaves)], expected, dtype)
                count += len(expected)
            with torch.no_grad():
                y = ep_experts(local[0], ids[mine], *local[1:], ranks, 7)
            check([y], expected[:1], dtype)
    return count


class Router(torch.nn.Module):
    """DeepSeek-V3's router, by loops."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(experts, hidden))
        self.register_buffer("e_score_correction_bias", torch.randn(experts))
        self.top_k, self.num_group, self.topk_group = 3, 4, 2
        self.norm_topk_prob, self.routed_scaling_factor = True, 2.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weight of each expert, [tokens, experts]; 0 if it is not chosen."""
        scores = (x @ self.weight.T).sigmoid()
        chosen = torch.zeros_like(scores)
        for token, score in enumerate((scores + self.e_score_correction_bias).tolist()):
            groups = [score[begin : begin + 3] for begin in range(0, 12, 3)]
            best = sorted(range(4), key=lambda g: -sum(sorted(groups[g])[-2:]))[:2]
            experts = [e for e in range(12) if e // 3 in best]
            chosen[token, sorted(experts, key=lambda e: -score[e])[:3]] = 1
        weights = scores * chosen
        return 2.5 * weights / weights.sum(1, keepdim=True)


class Mixture(torch.nn.Module):
    """Experts of DeepSeek-V3, with shared experts."""

    def __init__(self, has_gate: bool) -> None:
        super().__init__()
        self.gate = Router(12, SIZES["hidden_size"])
        self.experts = torch.nn.ModuleList(MLP(SIZES["hidden_size"], 16) for _ in range(12))
        self.has_gate = has_gate
        if has_gate:
            self.shared_expert = MLP(SIZES["hidden_size"], 8)
            self.shared_expert_gate = torch.nn.Linear(SIZES["hidden_size"], 1, bias=False)
        else:
            self.shared_experts = MLP(SIZES["hidden_size"], 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = sum(w[:, None] * e(x) for w, e in zip(self.gate(x).T, self.experts, strict=True))
        if self.has_gate:
            return y + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return y + self.shared_experts(x)


def stock_module(kind: str) -> Any:
    """Return a stock MoE module, equal on all ranks."""
    torch.manual_seed(0)
    if kind in ("qwen", "stacked"):
        return model(num_experts=12, num_experts_per_tok=2).model.layers[0].mlp
    return Mixture(kind == "gated").to(current_device().torch_device)


def layers_like_one_process(kind: str, column_shards: int = 1, rtol: float = 1e-4) -> int:
    """Compare a layer with its stock module: results, gradients, their norm, and saved weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stock, rng = stock_module(kind), random.Random(f"{kind} {size}")
    counts = [rng.choice((0, 0, 1, 3, 4, 5)) for _ in range(size)]
    counts[rng.randrange(size)] = 6
    own, (block, shard) = 12 * column_shards // size, divmod(rank, column_shards)
    layer = EP_MoE(expert_tensor_parallel_size=column_shards)
    layer._init_parameters(Stacked(stock) if kind == "stacked" else stock)
    layer._init_ctx(EP_GROUP=dist.group.WORLD, max_tokens_per_rank=6)
    x, mine = drawn(3, sum(counts), 32), slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    whole, part = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    golden = stock(whole)
    golden = golden[0] if isinstance(golden, tuple) else golden
    weights = drawn(4, *golden.shape)
    (golden * weights).sum().backward()
    y = layer(part, max_tokens=6)
    (y * weights[mine]).sum().backward()
    sum_gradients(layer)
    experts = stock.experts[block * own : (block + 1) * own]

    def own_gradient(expert: Any, name: str) -> torch.Tensor:
        weight = getattr(expert, name).weight
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        return gradient.chunk(column_shards, int(name == "down_proj"))[shard]

    def stacked(*names: str) -> torch.Tensor:
        return torch.stack(
            [torch.cat([own_gradient(expert, name) for name in names]).T for expert in experts]
        )

    stock_grads = dict(stock.named_parameters())
    pairs = [(y, golden[mine]), (part.grad, whole.grad[mine])]
    pairs.append((layer.gate_up_proj.grad, stacked("gate_proj", "up_proj")))
    pairs.append((layer.down_proj.grad, stacked("down_proj")))
    pairs.append((layer.gate.grad, stock.gate.weight.grad))
    for name, parameter in layer.named_parameters():
        if name.startswith("shared"):
            pairs.append((parameter.grad, stock_grads[name].grad))
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol)
    norm = clip_grad_norm_(layer, 1.0)
    wanted = torch.nn.utils.clip_grad_norm_(stock.parameters(), 1.0)
    torch.testing.assert_close(norm, wanted, rtol=rtol, atol=0)
    saved = {name: weight.clone() for name, weight in layer.state_dict().items()}
    expected = (Stacked(stock) if kind == "stacked" else stock).state_dict()
    assert saved.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(saved[name].cpu(), weight.cpu()), name
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data.zero_()
    layer.load_state_dict(saved)
    with torch.no_grad():
        torch.testing.assert_close(layer(part, 6), y, rtol=rtol, atol=rtol)
        torch.testing.assert_close(layer.torch_fwd(x), golden, rtol=rtol, atol=rtol)
        batch = x[:4].view(2, 2, 32)
        torch.testing.assert_close(
            layer.dist_triton_fwd(batch), golden[:4].view(2, 2, 32), rtol=rtol, atol=rtol
        )
        assert layer(x[:0]).shape == (0, 32)  # no rank has tokens
        layer.sequence_parallel = False
        torch.testing.assert_close(layer(x[:5]), golden[:5], rtol=rtol, atol=rtol)
    layer.finalize()
    return len(pairs)


def replayed(kind: str, rounds: int = 3) -> int:
    """Replay a captured call with other tokens, with shared experts on their stream."""
    layer = EP_MoE()
    layer._init_parameters(stock_module(kind))
    layer._init_ctx(max_tokens_per_rank=8)
    x = drawn(dist.get_rank(), 5, 32)
    out = torch.empty_like(x)
    with torch.no_grad():
        step = capture_graph(lambda: out.copy_(layer(x, 8)))
        for number in range(rounds):
            x.copy_(drawn(10 * number + dist.get_rank(), 5, 32))
            step()
            torch.testing.assert_close(out, layer.torch_fwd(x), rtol=1e-3, atol=1e-3)
    del step
    layer.finalize()
    return rounds


def refused() -> None:
    """Modules and calls that the layer refuses."""
    stock = stock_module("qwen")
    stock.experts[0].act_fn = torch.nn.functional.gelu
    with pytest.raises(InvalidArgument, match=r"experts.act_fn is .*gelu.*, expected SiLU"):
        EP_MoE()._init_parameters(stock)
    with pytest.raises(
        InvalidArgument, match=r"parallel_size is 4, expected a divisor of the 2 ra"
    ):
        EP_MoE(expert_tensor_parallel_size=4)
    with pytest.raises(
        InvalidArgument, match=r"columns of an expert is 15, expected a multiple of 2"
    ):
        EP_MoE(expert_tensor_parallel_size=2)._init_parameters(
            model(num_experts=2, moe_intermediate_size=15).model.layers[0].mlp
        )
    odd = model(num_experts=3).model.layers[0].mlp
    with pytest.raises(InvalidArgument, match="number of experts is 3, expected a multiple of"):
        EP_MoE()._init_parameters(odd)
    grouped = stock_module("qwen")
    grouped.n_group = 4
    with pytest.raises(InvalidArgument, match="n_group is 4, expected 1, or a gate with e_score_"):
        EP_MoE()._init_parameters(grouped)
    layer = EP_MoE()
    layer._init_parameters(stock_module("deepseek"))
    layer._init_ctx(max_tokens_per_rank=4)
    with pytest.raises(InvalidArgument, match="max_tokens is 5, expected an int from 1 to 4"):
        layer(drawn(1, 5, 32))
    with pytest.raises(InvalidArgument, match=r"x\.dtype is torch.float16, expected the weight's"):
        ep_experts(
            drawn(1, 1, 32).half(), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1),
            layer.gate_up_proj, layer.down_proj, layer.collectives, 1,
        )  # fmt: skip
    layer.finalize()
