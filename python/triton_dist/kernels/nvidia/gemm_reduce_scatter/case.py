"""Facts of GEMM-ReduceScatter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.case import Call, Cost, Operands, Peer
from triton_dist.kernels.common.gemm_case import Shape, SummedGEMMCase
from triton_dist.kernels.nvidia.gemm_reduce_scatter import create_gemm_rs_context, gemm_rs

ASYNC_TP = "torch async-TP"


class GEMMReduceScatterCase(SummedGEMMCase):
    """Operands ``A`` [M, K / W], ``B`` [K / W, N] and maybe ``bias`` [N]; gives the own rows of the
    sum, [M / W, N]."""

    transfer, serial = "reduce-scatter", "matmul + reduce-scatter"
    create = staticmethod(create_gemm_rs_context)

    def own_rows(self, total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    def peers(self, operands: Operands, ctx: Any) -> dict[str, Peer]:
        """The GEMM alone (cuBLAS), the reduce-scatter alone (NCCL) of a copy of the product as it
        is now, both one after the other, and torch's async-TP where it can run."""
        A, B, group = operands["A"], operands["B"], ctx.group
        product = torch.matmul(A, B)

        def serial() -> torch.Tensor:
            return vendor.reduce_scatter(torch.matmul(A, B), group)

        peers = {
            "GEMM alone": Peer("gemm", lambda: torch.matmul(A, B)),
            "reduce-scatter alone": Peer("transfer", lambda: vendor.reduce_scatter(product, group)),
            self.serial: self.whole(serial, operands, group),
        }
        if vendor.has_async_tp(group, vendor.MATMUL_REDUCE_SCATTER):
            peers[ASYNC_TP] = self.whole(
                lambda: vendor.async_tp_matmul_scatter(A, B, group), operands, group
            )
        return peers

    def cost(self, shape: Shape, dtype: torch.dtype, num_ranks: int) -> Cost:
        return self.summed_cost(shape, dtype, num_ranks, owners=num_ranks, crossings=1)

    def bad_calls(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        """For a context that was created without ``reduce_st``."""
        A = good["A"]
        return {
            **super().bad_calls(good, num_ranks),
            "M": {"A": A.new_ones(A.shape[0] + 1, A.shape[1])},
            "reduce_st": {"reduce_st": True},
            "way": {"way": "ring"},
            "method": {"method": "collective"},
        }

    def recorded_call(self, key: Any) -> Call:
        looks, adds = key
        return self.recorded_operands(looks, reduce_st=adds)

    def sample_keys(self) -> Iterator[tuple[Any, ...]]:
        for looks in self.sample_looks():
            yield looks, False


CASE = GEMMReduceScatterCase(gemm_rs)
