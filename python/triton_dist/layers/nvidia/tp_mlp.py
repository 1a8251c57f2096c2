"""Tensor-parallel feed-forward layer: ``down(act(gate(x)) * up(x))``."""

from __future__ import annotations

from typing import Any

import torch

from triton_dist.layers.nvidia.layer import TokenLayer
from triton_dist.layers.nvidia.tensor_parallel import Collectives


class TP_MLP(TokenLayer):
    """The feed-forward layer of LLaMA, Qwen and others: gate and up by columns, down by rows.

    Arguments, modes and call forms: ``TensorParallelLayer``.

    Attributes, of I columns of gate and up over all ranks:
        gate_up_proj: [2 * I / ranks, hidden], this rank's gate, then its up.
        down_proj: [hidden, I / ranks].
    """

    shards = ("gate_up_proj", "down_proj")
    gate_up_proj: torch.nn.Parameter
    down_proj: torch.nn.Parameter

    def _init_parameters(self, mlp: torch.nn.Module, verbose: bool = False) -> None:
        """Take this rank's share of a module with ``gate_proj``, ``up_proj``, ``down_proj`` and
        ``act_fn``; the module may lie on another device.

        Raises:
            InvalidArgument: weights that do not go together, or cannot be shared out; a bias.
        """
        source: Any = mlp
        self._check_members("module", mlp, "gate_proj", "up_proj", "down_proj", "act_fn")
        gate = self._linear("gate_proj", source.gate_proj, (None, None))
        columns, hidden = gate.shape
        up = self._linear("up_proj", source.up_proj, (columns, hidden))
        down = self._linear("down_proj", source.down_proj, (hidden, columns))
        self._check_split("columns of gate_proj", columns)
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(source, name)
            if linear.weight.dtype != gate.dtype:
                expected = f"that of gate_proj, {gate.dtype}"
                raise self._refusal(f"{name}.weight.dtype", linear.weight.dtype, expected)
            if getattr(linear, "bias", None) is not None:
                raise self._refusal(f"{name}.bias", tuple(linear.bias.shape), "None")
        gate_up = torch.cat([self._shard(gate, 0), self._shard(up, 0)])
        self.gate_up_proj = self._parameter(gate_up, gate)
        self.down_proj = self._parameter(self._shard(down, 1), down)
        self.act_fn: Any = source.act_fn
        self._tell(verbose)

    def _run(self, x: torch.Tensor, ranks: Collectives, is_spread: bool) -> torch.Tensor:
        weights = self.gate_up_proj, self._between, self.down_proj
        return self._pair(x, *weights, ranks, is_spread).view(x.shape)

    def _between(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        hidden: torch.Tensor = self.act_fn(gate) * up
        return hidden

    @torch.no_grad()
    def torch_ag_gemm(self, x: torch.Tensor) -> torch.Tensor:
        """The first product alone, by torch: [tokens / ranks, hidden] to [tokens, 2 I / ranks]."""
        return self.library.ag_gemm(x, self.gate_up_proj.T)

    @torch.no_grad()
    def dist_triton_ag_gemm(
        self, x: torch.Tensor, *unused: Any, **also_unused: Any
    ) -> torch.Tensor:
        """The same by ``ag_gemm``."""
        return self._across().ag_gemm(x, self.gate_up_proj.T)

    @torch.no_grad()
    def torch_gemm_rs(self, x: torch.Tensor) -> torch.Tensor:
        """The last product alone, by torch: [tokens, I / ranks] to [tokens / ranks, hidden]."""
        return self.library.gemm_rs(x, self.down_proj.T)

    @torch.no_grad()
    def dist_triton_gemm_rs(
        self, x: torch.Tensor, *unused: Any, **also_unused: Any
    ) -> torch.Tensor:
        """The same by ``gemm_rs``."""
        return self._across().gemm_rs(x, self.down_proj.T)
