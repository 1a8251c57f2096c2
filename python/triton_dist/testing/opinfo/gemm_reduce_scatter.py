"""OpInfo of GEMM-ReduceScatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common import vendor
from triton_dist.kernels.nvidia.gemm_reduce_scatter import create_gemm_rs_context, gemm_rs
from triton_dist.testing.opinfo.base import Baseline, Group, Operands
from triton_dist.testing.opinfo.gemm import SummedGEMMOpInfo

ASYNC_TP = "torch async-TP"


class GEMMReduceScatterOpInfo(SummedGEMMOpInfo):
    """Operands ``A`` [M, K / W], ``B`` [K / W, N] and maybe ``bias`` [N]; gives the own rows of the
    sum, [M / W, N]."""

    transfer, serial = "reduce-scatter", "matmul + reduce-scatter"
    create = staticmethod(create_gemm_rs_context)
    option = ("reduce_st", False)

    def own_rows(self, total: torch.Tensor, group: Group) -> torch.Tensor:
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """The GEMM alone (cuBLAS), the reduce-scatter alone (NCCL) of a copy of the product as it
        is now, both one after the other, and torch's async-TP where it can run."""
        A, B, group = operands["A"], operands["B"], ctx.group
        product = torch.matmul(A, B)

        def serial() -> torch.Tensor:
            return vendor.reduce_scatter(torch.matmul(A, B), group)

        def async_tp() -> torch.Tensor:
            return vendor.async_tp_matmul_scatter(A, B, group)

        baselines = {
            "GEMM alone": Baseline("gemm", lambda: torch.matmul(A, B)),
            "reduce-scatter alone": Baseline(
                "transfer", lambda: vendor.reduce_scatter(product, group)
            ),
            self.serial: self.whole(serial, operands, group),
        }
        if vendor.has_async_tp(group, vendor.MATMUL_REDUCE_SCATTER):
            baselines[ASYNC_TP] = self.whole(async_tp, operands, group)
        return baselines

    def error_inputs(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        """For a context that was created without ``reduce_st``."""
        A = good["A"]
        return {
            **super().error_inputs(good, num_ranks),
            "M": {"A": A.new_ones(A.shape[0] + 1, A.shape[1])},
            "reduce_st": {"reduce_st": True},
            "way": {"way": "ring"},
            "method": {"method": "collective"},
        }


GEMM_RS = GEMMReduceScatterOpInfo(gemm_rs)
