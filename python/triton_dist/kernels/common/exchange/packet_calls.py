"""Device functions for kernels whose programs send and receive packets independently.

The number of a call is its epoch. Each program stores the epoch of the last call in its own word,
and reads only this word.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.packets import packet_offset
from triton_dist.kernels.common.exchange.protocol import LINE_WORDS, MAX_CTAS


@jit
def next_epoch(epochs_ptr):
    """Return the number of this call, from 1.

    A word per program needs no barrier here; a shared atomic counter would.
    """
    return tl.load(epochs_ptr + tl.program_id(0)) + 1


@jit
def end_call(epochs_ptr, epoch):
    """Store ``epoch`` in this program's word of ``epochs_ptr`` [MAX_CTAS].

    A later call may have more programs. The programs of this grid therefore also set the words that
    have no program now.
    """
    tl.debug_barrier()  # all threads have read the word
    for word in range(tl.program_id(0), MAX_CTAS, tl.num_programs(0)):
        tl.store(epochs_ptr + word, epoch)


@jit
def peer_ranks(rank, NUM_RANKS: tl.constexpr):
    """Return the NUM_RANKS - 1 other ranks in increasing order."""
    peers = tl.tuple([])
    for peer in tl.static_range(NUM_RANKS - 1):
        peers = peers + (peer + (peer >= rank).to(tl.int32),)  # noqa: RUF005
    return peers


@jit
def received_shards(packets, epoch, peers, NUM_RANKS: tl.constexpr, SLOTS: tl.constexpr):
    """Return pointers to the packets that each peer sends to this rank in call ``epoch``."""
    shards = tl.tuple([])
    for peer in tl.static_range(NUM_RANKS - 1):
        offset = packet_offset(epoch, peers[peer], packets.shard_words, NUM_RANKS, SLOTS)
        shards = shards + (packets.words + offset,)  # noqa: RUF005
    return shards


@jit
def clear_packets(shard_ptr, line, mask):
    """Set packet lines to 0. Other threads may still read them, so call a barrier before."""
    word = line[:, None] * LINE_WORDS + tl.arange(0, LINE_WORDS)[None, :]
    tl.store(shard_ptr + word, tl.zeros(word.shape, tl.int64), mask=mask[:, None])
