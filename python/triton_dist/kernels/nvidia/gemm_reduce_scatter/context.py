"""Context of GEMM-ReduceScatter."""

from __future__ import annotations

from typing import Any

import torch

from triton_dist.kernels.common.context import Check
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer, bytes_of_slot
from triton_dist.kernels.common.scatter.partials import ProductLimits, SummingContext, create
from triton_dist.kernels.common.scatter.row_blocks import PartialsBuffer
from triton_dist.runtime.ranks import Group

EXCHANGED_BYTES = 64 << 20
"""Largest product, in bytes, of ``"one_launch"`` and ``"serial"``. Other algorithms are faster
above."""


class GEMMReduceScatterTensorParallelContext(SummingContext[PartialsBuffer]):
    """Symmetric memory for ``gemm_rs`` with up to ``max_M`` rows of ``N`` columns.

    A context manager.

    Attributes:
        reduce_st: default of ``gemm_rs(reduce_st=…)``.
        exchange: memory of ``"one_launch"`` and ``"serial"``.
        exchanged_rows: largest M that ``exchange`` can hold.
    """

    title, function, creator = "GEMM-ReduceScatter", "gemm_rs", "create_gemm_rs_context"

    def __init__(self, products: ProductLimits, reduce_st: bool, rs_stream: Any) -> None:
        super().__init__(products)
        max_M, N, output_dtype, _, group = products
        self.reduce_st, num_ranks = reduce_st, self.num_ranks
        rows_of_each = min(max_M, EXCHANGED_BYTES // (N * output_dtype.itemsize)) // num_ranks
        self.exchanged_rows = rows_of_each * num_ranks if num_ranks > 1 else 0
        nbytes = bytes_of_slot(max(1, rows_of_each) * N, output_dtype, num_ranks)
        with self.allocating() as add:
            self.buffer = add(
                PartialsBuffer(
                    max_M // num_ranks, N, output_dtype, reduce_st, rs_stream, group, self.function
                )
            )
            disagreements, name = self.buffer.disagreements, "the exchange of gemm_rs"
            self.exchange = add(ExchangeBuffer(nbytes, group, name, disagreements=disagreements))

    @staticmethod
    def rows_check(argument: str, M: int, num_ranks: int) -> Check:
        fits = num_ranks <= M and M % num_ranks == 0
        return argument, M, fits, f"a positive multiple of world_size = {num_ranks}"

    @staticmethod
    def round_down_rows(M: int, num_ranks: int) -> int:
        return M // num_ranks * num_ranks

    def rows_of_rank(self, M: int) -> int:
        return M // self.num_ranks


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
    """Create the context of ``gemm_rs``. Collective over ``tp_group``.

    Allocates per rank about 2 * ``max_M`` * N elements. Products that one launch exchanges need
    another 2 * ``max_M`` * N elements (at most 128 MB). The first call of ``"copy_engine"``
    allocates another ``max_M`` * N elements.

    Args:
        max_M: largest number of rows of A, a multiple of ``world_size``.
        N: number of columns of B.
        rank: this rank in the group.
        world_size: number of ranks in the group.
        local_world_size: ranks on one host, clamped to ``world_size``.
        output_dtype: dtype of the output, and of A and B unless they are fp8: fp16, bf16 or fp32.
        rs_stream: stream of the copy-engine pushes; default: a high-priority stream of the context.
        reduce_st: allocate fp32 sums, and by default add each tile to the owner's sum instead of
            storing one addend per rank. This needs less memory traffic at the end but moves twice
            the bytes between GPUs for 16-bit dtypes, and is not deterministic. Required for
            ``gemm_rs(…, reduce_st=True)``.
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
        GEMMReduceScatterTensorParallelContext, max_M, N, rank, world_size, local_world_size,
        output_dtype, tp_group, {"reduce_st": bool(reduce_st)}, rs_stream=rs_stream,
    )  # fmt: skip
