"""Kernels that add or copy shards while copy engines of the peers push them.

``exchange/protocol.py`` describes the arguments that this table does not list.

===============  =====  =========================================  =====================
argument         dtype  shape                                      written by
===============  =====  =========================================  =====================
x_ptr, out_ptr   of x   add: [total], [shard]; copy: [shard],      caller, this kernel
                        [total]
pushed.shards    of x   [NUM_RANKS, stride]                        copy engines of peers
pushed.arrivals  int64  [NUM_CHUNKS, NUM_RANKS], by source rank    copy engines of peers
pushed.epoch     int64  line of a slot (``slots/epochs.py``)       kernels of this rank
===============  =====  =========================================  =====================
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.protocol import (
    add_shards,
    block_begin,
    blocks_per_chunk,
    copy_shards,
)
from triton_dist.kernels.common.peers import current_flag, timeout_words_at


class Pushed(NamedTuple):
    """A slot to which copy engines push shards."""

    shards: Any
    arrivals: Any
    epoch: Any


@jit
def await_pushed(pushed, value, chunk, rank, NUM_RANKS: tl.constexpr):
    """Wait until the flags of ``chunk`` of every peer have reached ``value``. Return a token."""
    token = 0
    for step in range(1, NUM_RANKS):
        source = (rank + step) % NUM_RANKS
        flag = pushed.arrivals + chunk * NUM_RANKS + source
        token += dl.wait(flag, 1, value, timeout_words_at(pushed.epoch), True)
    return token


@jit(do_not_specialize=["call_tag", "rank"])
def kernel_add_pushed(x_ptr, out_ptr, pushed, lengths, call_tag, rank, plan: tl.constexpr):
    """Store the sum of the pushed shards and of this rank's shard of x in out.

    Each chunk is added as soon as it has arrived from all peers.
    """
    value = current_flag(pushed.epoch, call_tag)
    begin_of_shards = tl.zeros((), tl.int64)
    shard_begin = rank.to(tl.int64) * lengths.shard
    blocks = blocks_per_chunk(lengths.shard, plan)
    for chunk in range(plan.NUM_CHUNKS):
        first = chunk * blocks
        # A chunk beyond the end of the shard has no flag.
        if first * tl.num_programs(0) * plan.BLOCK < lengths.shard:
            token = await_pushed(pushed, value, chunk, rank, plan.NUM_RANKS)
            add_shards(
                x_ptr + shard_begin, out_ptr, pushed.shards, begin_of_shards, shard_begin, first,
                first + blocks, token, lengths, rank, plan,
            )  # fmt: skip


@jit(do_not_specialize=["call_tag", "rank"])
def kernel_copy_pushed(x_ptr, out_ptr, pushed, lengths, call_tag, rank, plan: tl.constexpr):
    """Copy x and the pushed shards into out. Each chunk is copied as soon as it has arrived."""
    value = current_flag(pushed.epoch, call_tag)
    begin_of_shards = tl.zeros((), tl.int64)
    blocks = blocks_per_chunk(lengths.shard, plan)
    out_shard_ptr = out_ptr + rank.to(tl.int64) * lengths.shard
    for block in range(plan.NUM_CHUNKS * blocks):
        index = block_begin(block, plan.BLOCK) + tl.arange(0, plan.BLOCK)
        mask = index < lengths.shard
        tl.store(out_shard_ptr + index, tl.load(x_ptr + index, mask=mask), mask=mask)
    for chunk in range(plan.NUM_CHUNKS):
        first = chunk * blocks
        if first * tl.num_programs(0) * plan.BLOCK < lengths.shard:
            token = await_pushed(pushed, value, chunk, rank, plan.NUM_RANKS)
            copy_shards(
                out_ptr, pushed.shards, begin_of_shards, first, first + blocks, token, lengths,
                rank, plan,
            )  # fmt: skip
