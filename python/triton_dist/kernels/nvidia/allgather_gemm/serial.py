"""AllGather-GEMM in two steps, for few rows: one launch brings all shards, then ``torch.matmul``.

The launch is an exchange (``kernels/common/exchange/protocol.py``): programs store the own shard
into every peer's memory, tell it so, and copy out what they get. No barrier, and nothing to be
told after the product, since what is multiplied lies in memory of the call's own.
"""

from __future__ import annotations

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.exchange.buffer import Exchange, ExchangeBuffer, shard_elements
from triton_dist.kernels.common.exchange.kernels import kernel_all_gather
from triton_dist.kernels.common.exchange.shapes import MAX_CTAS, SMALL_SHAPES, Shape
from triton_dist.kernels.common.gemm.rows import row_bucket
from triton_dist.kernels.common.launch import Launch

GATHERED_BYTES = 16 << 20
"""Of the most rows that are gathered so: on 4 H200 16 MB take 46 us. The transfer of more is worth
hiding behind the product."""
COMM_SMS = (8, 16, 32, 64, 128)
"""Programs that a tuning tries."""
_SMALL_BLOCK, _LARGE_BLOCK = 2048, 8192  # bytes


def exchanged_rows(max_M: int, K: int, dtype: torch.dtype, num_ranks: int) -> int:
    """The largest M that an exchange serves in a context for up to ``max_M`` rows of ``K``."""
    if num_ranks == 1:  # which exchanges nothing
        return max_M
    return min(max_M, GATHERED_BYTES // (K * dtype.itemsize)) // num_ranks * num_ranks


def slot_bytes(rows: int, K: int, dtype: torch.dtype, num_ranks: int) -> int:
    """What a slot has to hold for an M of up to ``rows``."""
    if num_ranks == 1 or rows == 0:
        return 1
    return num_ranks * shard_elements(rows // num_ranks * K) * dtype.itemsize


def shape_for(shard_bytes: int, num_comm_sms: int | None, num_chunks: int) -> Shape:
    """How the launch for shards of so many bytes is laid out: a program moves at a time what it has
    to move of a chunk, between 2 KB and 8 KB. ``None``: as many programs as the all-gather alone
    was fastest with on 4 H200, for shards of 4 KB to 4 MB.

    Raises:
        InvalidArgument: so many programs cannot be.
    """
    if num_comm_sms is None:
        at_once = (each for each in SMALL_SHAPES if each.num_ctas * each.block_bytes >= shard_bytes)
        num_comm_sms = next(at_once, SMALL_SHAPES[-1]).num_ctas
    elif not 1 <= num_comm_sms <= MAX_CTAS:
        raise InvalidArgument("ag_gemm", "num_comm_sms", num_comm_sms, f"1 to {MAX_CTAS}")
    share = -(-shard_bytes // (num_comm_sms * num_chunks))
    block_bytes = min(_LARGE_BLOCK, max(_SMALL_BLOCK, 1 << (share - 1).bit_length()))
    return Shape(num_comm_sms, block_bytes, num_chunks)


def gather_launch(
    own: torch.Tensor, rows: torch.Tensor, buffer: ExchangeBuffer, shape: Shape
) -> Launch:
    """The launch that brings ``own`` [M_per_rank, K] of every rank to ``rows`` [M, K]."""
    return buffer.launch(_exchange(own, buffer, shape), own.view(-1), rows.view(-1))


def gather(own: torch.Tensor, buffer: ExchangeBuffer, shape: Shape) -> torch.Tensor:
    """``own`` [M_per_rank, K] of all ranks, [M, K], a new tensor."""
    rows = gathered_like(own, buffer)
    buffer.run(_exchange(own, buffer, shape), own.view(-1), rows.view(-1))
    return rows


def gathered_like(own: torch.Tensor, buffer: ExchangeBuffer) -> torch.Tensor:
    """A new tensor for the rows of all ranks."""
    return own.new_empty((own.shape[0] * buffer.num_ranks, own.shape[1]))


def fits_serial(A: torch.Tensor, num_comm_sms: int | None, num_ranks: int) -> bool:
    """Whether so many programs of ``COMM_SMS`` are worth trying for all rows of the bucket of A
    [M_per_rank, K]: half as many would not move them at once. It does not go by the rows of a
    context: others have the same key."""
    shard_bytes = row_bucket(A.shape[0]) * A.shape[1] * A.element_size()
    if num_ranks == 1 or shard_bytes * num_ranks > GATHERED_BYTES:
        return False
    if num_comm_sms is None or num_comm_sms == COMM_SMS[0]:  # something has to be left
        return True
    return shard_bytes > num_comm_sms // 2 * _SMALL_BLOCK


def _exchange(own: torch.Tensor, buffer: ExchangeBuffer, shape: Shape) -> Exchange:
    total = own.numel() * buffer.num_ranks
    return Exchange(kernel_all_gather, own.numel(), total, shape, own.shape[0])
