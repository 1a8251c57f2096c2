"""Facts of grouped GEMM, top-k sum and ReduceScatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.case import Cost
from triton_dist.kernels.common.moe_case import GroupedShape, SummedRoutesCase
from triton_dist.kernels.nvidia.grouped_gemm import grouped_gemm
from triton_dist.kernels.nvidia.moe_reduce_rs import create_moe_rs_context, run_moe_reduce_rs


class MoEReduceRSCase(SummedRoutesCase):
    """Gives the own tokens of the sum, [M / W, N]."""

    transfer, serial = "reduce-scatter", "our product + reduce-scatter"
    create = staticmethod(create_moe_rs_context)
    shares_rows = True

    def own_rows(self, total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        if not dist.is_initialized():
            return total
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    def reduce(self, total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return vendor.reduce_scatter(total, group)

    def cost(self, shape: GroupedShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        return self.summed_cost(shape, dtype, num_ranks, owners=num_ranks, crossings=1)

    def bad_calls(self, good: Any, num_ranks: int) -> dict[str, dict[str, Any]]:
        bad = super().bad_calls(good, num_ranks)
        if num_ranks > 1:
            names, topk = ("chosen_experts", "expert_weight"), good["expert_weight"].shape[1]
            bad["M"] = {name: good[name][:-1] for name in names} | {"x": good["x"][:-topk]}
        return bad


CASE = MoEReduceRSCase(run_moe_reduce_rs, grouped_gemm)
