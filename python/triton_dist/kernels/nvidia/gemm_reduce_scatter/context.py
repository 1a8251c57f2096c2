"""Context of GEMM-ReduceScatter, and the operands that it accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common.context import (
    Check,
    GEMMContext,
    accept,
    addend_checks,
    agree_to_create,
    buffer_of,
    group_checks,
    kernel_checks,
    layout_of,
    signature_of,
)
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer, shard_elements
from triton_dist.kernels.common.gemm.spaces import row_bucket
from triton_dist.kernels.common.scatter.partials import PartialsBuffer
from triton_dist.runtime.ranks import Group, process_group_of

EXCHANGED_BYTES = 64 << 20
"""Size of the largest product that one launch multiplies and adds; above it other ways are
faster."""


class GEMMReduceScatterTensorParallelContext(GEMMContext[PartialsBuffer]):
    """Symmetric memory for GEMM-ReduceScatters of up to ``max_M`` rows of ``N`` columns. A context
    manager.

    Attributes:
        output_dtype: of A, B, the partial sums that travel, and the output.
        reduce_st: whether a call that does not say adds its tiles to the owner's sum.
        exchange: memory in which one launch multiplies and adds; exchanged_rows: of the largest
            product that it holds.
    """

    title = "GEMM-ReduceScatter"

    def __init__(
        self,
        max_M: int,
        N: int,
        output_dtype: torch.dtype,
        local_world_size: int,
        rs_stream: Any,
        reduce_st: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(group)
        self.max_M, self.N, self.output_dtype = max_M, N, output_dtype
        self.reduce_st = reduce_st
        size = self.world_size = self.num_ranks
        self.local_world_size = min(local_world_size, size)
        rows_of_each = min(max_M, EXCHANGED_BYTES // (N * output_dtype.itemsize)) // size
        self.exchanged_rows = rows_of_each * size if size > 1 else 0
        part_bytes = shard_elements(max(1, rows_of_each) * N) * output_dtype.itemsize
        with self._allocating() as own:
            self._buffer = own(
                PartialsBuffer(
                    max_M // size, N, output_dtype, reduce_st, rs_stream, group, "gemm_rs"
                )
            )
            self.exchange = own(
                ExchangeBuffer(
                    size * part_bytes if size > 1 else 1, group, "the exchange of gemm_rs",
                    disagreements=self.buffer.disagreements,
                )
            )  # fmt: skip


def create_gemm_rs_context(
    max_M: int,
    N: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    output_dtype: torch.dtype,
    rs_stream: torch.cuda.Stream | None = None,
    reduce_st: bool = False,
    *,
    tp_group: Group = None,
) -> GEMMReduceScatterTensorParallelContext:
    """Allocate what ``gemm_rs`` needs. Collective over ``tp_group`` (default: the world, else this
    process).

    Takes about twice ``max_M * N`` elements on each rank, as many again for products that one
    launch multiplies and adds, of these 128 MB at most, and as many again once row blocks are
    pushed.

    Args:
        max_M: largest number of rows of A, a multiple of ``world_size``.
        N: columns of B.
        rank, world_size: this rank in the group, and the group's size.
        local_world_size: ranks on one host; clamped to ``world_size``, which must lie on one host.
        output_dtype: of A, B and the output: fp16, bf16 or fp32.
        rs_stream: where row blocks are pushed from with ``fuse_scatter=False``; default: a stream
            of the context's own, of high priority.
        reduce_st: calls add tiles to an fp32 sum on the owner instead of keeping one partial sum of
            each rank: less memory traffic in the end, twice as much between GPUs for 16-bit dtypes,
            and not deterministic. Allocates the sums; needed for ``gemm_rs(…, reduce_st=True)``.

    Raises:
        InvalidArgument: on every rank, for a value that cannot work.
        RankDisagreement: ranks ask for different contexts.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
    """
    asked = {
        "max_M": max_M, "N": N, "output_dtype": str(output_dtype), "reduce_st": bool(reduce_st)
    }  # fmt: skip

    tp_group = process_group_of(tp_group)

    def checks() -> Iterator[Check]:
        yield from group_checks("world_size", world_size, rank, tp_group)
        yield "local_world_size", local_world_size, local_world_size >= 1, "at least 1"
        fits = max_M >= world_size and max_M % world_size == 0
        yield "max_M", max_M, fits, f"a positive multiple of world_size = {world_size}"
        yield "N", N, N >= 1, "at least 1"
        yield from kernel_checks("output_dtype", output_dtype)

    agree_to_create("create_gemm_rs_context", "a GEMM-ReduceScatter", asked, checks(), tp_group)
    return GEMMReduceScatterTensorParallelContext(
        max_M, N, output_dtype, local_world_size, rs_stream, bool(reduce_st), tp_group
    )


def check_operands(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: GEMMReduceScatterTensorParallelContext,
) -> tuple[Any, ...]:
    """All that a tuning depends on; one object for operands of the same signature.

    Raises:
        InvalidArgument, ContextFinalized: the call cannot work.
    """
    device = buffer_of(ctx, "gemm_rs", "create_gemm_rs_context").slots.epoch.device

    def row_checks() -> Iterator[Check]:
        M, size = A.shape[0], ctx.num_ranks
        fits = size <= M and M % size == 0
        yield "M", M, fits, f"a positive multiple of world_size = {size}"
        yield "M", M, ctx.max_M >= M, f"at most the context's max_M = {ctx.max_M}"

    return accept(
        ctx.accepted,
        (signature_of(A, B, bias), B.data_ptr() % 16),
        "gemm_rs",
        lambda: addend_checks(A, B, bias, row_checks, ctx.N, ctx.output_dtype, device),
        lambda: (
            row_bucket(A.shape[0] // ctx.num_ranks), ctx.N, A.shape[1], A.dtype, layout_of(B),
            A.is_contiguous(), ctx.num_ranks,
        ),
    )  # fmt: skip
