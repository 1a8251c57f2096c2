"""All-reduce, reduce-scatter and all-gather, each in one launch (``exchange/protocol.py`` says
how); and what adds or copies shards that copy engines push.

A *shard* is what one rank owns, of ``elements`` elements; in a slot it has ``shard_elements``.
``total`` is the length of the whole: x of an all-reduce and a reduce-scatter, out of an
all-gather. ``size`` is what ranks have to agree on, and flags carry. Blocks of ``BLOCK`` elements
go round the programs. Grid: (up to ``MAX_CTAS``,).
"""

from __future__ import annotations

import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.protocol import (
    add_parts,
    await_peers,
    await_pushed,
    begin_call,
    copy_shards,
    first_of,
    flag_of_piece,
    flags_at_ranks,
    pieces_of,
    push_shards,
    send_block,
    send_copies,
    slot_offset,
    tell_ranks,
)
from triton_dist.kernels.common.peers import flag_of


@jit(do_not_specialize=["size", "rank"])
def kernel_all_reduce_one_shot(
    x_ptr,
    out_ptr,
    slots_ptr,
    slots_table,
    arrivals_ptr,
    arrivals_table,
    calls_ptr,
    guard_ptr,
    slot_elements,
    shard_elements,
    elements,
    total,
    size,
    rank,
    NUM_RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIECES: tl.constexpr,
):
    """Every rank sends all of x [total] to all, and adds what it gets; ``elements`` is ``total``.

    Once: a flag a program and peer, so ``NUM_PIECES`` is 1."""
    tl.static_assert(NUM_PIECES == 1)
    # What needs no number of the call comes first, so that it is under way while that is counted.
    flags = flags_at_ranks(arrivals_ptr, arrivals_table, rank, NUM_RANKS, LANES)
    index = first_of(0, BLOCK) + tl.arange(0, BLOCK)
    mask = index < elements
    values = tl.load(x_ptr + index, mask=mask)
    epoch = begin_call(calls_ptr)
    offset = slot_offset(epoch, slot_elements)
    blocks = pieces_of(elements, BLOCK, 1)
    send_block(values, index, mask, slots_ptr, slots_table, offset, shard_elements, rank, NUM_RANKS)
    send_copies(
        x_ptr, slots_ptr, out_ptr, slots_table, offset, elements, shard_elements, 1, blocks, rank,
        NUM_RANKS, BLOCK, False,
    )  # fmt: skip
    value = flag_of_piece(epoch, 1, size)
    tell_ranks(flags, 0, value, NUM_RANKS, LANES)
    token = await_peers(arrivals_ptr, guard_ptr, 0, value, NUM_RANKS, LANES)
    add_parts(
        x_ptr, slots_ptr, out_ptr, slots_table, offset, offset, 0, 0, elements, total,
        shard_elements, 0, blocks, token, rank, NUM_RANKS, BLOCK, False,
    )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_all_reduce_two_shot(
    x_ptr,
    out_ptr,
    slots_ptr,
    slots_table,
    arrivals_ptr,
    arrivals_table,
    calls_ptr,
    guard_ptr,
    slot_elements,
    shard_elements,
    elements,
    total,
    size,
    rank,
    NUM_RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIECES: tl.constexpr,
):
    """Every rank adds its shard of x [total] and sends the sum to all. Shards follow one another
    in x; the last ones may be shorter, or empty.

    A slot is parts [NUM_RANKS, shard], then sums [NUM_RANKS, shard]. While one piece of the parts
    is sent, the one before it is added and its sums sent, and the one before that copied out.
    """
    flags = flags_at_ranks(arrivals_ptr, arrivals_table, rank, NUM_RANKS, LANES)
    epoch = begin_call(calls_ptr)
    offset = slot_offset(epoch, slot_elements)
    gathered_offset = offset + NUM_RANKS * shard_elements.to(tl.int64)
    blocks = pieces_of(elements, BLOCK, NUM_PIECES)
    own = rank.to(tl.int64) * elements
    for piece in range(NUM_PIECES + 2):
        first = piece * blocks
        if piece < NUM_PIECES:
            push_shards(
                x_ptr, slots_ptr, slots_table, offset, elements, total, shard_elements,
                first, first + blocks, rank, NUM_RANKS, BLOCK,
            )  # fmt: skip
            tell_ranks(flags, 0, flag_of_piece(epoch, piece + 1, size), NUM_RANKS, LANES)
        if (piece >= 1) & (piece <= NUM_PIECES):
            token = await_peers(
                arrivals_ptr, guard_ptr, 0, flag_of_piece(epoch, piece, size), NUM_RANKS, LANES
            )
            add_parts(
                x_ptr, slots_ptr, out_ptr, slots_table, offset, gathered_offset, own, own,
                elements, total, shard_elements, first - blocks, first, token, rank,
                NUM_RANKS, BLOCK, True,
            )  # fmt: skip
            tell_ranks(flags, 1, flag_of_piece(epoch, piece, size), NUM_RANKS, LANES)
        if piece >= 2:
            token = await_peers(
                arrivals_ptr, guard_ptr, 1, flag_of_piece(epoch, piece - 1, size), NUM_RANKS, LANES
            )
            copy_shards(
                slots_ptr, out_ptr, gathered_offset, elements, total, shard_elements,
                first - 2 * blocks, first - blocks, token, rank, NUM_RANKS, BLOCK,
            )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_reduce_scatter(
    x_ptr,
    out_ptr,
    slots_ptr,
    slots_table,
    arrivals_ptr,
    arrivals_table,
    calls_ptr,
    guard_ptr,
    slot_elements,
    shard_elements,
    elements,
    total,
    size,
    rank,
    NUM_RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIECES: tl.constexpr,
):
    """Every rank adds its shard of x [total] into out [elements]; ``total`` is ``NUM_RANKS *
    elements``."""
    flags = flags_at_ranks(arrivals_ptr, arrivals_table, rank, NUM_RANKS, LANES)
    epoch = begin_call(calls_ptr)
    offset = slot_offset(epoch, slot_elements)
    blocks = pieces_of(elements, BLOCK, NUM_PIECES)
    own = rank.to(tl.int64) * elements
    for piece in range(NUM_PIECES + 1):
        first = piece * blocks
        if piece < NUM_PIECES:
            push_shards(
                x_ptr, slots_ptr, slots_table, offset, elements, total, shard_elements,
                first, first + blocks, rank, NUM_RANKS, BLOCK,
            )  # fmt: skip
            tell_ranks(flags, 0, flag_of_piece(epoch, piece + 1, size), NUM_RANKS, LANES)
        if piece >= 1:
            token = await_peers(
                arrivals_ptr, guard_ptr, 0, flag_of_piece(epoch, piece, size), NUM_RANKS, LANES
            )
            add_parts(
                x_ptr, slots_ptr, out_ptr, slots_table, offset, offset, own, 0, elements, total,
                shard_elements, first - blocks, first, token, rank, NUM_RANKS, BLOCK, False,
            )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_all_gather(
    x_ptr,
    out_ptr,
    slots_ptr,
    slots_table,
    arrivals_ptr,
    arrivals_table,
    calls_ptr,
    guard_ptr,
    slot_elements,
    shard_elements,
    elements,
    total,
    size,
    rank,
    NUM_RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIECES: tl.constexpr,
):
    """Every rank sends x [elements] to all and copies what it gets into out [total]; ``total`` is
    ``NUM_RANKS * elements``."""
    flags = flags_at_ranks(arrivals_ptr, arrivals_table, rank, NUM_RANKS, LANES)
    epoch = begin_call(calls_ptr)
    offset = slot_offset(epoch, slot_elements)
    blocks = pieces_of(elements, BLOCK, NUM_PIECES)
    for piece in range(NUM_PIECES + 1):
        first = piece * blocks
        if piece < NUM_PIECES:
            send_copies(
                x_ptr, slots_ptr, out_ptr + rank.to(tl.int64) * elements, slots_table, offset,
                elements, shard_elements, first, first + blocks, rank, NUM_RANKS, BLOCK, True,
            )  # fmt: skip
            tell_ranks(flags, 0, flag_of_piece(epoch, piece + 1, size), NUM_RANKS, LANES)
        if piece >= 1:
            token = await_peers(
                arrivals_ptr, guard_ptr, 0, flag_of_piece(epoch, piece, size), NUM_RANKS, LANES
            )
            copy_shards(
                slots_ptr, out_ptr, offset, elements, total, shard_elements,
                first - blocks, first, token, rank, NUM_RANKS, BLOCK,
            )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_add_pushed(
    x_ptr,
    out_ptr,
    shards_ptr,
    arrivals_ptr,
    epoch_ptr,
    shard_elements,
    elements,
    total,
    size,
    rank,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIECES: tl.constexpr,
):
    """Add the shards that copy engines push, and the own one of x [total], into out [elements], a
    piece at a time as it comes."""
    value = flag_of(epoch_ptr, size)
    offset = tl.zeros((), tl.int64)
    own = rank.to(tl.int64) * elements
    blocks = pieces_of(elements, BLOCK, NUM_PIECES)
    for piece in range(NUM_PIECES):
        first = piece * blocks
        if first * tl.num_programs(0) * BLOCK < elements:
            token = await_pushed(arrivals_ptr, epoch_ptr, value, piece, rank, NUM_RANKS)
            add_parts(
                x_ptr, shards_ptr, out_ptr, shards_ptr, offset, offset, own, 0, elements, total,
                shard_elements, first, first + blocks, token, rank, NUM_RANKS, BLOCK, False,
            )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_copy_pushed(
    x_ptr,
    out_ptr,
    shards_ptr,
    arrivals_ptr,
    epoch_ptr,
    shard_elements,
    elements,
    total,
    size,
    rank,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIECES: tl.constexpr,
):
    """Copy x [elements], and the shards that copy engines push as they come, into out [total]."""
    value = flag_of(epoch_ptr, size)
    offset = tl.zeros((), tl.int64)
    blocks = pieces_of(elements, BLOCK, NUM_PIECES)
    own_ptr = out_ptr + rank.to(tl.int64) * elements
    send_copies(
        x_ptr, shards_ptr, own_ptr, shards_ptr, offset, elements, shard_elements, 0,
        NUM_PIECES * blocks, rank, 1, BLOCK, True,
    )  # fmt: skip
    for piece in range(NUM_PIECES):
        first = piece * blocks
        if first * tl.num_programs(0) * BLOCK < elements:
            token = await_pushed(arrivals_ptr, epoch_ptr, value, piece, rank, NUM_RANKS)
            copy_shards(
                shards_ptr, out_ptr, offset, elements, total, shard_elements,
                first, first + blocks, token, rank, NUM_RANKS, BLOCK,
            )  # fmt: skip
