"""Tensor-parallel mixture-of-experts layer: each rank has a shard of every expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import linear, one_hot

from triton_dist.layers.nvidia import functional
from triton_dist.layers.nvidia.fp8 import is_silu
from triton_dist.layers.nvidia.layer import TokenLayer
from triton_dist.layers.nvidia.stock_weights import E4M3, StockWeight
from triton_dist.layers.nvidia.tensor_parallel import Collectives
from triton_dist.runtime.ranks import Group

_PROJECTION_NAMES = ("gate_proj", "up_proj", "down_proj")
_CORRECTION_NAME = "e_score_correction_bias"
SHARED_EXPERT_NAMES = ("shared_expert", "shared_experts")


class TP_MoE(TokenLayer):
    """Router and experts of Qwen, Mixtral and similar models.

    The router computes a softmax over all experts; a token goes to its best ``top_k`` experts. If
    the module has an ``e_score_correction_bias``, the router is DeepSeek-V3's: it adds the bias to
    sigmoids, selects groups of experts, and chooses the best ``top_k`` experts in these groups. The
    sigmoids without bias are the experts' weights.

    Each expert is ``down(act(gate(x)) * up(x))``. E is the number of experts, I the intermediate
    size of an expert over all ranks. ``TensorParallelLayer`` describes arguments, modes and
    methods. ``autotune`` is ignored: calls are always tuned.

    Attributes:
        gate: [E, hidden], weight of the router, equal on all ranks.
        score_correction_bias: fp32 [E], buffer with ``e_score_correction_bias``; or ``None``.
        gate_up_proj: [E, hidden, 2 * I / ranks].
        down_proj: [E, I / ranks, hidden].
        gate_up_proj_scale, down_proj_scale, gate_up_proj_input_scale, down_proj_input_scale: scales
            of fp8 weights and of their inputs (``layers/nvidia/fp8.py``), if a checkpoint has them.
            A grouped GEMM uses the largest input scale of all its experts. fp8 weights have no
            backward.
    """

    sharded_names = ("gate_up_proj", "down_proj")
    gate: torch.nn.Parameter
    score_correction_bias: torch.Tensor | None
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
        """Copy this rank's shard of an MoE module, which may be on any device.

        Args:
            module: module with ``gate`` and ``experts``. ``experts`` is a list of modules with
                ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn``, or one module with stacked
                weights ``gate_up_proj`` [E, 2 * I, hidden], ``down_proj`` [E, hidden, I] and
                ``act_fn``. The module or its gate has ``top_k``. The weights of a token's experts
                are normalised to sum 1 unless the module has ``norm_topk_prob = False``.
                DeepSeek-V3's ``routed_scaling_factor``, ``num_group`` or ``n_group``, and
                ``topk_group`` are read too.
            verbose: print the shapes of the shards.

        Raises:
            InvalidArgument: weights do not match or cannot be sharded, or the module has biases or
                shared experts.
        """
        source: Any = module
        self._check_members("module", module, "gate", "experts")
        self._init_shared(source)
        expert_weights = list(self._experts_of(source.experts))
        for holder, name in ((source.gate, "bias"), (source, _CORRECTION_NAME)):
            if getattr(holder, name, None) is not None:
                raise self._invalid(f"{name} of the gate", "present", "no such attribute")
        has_correction = getattr(source.gate, _CORRECTION_NAME, None) is not None
        gate = self._checked_weight("gate", source.gate, (len(expert_weights), None), True)
        self.num_experts, self.hidden_size = gate.shape
        router = source if hasattr(source, "top_k") else source.gate
        self._check_members("gate", router, "top_k")
        self.top_k: int = router.top_k
        if not 1 <= self.top_k <= self.num_experts:
            raise self._invalid("top_k", self.top_k, f"1 to {self.num_experts} experts")

        def option(name: str, default: Any) -> Any:
            return getattr(source, name, getattr(source.gate, name, default))

        self.normalises_weights: bool = option("norm_topk_prob", True)
        self.routed_scaling_factor: float = option("routed_scaling_factor", 1.0)
        self.num_groups: int = option("num_group", option("n_group", 1)) or 1
        self.topk_groups: int = option("topk_group", 1) or 1
        if self.num_groups > 1 and not has_correction:
            expected = f"1, or a gate with {_CORRECTION_NAME}"
            raise self._invalid("n_group", self.num_groups, expected)
        columns = len(expert_weights[0][0])
        shapes = ((columns, self.hidden_size),) * 2 + ((self.hidden_size, columns),)
        dtype = expert_weights[0][0].dtype
        if dtype is not E4M3 and not has_correction:  # with a correction, the gate may be fp32
            dtype = gate.dtype
        for number, weights in enumerate(expert_weights):
            for name, weight, shape in zip(_PROJECTION_NAMES, weights, shapes, strict=True):
                where = f"experts.{number}.{name}.weight"
                if tuple(weight.shape) != shape:
                    raise self._invalid(f"{where}.shape", tuple(weight.shape), f"{shape}")
                if weight.dtype != dtype:
                    expected = f"the dtype of gate, {gate.dtype}, or of the first expert, {dtype}"
                    raise self._invalid(f"{where}.dtype", weight.dtype, expected)
        self.has_stacked_experts = not isinstance(source.experts, torch.nn.ModuleList)
        first = source.experts if self.has_stacked_experts else source.experts[0]
        self.act_fn: Any = first.act_fn
        if dtype is E4M3 and self.has_stacked_experts:
            expected = "a list of experts, because stacked experts have no fp8 layout"
            raise self._invalid("experts.gate_up_proj.dtype", E4M3, expected)
        if dtype is E4M3:
            self._set_scales(
                getattr(each, name) for each in source.experts for name in _PROJECTION_NAMES
            )
        E, hidden = gate.shape
        self.gate = self._parameter("gate", module, E, hidden)
        # A buffer: FSDP2 would cast a parameter to the dtype of the weights.
        score_correction_bias = (
            self._parameter("score_correction_bias", module, E).data if has_correction else None
        )
        self.register_buffer("score_correction_bias", score_correction_bias)
        experts, own_columns = self._shard_sizes(E, columns)
        self.gate_up_proj = self._parameter(
            "gate_up_proj", module, experts, hidden, 2 * own_columns
        )
        self.down_proj = self._parameter("down_proj", module, experts, own_columns, hidden)
        self._init_scales(module, "gate_up_proj", "down_proj")
        self._print_shapes(verbose)

    def _init_shared(self, source: Any) -> None:
        """Copy the shared experts, or raise if there are any."""
        for name in SHARED_EXPERT_NAMES:
            if hasattr(source, name):
                raise self._invalid(name, type(getattr(source, name)), "none")

    def _shard_sizes(self, num_experts: int, columns: int) -> tuple[int, int]:
        """Return this rank's number of experts, and its number of columns of each expert."""
        return num_experts, self._split_columns("columns of an expert", columns)

    def _experts_of(self, source: Any) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the weights of gate, up and down of each expert, [outputs, inputs]."""
        if isinstance(source, torch.nn.ModuleList):
            for number, expert in enumerate(source):
                self._check_members(f"experts.{number}", expert, *_PROJECTION_NAMES, "act_fn")
                for name in _PROJECTION_NAMES:
                    bias = getattr(getattr(expert, name), "bias", None)
                    if bias is not None:
                        where = f"experts.{number}.{name}.bias"
                        raise self._invalid(where, tuple(bias.shape), "None")
                yield tuple(
                    self._checked_weight(
                        f"experts.{number}.{name}", getattr(expert, name), (None, None)
                    )
                    for name in _PROJECTION_NAMES
                )
            return
        self._check_members("experts", source, "gate_up_proj", "down_proj", "act_fn")
        if hasattr(source, "gate_up_proj_bias"):
            shape = tuple(source.gate_up_proj_bias.shape)
            raise self._invalid("experts.gate_up_proj_bias", shape, "none")
        for gate_up, down in zip(source.gate_up_proj, source.down_proj, strict=True):
            yield (*gate_up.chunk(2), down)

    def _weights_of(self, name: str, tensor: torch.Tensor) -> list[StockWeight]:
        if name == "gate":
            return [StockWeight("gate.weight", tensor, None)]
        if name == "score_correction_bias":
            return [StockWeight(f"gate.{_CORRECTION_NAME}", tensor, None)]
        stacked = tensor.transpose(1, 2)  # [E, outputs, inputs], as stock modules store weights
        if self.has_stacked_experts:
            return [self._stacked_weight(name, stacked)]
        return [
            weight
            for number in range(self.num_experts)
            for weight in self._weights_of_expert(name, stacked, number)
        ]

    def _stacked_weight(self, name: str, stacked: torch.Tensor) -> StockWeight:
        """Return the shard of the stock module's tensor of all experts."""
        if name == "down_proj":
            return StockWeight("experts.down_proj", stacked, 2)
        return StockWeight("experts.gate_up_proj", stacked.unflatten(1, (2, -1)), 2, is_pair=True)

    def _weights_of_expert(
        self, name: str, stacked: torch.Tensor, number: int
    ) -> Iterator[StockWeight]:
        yield from self._split_expert(name, stacked[number], number)

    def _split_expert(
        self, name: str, expert: torch.Tensor, number: int, **options: Any
    ) -> Iterator[StockWeight]:
        """Yield shards of gate and up, or of down; ``options`` are fields of ``StockWeight``."""
        where, size = f"experts.{number}", self.stock_columns
        if name == "down_proj":
            yield StockWeight(f"{where}.down_proj.weight", expert, 1, unpadded_size=size, **options)
            return
        for half, weight in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
            yield StockWeight(f"{where}.{half}.weight", weight, 0, unpadded_size=size, **options)

    def _choose_experts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids (int32) and weights (fp32) of each row's experts, both [rows, top_k]."""
        if self.score_correction_bias is not None:
            return self._choose_experts_in_groups(rows, self.score_correction_bias)
        weights, ids = linear(rows, self.gate).softmax(-1, dtype=torch.float32).topk(self.top_k, -1)
        if self.normalises_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return (
            ids.int(),
            weights * self.routed_scaling_factor if self.routed_scaling_factor != 1 else weights,
        )

    def _choose_experts_in_groups(
        self, rows: torch.Tensor, score_correction_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts by sigmoids, within the best groups of experts. The score of a group is
        the sum of the scores of its two best experts."""
        scores = linear(rows.float(), self.gate.float()).sigmoid()
        biased_scores = (scores.detach() + score_correction_bias).unflatten(
            -1, (self.num_groups, -1)
        )
        group_scores = biased_scores.topk(min(2, biased_scores.shape[-1]), -1)[0].sum(-1)
        chosen = group_scores.topk(self.topk_groups, -1)[1]
        is_chosen = torch.zeros_like(group_scores).scatter(-1, chosen, 1) != 0
        biased_scores = biased_scores.masked_fill(~is_chosen[..., None], float("-inf"))
        ids = biased_scores.flatten(-2).topk(self.top_k, -1)[1]
        weights = scores.gather(-1, ids)
        if self.normalises_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids.int(), weights * self.routed_scaling_factor

    def _run(
        self, x: torch.Tensor, collectives: Collectives, sequence_parallel: bool
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        collectives = self._collectives_for(rows, collectives, sequence_parallel)
        ids, topk_weights = self._choose_experts(rows)
        routing = ids, topk_weights
        y = self._weighted_expert_sums(rows, *routing, collectives, sequence_parallel)
        return y.view(x.shape)

    def _local_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids relative to this rank's first expert; other ranks' ids are out of range."""
        return ids

    def _weighted_expert_sums(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        collectives: Collectives,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        """Return each row's weighted sum over its experts, [rows, hidden]."""
        if sequence_parallel:
            ids = functional.all_gather(ids, collectives)
            topk_weights = functional.all_gather(topk_weights, collectives)
        first, last = "group_gemm", "moe_reduce_ar"
        if sequence_parallel:
            first, last = "ag_group_gemm", "moe_reduce_rs"
        ids = self._local_ids(ids)
        hidden = self._product(first, rows, "gate_up_proj", collectives, ids)
        is_fused = self.scales is not None and is_silu(self.act_fn)
        if not is_fused:
            gate, up = hidden.chunk(2, -1)
            hidden = self.act_fn(gate) * up
        routing = ids, topk_weights
        return self._product(last, hidden, "down_proj", collectives, *routing, silu_mul=is_fused)

    @torch.no_grad()
    def torch_fwd_no_loop(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of ``torch_fwd``; multiply all tokens by all experts, then select."""
        rows = x.reshape(-1, x.shape[-1])
        ids, topk_weights = self._choose_experts(rows)
        gate, up = torch.einsum("mh,ehi->emi", rows, self.gate_up_proj).chunk(2, -1)
        each = torch.einsum("emi,eih->emh", self.act_fn(gate) * up, self.down_proj)
        chosen = one_hot(ids.long(), self.num_experts) * topk_weights[..., None]
        total = torch.einsum("emh,mke->mh", each.float(), chosen).to(x.dtype)
        return self.torch_collectives.all_reduce(total).view(x.shape)
