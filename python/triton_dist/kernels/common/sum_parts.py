"""The sum of the parts of the own rows after a GEMM that adds nothing itself
(``warp_specialized_scatter.py``).

A launch of its own, limited by memory: each program takes every so many-th block of the rows, waits
until the block is there from every peer, reads all parts of it and adds them as ``add_partials``
does, in fp32 in the order of ranks; so the bits are the same. The GEMM before it is done: the own
part is there, and all multiprocessors are free.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.scattered_tiles import await_partials


@jit(do_not_specialize=["size", "chunk_size", "rank"])
def kernel_sum_parts(
    own_ptr,
    partials_ptr,
    bias_ptr,
    c_ptr,
    arrivals_ptr,
    epoch_ptr,
    size,
    N,
    slot_stride,
    chunk_size,
    rank,
    NUM_RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    VECTORS: tl.constexpr,
    VECTOR_SIZE: tl.constexpr,
):
    """Sum ``size`` elements, the rows of a slab of ``N`` columns, over all ranks into C.

    Rank r's part begins ``r * slot_stride`` elements from ``partials_ptr`` on, the own one at
    ``own_ptr``. A chunk of ``chunk_size`` elements has flag ``[chunk * NUM_RANKS + source]``.
    ``size`` is a multiple of VECTOR_SIZE; a block has VECTORS times as much.
    """
    BLOCK: tl.constexpr = VECTORS * VECTOR_SIZE
    vector = tl.arange(0, VECTORS)
    inside = vector[:, None] * VECTOR_SIZE + tl.arange(0, VECTOR_SIZE)[None, :]
    awaited = -1
    token = 0
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        begin = tl.cast(block, tl.int64) * BLOCK
        left = tl.cast(min(size - begin, BLOCK), tl.int32)
        # The last chunk that the block has a part of: those of a peer come in order.
        chunk = tl.cast((begin + left - 1) // chunk_size, tl.int32)
        if chunk != awaited:
            token = await_partials(arrivals_ptr, epoch_ptr, chunk, rank, NUM_RANKS)
            awaited = chunk
        # Before the multiplication, which says that the result is aligned.
        first = tl.cast(dl.consume_token(block, token), tl.int64) * BLOCK
        # Of whole vectors, so that a mask is one for all of a vector.
        mask = (vector < left // VECTOR_SIZE)[:, None]
        # Not from L1, where what the last use left may be. All loads come before the first add, so
        # that they are in flight together.
        parts = tl.tuple([])
        for source in tl.static_range(NUM_RANKS):
            part_ptr = partials_ptr + source * slot_stride.to(tl.int64)
            part_ptr = tl.where(rank == source, own_ptr, part_ptr) + first
            part = tl.load(part_ptr + inside, mask=mask, other=0.0, cache_modifier=".cg")
            parts = parts + (part,)  # noqa: RUF005  # a star is no Triton
        total = parts[0].to(tl.float32)
        for source in tl.static_range(1, NUM_RANKS):
            total += parts[source].to(tl.float32)
        if HAS_BIAS:
            column = (tl.cast(begin % N, tl.int32) + inside) % N
            total += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(c_ptr + begin + inside, total.to(c_ptr.dtype.element_ty), mask=mask)
