"""Facts of GEMM-AllReduce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.case import Call, Cost, Operands, Peer, symmetric_all_reduces
from triton_dist.kernels.common.gemm_case import Shape, SummedGEMMCase
from triton_dist.kernels.nvidia.gemm_allreduce import (
    GEMMAllReduceMethod,
    create_gemm_ar_context,
    gemm_ar,
)
from triton_dist.kernels.nvidia.gemm_allreduce.ways import SymmetricCollective


class GEMMAllReduceCase(SummedGEMMCase):
    """Operands ``A`` [M, K / W], ``B`` [K / W, N] and maybe ``bias`` [N]; gives the sum [M, N] on
    every rank, for any M."""

    transfer, serial = "all-reduce", "matmul + all-reduce"
    create = staticmethod(create_gemm_ar_context)
    any_rows = True

    def is_own(self, config: Mapping[str, Any]) -> bool:
        return config["way"] != SymmetricCollective.name and super().is_own(config)

    def own_rows(self, total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return total

    def peers(self, operands: Operands, ctx: Any) -> dict[str, Peer]:
        """The GEMM alone (cuBLAS), the all-reduce alone (NCCL, in place, of zeros), both one after
        the other, and on GPUs the GEMM into symmetric memory and torch's all-reduces there."""
        A, B, group = operands["A"], operands["B"], ctx.group
        zeros = A.new_zeros((A.shape[0], B.shape[1]))
        symmetric = symmetric_all_reduces(
            zeros, lambda staged: torch.matmul(A, B, out=staged), group
        )
        return {
            "GEMM alone": Peer("gemm", lambda: torch.matmul(A, B)),
            "all-reduce alone": Peer("transfer", lambda: vendor.all_reduce(zeros, group)),
            self.serial: self.whole(
                lambda: vendor.all_reduce(torch.matmul(A, B), group), operands, group
            ),
            **{
                f"matmul + {name}": self.whole(call, operands, group)
                for name, call in symmetric.items()
            },
        }

    def cost(self, shape: Shape, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Rows cross the links twice: to the rank that adds them, and their sum to all."""
        return self.summed_cost(shape, dtype, num_ranks, owners=1, crossings=2)

    def bad_calls(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        two_shot = GEMMAllReduceMethod.TWO_SHOT
        return {
            **super().bad_calls(good, num_ranks),
            "way": {"way": "three_shot"},
            "method": {"method": "two_shot"},
            "gemm_config (none)": {"gemm_config": None, "method": two_shot},
            "num_ctas": {"way": "serial", "num_ctas": "2"},
            "block_bytes": {"way": "serial", "block_bytes": 1000},
            "reduction": {"way": "serial", "reduction": "tree"},
        }

    def recorded_call(self, key: Any) -> Call:
        looks, copy_to_local = key
        args, _ = self.recorded_operands(looks)
        return args, {"copy_to_local": copy_to_local}

    def sample_keys(self) -> Iterator[tuple[Any, ...]]:
        for looks in self.sample_looks():
            yield looks, True


CASE = GEMMAllReduceCase(gemm_ar)
