"""Context of GEMM-AllReduce, and its algorithms as an enum."""

from __future__ import annotations

import enum

import torch

from triton_dist.kernels.common.context import Check
from triton_dist.kernels.common.exchange.sums import ONE_SHOT_BYTES, PACKET_BYTES, SumBuffer
from triton_dist.kernels.common.scatter.packets import bytes_of_row
from triton_dist.kernels.common.scatter.partials import (
    ProductLimits,
    SummingContext,
    create,
    row_block_rows,
)
from triton_dist.kernels.common.scatter.reduced import ReducedPartials
from triton_dist.runtime.ranks import Group

SUMMED_BYTES = 32 << 20
"""Largest product, in bytes, that one launch sums in two shots. ``"serial"`` sums larger products
in several launches."""


class GEMMAllReduceMethod(enum.Enum):
    """Algorithm that sums the products over the ranks."""

    ONE_SHOT = "one_shot"
    """Each tile goes to all ranks, which all add it. For few rows: products of up to 4 MB."""
    TWO_SHOT = "two_shot"
    """Each tile goes to the owner of its rows, which adds it and sends the sum to all ranks."""
    SERIAL = "serial"
    """``torch.matmul``, then our all-reduce."""
    COLLECTIVE = "collective"
    """``torch.matmul``, then the group's all-reduce (NCCL; gloo on CPU ranks)."""

    __repr__ = enum.Enum.__str__


class GEMMAllReduceTensorParallelContext(SummingContext[ReducedPartials]):
    """Symmetric memory for ``gemm_ar`` with up to ``max_M`` rows of ``N`` columns.

    A context manager.

    Attributes:
        one_shot_rows: largest M of ``"one_shot"``.
        packet_rows: largest M of ``"one_shot_in_packets"``.
        exchanged_rows: largest M of ``"two_shot_in_one_launch"``.
        exchange: memory of the algorithms that sum in one launch, and of ``"serial"``.
    """

    title, function, creator = "GEMM-AllReduce", "gemm_ar", "create_gemm_ar_context"

    def __init__(self, products: ProductLimits) -> None:
        super().__init__(products)
        max_M, N, output_dtype, _, group = products
        row_bytes = N * output_dtype.itemsize
        whole_lines = bytes_of_row(N, output_dtype.itemsize)
        self.one_shot_rows = min(max_M, ONE_SHOT_BYTES // row_bytes)
        self.packet_rows = min(max_M, PACKET_BYTES // whole_lines)
        rows = -(-max_M // self.num_ranks)  # rows that one rank owns
        whole_rows = min(rows, max(1, SUMMED_BYTES // row_bytes // self.num_ranks)) * self.num_ranks
        self.exchanged_rows = min(max_M, whole_rows)
        nbytes = whole_rows * whole_lines if self.num_ranks > 1 else 1
        with self.allocating() as add:
            self.buffer = add(ReducedPartials(max_M, N, output_dtype, group, self.function))
            disagreements = self.buffer.disagreements
            self.exchange = add(SumBuffer(nbytes, group, "the exchange of gemm_ar", disagreements))

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
    """Create the context of ``gemm_ar``. Collective over ``tp_group``.

    Allocates per rank about 4 * ``max_M`` * N elements. With P = ``max_M`` * N elements in bytes,
    sums in one launch need the larger of 4 * min(P, 32 MB) and 2 * ``world_size`` * min(P, 4 MB).
    Packets need 4 * ``world_size`` * min(P, 256 KB), from three ranks on at least 8 * min(P, 2 MB).

    Args:
        max_M: largest number of rows of A.
        N: number of columns of B.
        rank: this rank in the group.
        world_size: number of ranks in the group.
        local_world_size: ranks on one host, clamped to ``world_size``.
        output_dtype: dtype of the output, and of A and B unless they are fp8: fp16, bf16 or fp32.
        tp_group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument: a value is out of range; raised on every rank.
        RankDisagreement: ranks pass different sizes or dtypes.
        SymmetricMemoryFull: a rank has too little memory; raised on every rank.
        DeviceUnavailable: CPU ranks whose kernels were not decorated for the interpreter.
    """
    return create(
        GEMMAllReduceTensorParallelContext, max_M, N, rank, world_size, local_world_size,
        output_dtype, tp_group,
    )  # fmt: skip
