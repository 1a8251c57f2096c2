"""Tensor-parallel feed-forward layer: ``down(act(gate(x)) * up(x))``."""

from __future__ import annotations

from typing import Any

import torch

from triton_dist.layers.nvidia.fp8 import is_silu
from triton_dist.layers.nvidia.layer import TokenLayer
from triton_dist.layers.nvidia.stock_weights import StockWeight
from triton_dist.layers.nvidia.tensor_parallel import Collectives


class TP_MLP(TokenLayer):
    """Feed-forward layer of Llama, Qwen and similar models.

    Each rank has I / ranks of the I intermediate columns. ``TensorParallelLayer`` describes
    arguments, modes and methods.

    Attributes:
        gate_up_proj: [2 * I / ranks, hidden], this rank's shard of gate, then of up.
        down_proj: [hidden, I / ranks].
        gate_up_proj_scale, down_proj_scale, gate_up_proj_input_scale, down_proj_input_scale: scales
            of fp8 weights and of their inputs (``layers/nvidia/fp8.py``), if a checkpoint has them.
    """

    sharded_names = ("gate_up_proj", "down_proj")
    gate_up_proj: torch.nn.Parameter
    down_proj: torch.nn.Parameter

    def _init_parameters(self, mlp: torch.nn.Module, verbose: bool = False) -> None:
        """Copy this rank's shard of a feed-forward module, which may be on any device.

        Args:
            mlp: module with ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn``.
            verbose: print the shapes of the shards.

        Raises:
            InvalidArgument: weights do not match or cannot be sharded, or the module has a bias.
        """
        source: Any = mlp
        self._check_members("module", mlp, "gate_proj", "up_proj", "down_proj", "act_fn")
        gate = self._checked_weight("gate_proj", source.gate_proj, (None, None))
        columns, hidden = gate.shape
        like = ("gate_proj", gate)
        self._checked_weight("up_proj", source.up_proj, (columns, hidden), like=like)
        self._checked_weight("down_proj", source.down_proj, (hidden, columns), like=like)
        names = ("gate_proj", "up_proj", "down_proj")
        projections = {name: getattr(source, name) for name in names}
        for name, projection in projections.items():
            bias = getattr(projection, "bias", None)
            if bias is not None:
                raise self._invalid(f"{name}.bias", tuple(bias.shape), "None")
        self._set_scales(projections.values())
        own_columns = self._split_columns("columns of gate_proj", columns)
        self.gate_up_proj = self._parameter("gate_up_proj", mlp, 2 * own_columns, hidden)
        self.down_proj = self._parameter("down_proj", mlp, hidden, own_columns)
        self._init_scales(mlp, "gate_up_proj", "down_proj")
        self.act_fn: Any = source.act_fn
        self._print_shapes(verbose)

    def _weights_of(self, name: str, tensor: torch.Tensor) -> list[StockWeight]:
        size = self.stock_columns
        if name == "down_proj":
            return [StockWeight("down_proj.weight", tensor, 1, unpadded_size=size)]
        parts = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
        return [
            StockWeight(f"{part}.weight", shard, 0, unpadded_size=size) for part, shard in parts
        ]

    def _run(
        self, x: torch.Tensor, collectives: Collectives, sequence_parallel: bool
    ) -> torch.Tensor:
        is_fused = self.scales is not None and is_silu(self.act_fn)
        activation = None if is_fused else self._activate
        y = self._two_gemms(
            x, "gate_up_proj", activation, "down_proj", collectives, sequence_parallel
        )
        return y.view(x.shape)

    def _activate(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_and_up.chunk(2, -1)
        hidden: torch.Tensor = self.act_fn(gate) * up
        return hidden

    @torch.no_grad()
    def torch_ag_gemm(self, x: torch.Tensor) -> torch.Tensor:
        """Return gate and up by torch: [tokens / ranks, hidden] to [tokens, 2 * I / ranks]."""
        return self._product("ag_gemm", x, "gate_up_proj", self.torch_collectives)

    @torch.no_grad()
    def dist_triton_ag_gemm(
        self, x: torch.Tensor, *unused: Any, **also_unused: Any
    ) -> torch.Tensor:
        """Return gate and up by ``ag_gemm``; shapes as in ``torch_ag_gemm``."""
        return self._product("ag_gemm", x, "gate_up_proj", self._required_collectives())

    @torch.no_grad()
    def torch_gemm_rs(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``down_proj`` by torch: [tokens, I / ranks] to [tokens / ranks, hidden]."""
        return self._product("gemm_rs", x, "down_proj", self.torch_collectives)

    @torch.no_grad()
    def dist_triton_gemm_rs(
        self, x: torch.Tensor, *unused: Any, **also_unused: Any
    ) -> torch.Tensor:
        """Return ``down_proj`` by ``gemm_rs``; shapes as in ``torch_gemm_rs``."""
        return self._product("gemm_rs", x, "down_proj", self._required_collectives())
