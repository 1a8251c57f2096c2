"""Facts of reduce-scatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.case import Operands
from triton_dist.kernels.common.collective.case import ShardCase
from triton_dist.kernels.nvidia.reduce_scatter import create_reduce_scatter_ctx, reduce_scatter


class ReduceScatterCase(ShardCase):
    """Operand ``x``; gives the own shard of its sum."""

    transfer, scatters = "reduce-scatter", True
    create = staticmethod(create_reduce_scatter_ctx)

    def library(self, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return vendor.reduce_scatter(x, group)

    def bad_calls(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        bad = super().bad_calls(good, num_ranks)
        return {**bad, "x.shape (not a multiple)": {"x": good["x"][:-1]}}


CASE = ReduceScatterCase(reduce_scatter)
