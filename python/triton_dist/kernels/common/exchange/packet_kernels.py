"""All-reduce of few bytes in one launch, by words that need no flag (``exchange/packets.py`` says
how)."""

from __future__ import annotations

import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.packets import (
    LINE_BYTES,
    add_lines,
    await_lines,
    clear_lines,
    part_offset,
    payload_of,
    peers_at,
    send_lines,
    tag_of,
)
from triton_dist.kernels.common.exchange.protocol import begin_call, first_of


@jit(do_not_specialize=["size", "rank"])
def kernel_all_reduce_packets(
    x_ptr,
    out_ptr,
    packets_ptr,
    packets_table,
    calls_ptr,
    guard_ptr,
    part_words,
    elements,
    size,
    rank,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every rank sends all of x [elements] to all, and adds what it gets; ``size`` is what ranks
    have to agree on.

    Blocks of ``BLOCK`` elements go round the programs. Grid: (up to ``MAX_CTAS``,).
    """
    LINES: tl.constexpr = BLOCK * x_ptr.dtype.element_ty.primitive_bitwidth // 8 // LINE_BYTES
    PER_LINE: tl.constexpr = BLOCK // LINES
    # What needs no number of the call comes first, so that it is under way while that is counted.
    targets = peers_at(packets_ptr, packets_table, rank, NUM_RANKS)
    index = first_of(0, BLOCK) + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + index, mask=index < elements, other=0.0)
    epoch = begin_call(calls_ptr)
    tag = tag_of(epoch, size)
    offset = part_offset(epoch, rank, part_words, NUM_RANKS)
    # Of this program's share, not of the largest: no flag has to say that there was none.
    blocks = tl.cdiv(tl.cdiv(elements, BLOCK) - tl.program_id(0), tl.num_programs(0))
    for block in range(blocks):
        if block > 0:
            index = first_of(block, BLOCK) + tl.arange(0, BLOCK)
            values = tl.load(x_ptr + index, mask=index < elements, other=0.0)
        line = first_of(block, LINES) + tl.arange(0, LINES)
        send_lines(targets, offset, payload_of(values), line, line * PER_LINE < elements, tag)
    for block in range(blocks):
        line = first_of(block, LINES) + tl.arange(0, LINES)
        there = line * PER_LINE < elements
        index = first_of(block, BLOCK) + tl.arange(0, BLOCK)
        mask = index < elements
        own = payload_of(tl.load(x_ptr + index, mask=mask, other=0.0))
        payloads = await_lines(
            packets_ptr, guard_ptr, epoch, tag, part_words, line, there, rank, NUM_RANKS
        )
        sums = add_lines(own, payloads, rank, NUM_RANKS, x_ptr.dtype.element_ty)
        tl.store(out_ptr + index, sums.to(out_ptr.dtype.element_ty), mask=mask)
        clear_lines(packets_ptr, epoch, part_words, line, there, rank, NUM_RANKS)
