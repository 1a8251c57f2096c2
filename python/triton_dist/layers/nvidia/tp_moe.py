"""Tensor-parallel mixture of experts: every rank has a share of every expert."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, one_hot

from triton_dist.layers.nvidia import experts, functional
from triton_dist.layers.nvidia.layer import TensorParallelLayer
from triton_dist.layers.nvidia.tensor_parallel import Collectives
from triton_dist.runtime.ranks import Group


class TP_MoE(TensorParallelLayer):
    """The experts of Qwen, Mixtral and others: a token's ``top_k`` best by a softmax over all, each
    ``down(act(gate(x)) * up(x))``.

    Arguments, modes and call forms: ``TensorParallelLayer``; ``autotune`` means nothing, calls are
    tuned.

    Attributes, of E experts of I columns over all ranks:
        gate: [E, hidden], the router, the same on all ranks.
        gate_up_proj: [E, hidden, 2 * I / ranks]. down_proj: [E, I / ranks, hidden].
    """

    gate: torch.nn.Parameter
    gate_up_proj: torch.nn.Parameter
    down_proj: torch.nn.Parameter

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        group: Group = None,
        autotune: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(rank, world_size, group, **options)

    def _init_parameters(self, module: torch.nn.Module, verbose: bool = False) -> None:
        """Take this rank's share of a module with ``gate``, ``top_k`` and a list ``experts`` of
        modules with ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn``; it may lie on another
        device. Weights of the best are normalised unless its ``norm_topk_prob`` is false.

        Raises:
            InvalidArgument: weights that do not go together, or cannot be shared out; a bias.
        """
        source: Any = module
        self._check_members("module", module, "gate", "experts", "top_k")
        gate = self._linear("gate", source.gate, (len(source.experts), None))
        self.num_experts, self.hidden_size = gate.shape
        self.top_k: int = source.top_k
        self.normalises: bool = getattr(source, "norm_topk_prob", True)
        for number, expert in enumerate(source.experts):
            needed = ("gate_proj", "up_proj", "down_proj", "act_fn")
            self._check_members(f"experts.{number}", expert, *needed)
        first = self._linear("experts.0.gate_proj", source.experts[0].gate_proj, (None, None))
        columns = first.shape[0]
        self._check_split("columns of experts.0.gate_proj", columns)
        shapes = {"gate_proj": (columns, self.hidden_size), "up_proj": (columns, self.hidden_size)}
        shapes["down_proj"] = self.hidden_size, columns
        gate_up, down = [], []
        for number, expert in enumerate(source.experts):
            weights = {}
            for name, shape in shapes.items():
                where, projection = f"experts.{number}.{name}", getattr(expert, name)
                weights[name] = self._linear(where, projection, shape)
                if weights[name].dtype != gate.dtype:
                    expected = f"that of gate, {gate.dtype}"
                    raise self._refusal(f"{where}.weight.dtype", weights[name].dtype, expected)
                if getattr(projection, "bias", None) is not None:
                    raise self._refusal(f"{where}.bias", tuple(projection.bias.shape), "None")
            both = [self._shard(weights[name], 0) for name in ("gate_proj", "up_proj")]
            gate_up.append(torch.cat(both).T)
            down.append(self._shard(weights["down_proj"], 1).T)
        whole = gate.detach().to(self.library.device)
        self.gate = torch.nn.Parameter(whole, requires_grad=gate.requires_grad)
        self.gate_up_proj = self._parameter(torch.stack(gate_up), first)
        self.down_proj = self._parameter(torch.stack(down), first)
        self.act_fn: Any = source.experts[0].act_fn
        self._tell(verbose)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] to the same, in the layer's mode. Tuned at the first call of a shape.

        Raises:
            InvalidArgument, ContextFinalized: before anything is launched.
            RankDisagreement: at the first call of a shape, if ranks chose other experts.
        """
        return self._run(x, self._across(), self.sequence_parallel)

    def _routes(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts, int32, and their weights, fp32, of each row: [rows, top_k]."""
        chances = linear(rows, self.gate).softmax(-1, dtype=torch.float32)
        best, ids = chances.topk(self.top_k, -1)
        return ids.int(), best / best.sum(-1, keepdim=True) if self.normalises else best

    def _run(self, x: torch.Tensor, ranks: Collectives, is_spread: bool) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ids, scales = self._routes(rows)
        if is_spread:
            ids = functional.all_gather(ids, ranks)
            scales = functional.all_gather(scales, ranks)
        first = experts.ag_group_gemm if is_spread else experts.group_gemm
        gate, up = first(rows, self.gate_up_proj, ids, ranks).chunk(2, -1)
        hidden = self.act_fn(gate) * up
        last = experts.moe_reduce_rs if is_spread else experts.moe_reduce_ar
        return last(hidden, self.down_proj, ids, scales, ranks).view(x.shape)

    @torch.no_grad()
    def torch_fwd(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self.library, False)

    @torch.no_grad()
    def torch_fwd_no_loop(self, x: torch.Tensor) -> torch.Tensor:
        """The same by products of all tokens with all experts, without a loop over them."""
        rows = x.reshape(-1, x.shape[-1])
        ids, scales = self._routes(rows)
        gate, up = torch.einsum("mh,ehi->emi", rows, self.gate_up_proj).chunk(2, -1)
        each = torch.einsum("emi,eih->emh", self.act_fn(gate) * up, self.down_proj)
        chosen = one_hot(ids.long(), self.num_experts) * scales[..., None]
        total = torch.einsum("emh,mke->mh", each.float(), chosen).to(x.dtype)
        return self.library.all_reduce(total).view(x.shape)

    @torch.no_grad()
    def dist_triton_fwd(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self._across(), True)

    @torch.no_grad()
    def dist_triton_AR_fwd(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self._across(), False)
