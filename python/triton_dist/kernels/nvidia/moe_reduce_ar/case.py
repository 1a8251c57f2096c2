"""Facts of grouped GEMM, top-k sum and AllReduce."""

from __future__ import annotations

import torch
import torch.distributed as dist

from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.case import Cost
from triton_dist.kernels.common.moe_case import GroupedShape, SummedRoutesCase
from triton_dist.kernels.nvidia.grouped_gemm import grouped_gemm
from triton_dist.kernels.nvidia.moe_reduce_ar import create_moe_ar_context, run_moe_reduce_ar


class MoEReduceARCase(SummedRoutesCase):
    """Gives the sum [M, N] on every rank, for any M."""

    transfer, serial = "all-reduce", "our product + all-reduce"
    create = staticmethod(create_moe_ar_context)
    shares_rows = False

    def own_rows(self, total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return total

    def reduce(self, total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return vendor.all_reduce(total, group)

    def cost(self, shape: GroupedShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Rows cross the links twice: to the rank that adds them, and their sum to all."""
        return self.summed_cost(shape, dtype, num_ranks, owners=1, crossings=2)


CASE = MoEReduceARCase(run_moe_reduce_ar, grouped_gemm)
