"""All-reduce, reduce-scatter and all-gather, each in one launch. ``exchange/protocol.py`` says how
they work and what they take.

Each begins a call; then it goes through its pieces: it sends one, while it takes what has come of
the one before. Blocks of ``plan.BLOCK`` elements go round the programs. Grid: (up to
``MAX_CTAS``,). x and out:

==============  =========  ==========
kernel          x          out
==============  =========  ==========
all-reduce      [total]    [total]
reduce-scatter  [total]    [shard]
all-gather      [shard]    [total]
==============  =========  ==========
"""

from __future__ import annotations

import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.protocol import (
    add_parts,
    await_peers,
    begin,
    copy_shards,
    first_of,
    flag_of_piece,
    pieces_of,
    push_shards,
    send_block,
    send_copies,
    tell_ranks,
)


@jit(do_not_specialize=["size", "rank"])
def kernel_all_reduce_one_shot(
    x_ptr, out_ptr, slots, peers, lengths, size, rank, plan: tl.constexpr
):
    """Every rank sends all of x to all, and adds what it gets; a shard is the whole.

    Once: a flag a program and peer, so ``NUM_PIECES`` is 1."""
    tl.static_assert(plan.NUM_PIECES == 1)
    # What needs no number of the call comes first, so that it is under way while that is counted.
    index = first_of(0, plan.BLOCK) + tl.arange(0, plan.BLOCK)
    mask = index < lengths.shard
    x = tl.load(x_ptr + index, mask=mask)
    call = begin(slots, peers, size, rank, plan)
    blocks = pieces_of(lengths.shard, plan)
    send_block(x, index, mask, slots, call.offset, lengths.room, rank, plan)
    send_copies(x_ptr, None, slots, call, 1, blocks, lengths, plan)
    value = flag_of_piece(call, 0)
    tell_ranks(call, 0, value, plan)
    token = await_peers(peers, 0, value, plan)
    add_parts(
        x_ptr, out_ptr, slots.data, call.offset, 0, 0, blocks, token, lengths, rank, plan
    )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_all_reduce_two_shot(
    x_ptr, out_ptr, slots, peers, lengths, size, rank, plan: tl.constexpr
):
    """Every rank adds its shard of x and sends the sum to all. Shards follow one another in x; the
    last ones may be shorter, or empty.

    A slot is parts [NUM_RANKS, room], then sums [NUM_RANKS, room]. While one piece of the parts
    is sent, the one before it is added and its sums sent, and the one before that copied out.
    """
    call = begin(slots, peers, size, rank, plan)
    blocks = pieces_of(lengths.shard, plan)
    sums = call.offset + plan.NUM_RANKS * lengths.room.to(tl.int64)
    own = rank.to(tl.int64) * lengths.shard
    for piece in range(plan.NUM_PIECES + 2):
        first = piece * blocks
        if piece < plan.NUM_PIECES:
            push_shards(x_ptr, slots, call, first, first + blocks, lengths, plan)
            tell_ranks(call, 0, flag_of_piece(call, piece), plan)
        if (piece >= 1) & (piece <= plan.NUM_PIECES):
            token = await_peers(peers, 0, flag_of_piece(call, piece - 1), plan)
            add_parts(
                x_ptr + own, out_ptr + own, slots.data, call.offset, own, first - blocks, first,
                token, lengths, rank, plan, slots, sums,
            )  # fmt: skip
            tell_ranks(call, 1, flag_of_piece(call, piece - 1), plan)
        if piece >= 2:
            token = await_peers(peers, 1, flag_of_piece(call, piece - 2), plan)
            copy_shards(
                out_ptr, slots.data, sums, first - 2 * blocks, first - blocks, token, lengths,
                rank, plan,
            )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_reduce_scatter(x_ptr, out_ptr, slots, peers, lengths, size, rank, plan: tl.constexpr):
    """Every rank adds its shard of x into out."""
    call = begin(slots, peers, size, rank, plan)
    blocks = pieces_of(lengths.shard, plan)
    own = rank.to(tl.int64) * lengths.shard
    for piece in range(plan.NUM_PIECES + 1):
        first = piece * blocks
        if piece < plan.NUM_PIECES:
            push_shards(x_ptr, slots, call, first, first + blocks, lengths, plan)
            tell_ranks(call, 0, flag_of_piece(call, piece), plan)
        if piece >= 1:
            token = await_peers(peers, 0, flag_of_piece(call, piece - 1), plan)
            add_parts(
                x_ptr + own, out_ptr, slots.data, call.offset, own, first - blocks, first, token,
                lengths, rank, plan,
            )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_all_gather(x_ptr, out_ptr, slots, peers, lengths, size, rank, plan: tl.constexpr):
    """Every rank sends x to all and copies what it gets into out."""
    call = begin(slots, peers, size, rank, plan)
    blocks = pieces_of(lengths.shard, plan)
    for piece in range(plan.NUM_PIECES + 1):
        first = piece * blocks
        if piece < plan.NUM_PIECES:
            own_ptr = out_ptr + rank.to(tl.int64) * lengths.shard
            send_copies(x_ptr, own_ptr, slots, call, first, first + blocks, lengths, plan)
            tell_ranks(call, 0, flag_of_piece(call, piece), plan)
        if piece >= 1:
            token = await_peers(peers, 0, flag_of_piece(call, piece - 1), plan)
            copy_shards(
                out_ptr, slots.data, call.offset, first - blocks, first, token, lengths, rank, plan
            )  # fmt: skip
