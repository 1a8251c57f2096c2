"""Reduce-scatter and all-gather, each in one launch. ``exchange/protocol.py`` says how they work
and what they take.

Each begins a call; then it goes through its pieces: it sends one, while it takes what has come of
the one before. Blocks of ``plan.BLOCK`` elements go round the programs. Grid: (up to
``MAX_CTAS``,). x and out:

==============  =========  ==========
kernel          x          out
==============  =========  ==========
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
    flag_of_piece,
    pieces_of,
    push_shards,
    send_copies,
    tell_ranks,
)


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
