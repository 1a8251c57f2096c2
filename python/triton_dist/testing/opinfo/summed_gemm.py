"""OpInfos of GEMM-ReduceScatter and GEMM-AllReduce."""

from __future__ import annotations

from typing import Any

import torch

from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.gemm.scales import Scaling
from triton_dist.kernels.nvidia.gemm_allreduce import create_gemm_ar_context, gemm_ar
from triton_dist.kernels.nvidia.gemm_allreduce.algorithms import SymmetricCollective
from triton_dist.kernels.nvidia.gemm_reduce_scatter import create_gemm_rs_context, gemm_rs
from triton_dist.testing.opinfo.base import Baseline, Operands, symmetric_all_reduces
from triton_dist.testing.opinfo.gemm import SummedGEMMOpInfo
from triton_dist.testing.opinfo.scaled import multiply, scales_of

ASYNC_TP = "torch async-TP"


class GEMMReduceScatterOpInfo(SummedGEMMOpInfo):
    """Operands ``A`` [M, K / W], ``B`` [K / W, N], optional ``bias`` [N], for W ranks. The result
    is this rank's rows of the sum over ranks, [M / W, N]."""

    collective_name, serial_name = "reduce-scatter", "matmul + reduce-scatter"
    create = staticmethod(create_gemm_rs_context)
    key_option = "reduce_st"

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return the baselines. ``collective_name`` sums a product that was computed before."""
        A, B, group, scales = operands["A"], operands["B"], ctx.group, scales_of(operands)
        product = multiply(A, B, scales)

        def serial() -> torch.Tensor:
            return libraries.reduce_scatter(multiply(A, B, scales), group)

        def async_tp() -> torch.Tensor:
            return libraries.async_tp_matmul_scatter(
                A, B, group, Scaling(**scales).row_wise_scales(A, B)
            )

        baselines = {
            **self.gemms_alone(A, B, scales),
            "reduce-scatter alone": Baseline(
                "transfer", lambda: libraries.reduce_scatter(product, group)
            ),
            self.serial_name: self.checked_baseline(serial, operands, group),
        }
        if self.has_async_tp(A, group, libraries.MATMUL_REDUCE_SCATTER):
            baselines[ASYNC_TP] = self.checked_baseline(async_tp, operands, group)
        return baselines


GEMM_RS = GEMMReduceScatterOpInfo(gemm_rs)


class GEMMAllReduceOpInfo(SummedGEMMOpInfo):
    """Operands ``A`` [M, K / W], ``B`` [K / W, N], optional ``bias`` [N], for W ranks. The result
    is the sum over ranks, [M, N], on every rank. M may be any number."""

    collective_name, serial_name = "all-reduce", "matmul + all-reduce"
    create = staticmethod(create_gemm_ar_context)
    key_option = "copy_to_local"
    returns_all_rows = True
    library_algorithms = (SymmetricCollective.name,)

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return the baselines. The all-reduce alone sums zeros in place."""
        A, B, group, scales = operands["A"], operands["B"], ctx.group, scales_of(operands)
        zeros = A.new_zeros((A.shape[0], B.shape[1]), dtype=self.io_dtypes(A.dtype)[1])

        def serial() -> torch.Tensor:
            return libraries.all_reduce(multiply(A, B, scales), group)

        symmetric = symmetric_all_reduces(
            zeros, lambda staged: multiply(A, B, scales, out=staged), group
        )
        return {
            **self.gemms_alone(A, B, scales),
            "all-reduce alone": Baseline("transfer", lambda: libraries.all_reduce(zeros, group)),
            self.serial_name: self.checked_baseline(serial, operands, group),
            **{
                f"matmul + {name}": self.checked_baseline(call, operands, group)
                for name, call in symmetric.items()
            },
        }


GEMM_AR = GEMMAllReduceOpInfo(gemm_ar)
