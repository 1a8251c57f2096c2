"""Context of GEMM-AllReduce, and its ways by name."""

from __future__ import annotations

import enum

import torch

from triton_dist.kernels.common.context import Check
from triton_dist.kernels.common.exchange.sums import ONE_SHOT_BYTES, PACKET_BYTES, SumBuffer
from triton_dist.kernels.common.scatter.packets import bytes_of_row
from triton_dist.kernels.common.scatter.partials import (
    Products,
    SummingContext,
    create,
    row_block_rows,
)
from triton_dist.kernels.common.scatter.reduced import ReducedPartials
from triton_dist.runtime.ranks import Group

SUMMED_BYTES = 32 << 20
"""Size of the largest product that one launch sums in two shots; a serial call sums larger ones in
several launches."""


class GEMMAllReduceMethod(enum.Enum):
    """Algorithm that sums the products."""

    ONE_SHOT = "one_shot"
    """Each tile goes to all ranks, who all add it. For few rows: a product of up to 4 MB."""
    TWO_SHOT = "two_shot"
    """Each tile goes to the rank that owns its rows, who adds it and sends the sum to all."""
    SERIAL = "serial"
    """``torch.matmul``, then our all-reduce."""
    COLLECTIVE = "collective"
    """``torch.matmul``, then the group's all-reduce: NCCL, gloo on CPU ranks."""

    __repr__ = enum.Enum.__str__


class GEMMAllReduceTensorParallelContext(SummingContext[ReducedPartials]):
    """Symmetric memory for GEMM-AllReduces of up to ``max_M`` rows of ``N`` columns. A context
    manager.

    Attributes:
        one_shot_rows: of the largest product that can go to all ranks.
        packet_rows: of the largest one that can do so in packets.
        exchanged_rows: of the largest product that is summed in two shots in one launch.
        exchange: memory in which one launch sums all: one shot, and products as a whole.
    """

    title, function, creator = "GEMM-AllReduce", "gemm_ar", "create_gemm_ar_context"

    def __init__(self, products: Products) -> None:
        super().__init__(products)
        max_M, N, output_dtype, _, group = products
        row_bytes = N * output_dtype.itemsize
        whole_lines = bytes_of_row(N, output_dtype.itemsize)
        self.one_shot_rows = min(max_M, ONE_SHOT_BYTES // row_bytes)
        self.packet_rows = min(max_M, PACKET_BYTES // whole_lines)
        rows = -(-max_M // self.num_ranks)  # of a rank
        held = min(rows, max(1, SUMMED_BYTES // row_bytes // self.num_ranks)) * self.num_ranks
        self.exchanged_rows = min(max_M, held)
        nbytes = held * whole_lines if self.num_ranks > 1 else 1
        with self._allocating() as own:
            self._buffer = own(ReducedPartials(max_M, N, output_dtype, group, self.function))
            found = self.buffer.disagreements
            self.exchange = own(SumBuffer(nbytes, group, "the exchange of gemm_ar", found))

    @staticmethod
    def rows_check(argument: str, M: int, num_ranks: int) -> Check:
        return argument, M, M >= 1, "at least 1"

    def rows_of_rank(self, M: int) -> int:
        return row_block_rows(M, self.num_ranks)


def create_gemm_ar_context(
    max_M: int,
    N: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    output_dtype: torch.dtype,
    *,
    tp_group: Group = None,
) -> GEMMAllReduceTensorParallelContext:
    """Allocate what ``gemm_ar`` needs. Collective; more about that, and errors: the docstring of
    ``triton_dist.kernels.nvidia``.

    Takes about four times ``max_M * N`` elements on each rank; for sums in one launch as much again
    of a product of up to 32 MB, or twice ``world_size`` times up to 4 MB of it, if that is more;
    and for packets four times ``world_size`` times up to 256 KB of it.

    Args:
        max_M: largest number of rows of A.
        N: columns of B.
        output_dtype: of A, B and the output: fp16, bf16 or fp32.
    """
    return create(
        GEMMAllReduceTensorParallelContext, max_M, N, rank, world_size, local_world_size,
        output_dtype, tp_group,
    )  # fmt: skip
