"""Context of GEMM-ReduceScatter."""

from __future__ import annotations

from typing import Any

import torch

from triton_dist.kernels.common.context import Check
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer, bytes_of_parts
from triton_dist.kernels.common.scatter.partials import Products, SummingContext, create
from triton_dist.kernels.common.scatter.row_blocks import PartialsBuffer
from triton_dist.runtime.ranks import Group

EXCHANGED_BYTES = 64 << 20
"""Size of the largest product that one launch multiplies and adds; above it other ways are
faster."""


class GEMMReduceScatterTensorParallelContext(SummingContext[PartialsBuffer]):
    """Symmetric memory for GEMM-ReduceScatters of up to ``max_M`` rows of ``N`` columns. A context
    manager.

    Attributes:
        reduce_st: whether a call that does not say adds its tiles to the owner's sum.
        exchange: memory in which one launch multiplies and adds; exchanged_rows: of the largest
            product that it holds.
    """

    title, function, creator = "GEMM-ReduceScatter", "gemm_rs", "create_gemm_rs_context"

    def __init__(self, products: Products, reduce_st: bool, rs_stream: Any) -> None:
        super().__init__(products)
        max_M, N, output_dtype, _, group = products
        self.reduce_st, size = reduce_st, self.num_ranks
        rows_of_each = min(max_M, EXCHANGED_BYTES // (N * output_dtype.itemsize)) // size
        self.exchanged_rows = rows_of_each * size if size > 1 else 0
        nbytes = bytes_of_parts(max(1, rows_of_each) * N, output_dtype, size)
        with self._allocating() as own:
            self._buffer = own(
                PartialsBuffer(
                    max_M // size, N, output_dtype, reduce_st, rs_stream, group, self.function
                )
            )
            found, name = self.buffer.disagreements, "the exchange of gemm_rs"
            self.exchange = own(ExchangeBuffer(nbytes, group, name, disagreements=found))

    @staticmethod
    def rows_check(argument: str, M: int, num_ranks: int) -> Check:
        fits = num_ranks <= M and M % num_ranks == 0
        return argument, M, fits, f"a positive multiple of world_size = {num_ranks}"

    @staticmethod
    def whole_rows(M: int, num_ranks: int) -> int:
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
    """Allocate what ``gemm_rs`` needs. Collective; more about that, and errors: the docstring of
    ``triton_dist.kernels.nvidia``.

    Takes about twice ``max_M * N`` elements on each rank, as many again for products that one
    launch multiplies and adds, of these 128 MB at most, and as many again once row blocks are
    pushed.

    Args:
        max_M: largest number of rows of A, a multiple of ``world_size``.
        N: columns of B.
        output_dtype: of A, B and the output: fp16, bf16 or fp32.
        rs_stream: where row blocks are pushed from with ``fuse_scatter=False``; default: a stream
            of the context's own, of high priority.
        reduce_st: calls add tiles to an fp32 sum on the owner instead of keeping one partial sum of
            each rank: less memory traffic in the end, twice as much between GPUs for 16-bit dtypes,
            and not deterministic. Allocates the sums; needed for ``gemm_rs(…, reduce_st=True)``.
    """
    return create(
        GEMMReduceScatterTensorParallelContext, max_M, N, rank, world_size, local_world_size,
        output_dtype, tp_group, {"reduce_st": bool(reduce_st)}, rs_stream=rs_stream,
    )  # fmt: skip
