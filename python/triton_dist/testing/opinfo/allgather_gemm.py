"""OpInfo of AllGather-GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import ProductKey
from triton_dist.kernels.common.gemm.scales import FP8, Scaling
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer, AllGatherMethod
from triton_dist.kernels.nvidia.allgather_gemm import ag_gemm, create_ag_gemm_context
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.opinfo.base import (
    Baseline,
    Call,
    Cost,
    Group,
    Operands,
    meta,
    meta_with_layout,
)
from triton_dist.testing.opinfo.gemm import GEMMOpInfo, Shape
from triton_dist.testing.opinfo.scaled import gather_with_scales, in_fp32, multiply, scales_of

ASYNC_TP = "torch async-TP"


def gather_alone(A: torch.Tensor, ctx: Any) -> torch.Tensor:
    """Run only the transfer of ``ag_gemm`` or ``ag_group_gemm``; return the buffer of peers' rows.
    The call waits only for this rank's outgoing copies. All rows have arrived when all ranks have
    finished the call."""
    buffer: AllGatherBuffer = ctx.buffer
    gathered = buffer.start(A, AllGatherMethod.FULL_MESH_PUSH, 1, 1)
    buffer.finish()
    return gathered.rows


def transfer_baselines(A: torch.Tensor, ctx: Any) -> dict[str, Baseline]:
    """Return baselines for the transfer of ``ag_gemm`` or ``ag_group_gemm`` alone."""

    sent = A.view(torch.uint8) if A.dtype in FP8 else A

    def library() -> torch.Tensor:
        return libraries.all_gather_rows(sent, ctx.group)

    return {
        "all-gather alone": Baseline("transfer", library, library),
        # Its output is not checked: the buffer does not contain this rank's rows.
        "copy-engine all-gather alone": Baseline("transfer", lambda: gather_alone(A, ctx)),
    }


class AllGatherGEMMOpInfo(GEMMOpInfo):
    """Operands ``A`` [M / W, K] and ``B`` [K, N / W], for W ranks. The result is ``all_gather(A) @
    B``, [M, N / W]."""

    collective_name, serial_name = "all-gather", "all-gather + matmul"
    sums_over_ranks = False

    def operand_sizes(
        self, shape: Shape, num_ranks: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        return (shape.M // num_ranks, shape.K), (shape.K, shape.N // num_ranks)

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> Shape:
        (rows, K), columns = operands["A"].shape, operands["B"].shape[1]
        return Shape(rows * num_ranks, columns * num_ranks, K)

    def context(self, shape: Shape, dtype: torch.dtype, group: Any = None, **options: Any) -> Any:
        ranks = group_for(group)
        return create_ag_gemm_context(
            shape.M, shape.N, shape.K, self.io_dtypes(dtype)[0], ranks.rank, ranks.size,
            group=group, **options,
        )  # fmt: skip

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        A, B = in_fp32(operands["A"], operands["B"], scales_of(operands))
        rows = libraries.all_gather_rows(A, group)
        return torch.matmul(rows, B).to(self.io_dtypes(operands["A"].dtype)[1])

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return the baselines. The GEMM alone uses rows that this method gathers once."""
        A, B, group, scales = operands["A"], operands["B"], ctx.group, scales_of(operands)
        rows, all_scales = gather_with_scales(A, scales, group)

        def serial() -> torch.Tensor:
            rows, all_scales = gather_with_scales(A, scales, group)
            return multiply(rows, B, all_scales)

        calls = {self.serial_name: serial}
        if self.has_async_tp(A, group, libraries.ALL_GATHER_MATMUL):
            calls[ASYNC_TP] = lambda: libraries.async_tp_matmul(
                A, B, group, scales=Scaling(**scales).row_wise_scales(A, B)
            )
        return {
            **self.gemms_alone(rows, B, all_scales),
            **transfer_baselines(A, ctx),
            **{name: self.checked_baseline(call, operands, group) for name, call in calls.items()},
        }

    def cost(self, shape: Shape, dtype: torch.dtype, num_ranks: int) -> Cost:
        M, N, K = shape.M, shape.N / num_ranks, shape.K
        operand_dtype, result_dtype = self.io_dtypes(dtype)
        return Cost(
            operand_dtype,
            flops=2 * M * N * K,
            read_bytes=(M * K + K * N) * operand_dtype.itemsize,
            written_bytes=M * N * result_dtype.itemsize,
            link_bytes=M * K * operand_dtype.itemsize * (num_ranks - 1) / num_ranks,
        )

    def inputs_for(self, key: tuple[ProductKey, bool]) -> Call:
        (M, columns, K, dtype, layout, _, num_ranks), local_copy = key
        rows = M // num_ranks
        ctx = SimpleNamespace(
            K=K, N=columns * num_ranks, max_M=rows * num_ranks, dtype=dtype, num_ranks=num_ranks,
            checked_keys={}, buffer=SimpleNamespace(num_ranks=num_ranks),
            symm_workspace=meta(dtype, 1, K),
        )  # fmt: skip
        args = meta(dtype, rows, K), meta_with_layout(layout, dtype, K, columns), ctx
        return args, {} if local_copy else {"local_copy": False}


AG_GEMM = AllGatherGEMMOpInfo(ag_gemm)
