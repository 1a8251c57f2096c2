"""Rows that are sent in the order in which a grouped product first uses them.

The product goes through its experts one after another, so that each one's weights are read once.
Sent in their own order, rows of its first experts come last as often as first, and it waits for all
of them. Here every rank sends its tokens by their *first expert*, the lowest of their ids; tokens
of nobody's come last. The rows of one expert are then those that are there soonest, and the product
goes on while the rest travels. Rows land at their own places, whatever the order, so the product
reads them as always.

Rows are picked, so programs of the product's grid send them, not copy engines: those with the
lowest numbers, before they turn to tiles (``gemm/units.py`` says why nobody waits in a circle).

Words
    chunk: so many rows, in the order of sending, that share a flag. A tile of an expert waits for
    the chunks that hold any token whose first expert is that one or one before.
    group: as in ``moe/routing.py``: peers to whom this rank is an early source get all of its
    chunks before the others get any. *stage*: a chunk of a group; they follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.tile import shard_in_arrival_order
from triton_dist.kernels.common.launch import Launch
from triton_dist.kernels.common.moe.routing import ceil_div
from triton_dist.kernels.common.peers import GatheredShards, epoch_at, flag_of

_BLOCK, _EXPERTS = 256, 8
"""Tokens that a program looks at, and experts that it counts, at a time."""
_PLACED = 16
"""Tokens that a program places."""
_CHUNK_ALIGNMENT = 16
# A piece is what a program reads, then writes to every peer.
_PIECE_ROWS = tl.constexpr(32)
_PIECE_COLUMNS = tl.constexpr(256)
# Peers that are looked at, and told, at once; and flags of a source.
_PEERS = tl.constexpr(16)
_FLAGS = tl.constexpr(32)


@jit
def first_experts(ids_ptr, token, there, E, TOPK: tl.constexpr):
    """The lowest id of each token; E if all are nobody's, E + 1 where none is ``there``."""
    first = tl.where(there, E, E + 1)
    for choice in tl.static_range(TOPK):
        expert = tl.load(ids_ptr + token * TOPK + choice, mask=there, other=-1)
        # As they are, since an id may have more than 32 bits.
        is_one = (expert >= 0) & (expert < E)
        first = tl.minimum(first, tl.where(is_one, expert, E + 1).to(tl.int32))
    return first


@jit(do_not_specialize=["rows", "rank", "E"])
def kernel_first_uses(
    ids_ptr,
    order_ptr,
    needed_ptr,
    rows,
    rank,
    E,
    TOPK: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACED: tl.constexpr,
):
    """needed[source, expert], [NUM_SOURCES, E + 1]: tokens of a source whose first expert is that
    one or one before; order[place]: the own token that is sent there. Grid: (sources * groups of
    ``EXPERTS`` up to E + blocks of ``PLACED`` own tokens,)."""
    groups = tl.cdiv(E + 1, EXPERTS)
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if program < NUM_SOURCES * groups:
        source = program // groups
        experts = program % groups * EXPERTS + tl.arange(0, EXPERTS)
        count = tl.zeros((EXPERTS,), tl.int32)
        for begin in range(0, rows, BLOCK):
            there = begin + lane < rows
            first = first_experts(ids_ptr, source * rows + begin + lane, there, E, TOPK)
            count += tl.sum((first[:, None] <= experts[None, :]).to(tl.int32), 0)
        tl.store(needed_ptr + source * (E + 1) + experts, count, mask=experts <= E)
    else:
        own = (program - NUM_SOURCES * groups) * PLACED + tl.arange(0, PLACED)
        first_own = first_experts(ids_ptr, rank * rows + own, own < rows, E, TOPK)
        place = tl.zeros((PLACED,), tl.int32)
        for begin in range(0, rows, BLOCK):
            token = begin + lane
            first = first_experts(ids_ptr, rank * rows + token, token < rows, E, TOPK)
            is_earlier = token[None, :] < own[:, None]
            before = (first[None, :] < first_own[:, None]) | (
                (first[None, :] == first_own[:, None]) & is_earlier
            )
            place += tl.sum(before.to(tl.int32), 1)
        tl.store(order_ptr + place, own, mask=own < rows)


class Sending(NamedTuple):
    """Arguments of a kernel that sends, and waits for what peers send so. order, needed: of
    ``kernel_first_uses``. shards, arrivals: where each rank's are. consumed: by peers."""

    order: Any
    needed: Any
    shards: Any
    arrivals: Any
    consumed: Any


@jit
def ends_of_group(group_ends, group):
    """(position at which a group begins, position behind its last)."""
    begin = tl.where(group == 0, 0, (group_ends >> (8 * tl.maximum(group - 1, 0))) & 255)
    return begin, (group_ends >> (8 * group)) & 255


@jit
def send_in_order(
    own_ptr,
    gathered_ptr,
    arrivals_ptr,
    epoch_ptr,
    sending,
    rows,
    K,
    rank,
    chunk_rows,
    group_ends,
    NUM_SOURCES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    FLAGS_PER_RANK: tl.constexpr,
    NUM_COMM_SMS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Send this program's chunks of the own rows [rows, K] to their peers, and set a flag there
    behind each."""
    lane = tl.arange(0, _PEERS)
    last = (epoch_at(epoch_ptr) - 1).to(tl.int32)
    value = flag_of(epoch_ptr, rows)
    peers = NUM_SOURCES - 1
    for first_peer in range(0, peers, _PEERS):
        peer = (rank + 1 + first_peer + lane) % NUM_SOURCES
        dl.wait(sending.consumed + peer, peers - first_peer, last, epoch_ptr + 1)
    itemsize: tl.constexpr = own_ptr.dtype.element_ty.primitive_bitwidth // 8
    vector: tl.constexpr = 16 // itemsize if ALIGNED else 1
    chunks = tl.cdiv(rows, chunk_rows)
    shard = tl.cast(rank, tl.int64) * rows
    for stage in range(tl.program_id(0), chunks * NUM_GROUPS, NUM_COMM_SMS):
        begin, end = ends_of_group(group_ends, stage // chunks)
        begin = tl.maximum(begin, 1)
        chunk = stage % chunks
        for piece in range(0, chunk_rows, _PIECE_ROWS):
            place = chunk * chunk_rows + piece + tl.arange(0, _PIECE_ROWS)
            there = (piece + tl.arange(0, _PIECE_ROWS) < chunk_rows) & (place < rows)
            row = tl.load(sending.order + place, mask=there, other=0).to(tl.int64)
            own_row = tl.multiple_of(row * K, vector)
            target_row = tl.multiple_of((shard + row) * K, vector)
            for first in range(0, K, _PIECE_COLUMNS):
                column = first + tl.arange(0, _PIECE_COLUMNS)
                mask = there[:, None] & (column < K)[None, :]
                block = tl.load(own_ptr + own_row[:, None] + column[None, :], mask=mask)
                for position in range(begin, end):
                    # In whose order of arrival this rank has this position.
                    peer = (rank + NUM_SOURCES - position) % NUM_SOURCES
                    peer_ptr = tl.load(sending.shards + peer).to(gathered_ptr.dtype)
                    peer_ptr = tl.multiple_of(peer_ptr, vector * itemsize)
                    tl.store(peer_ptr + target_row[:, None] + column[None, :], block, mask=mask)
        for first in range(begin, end, _PEERS):
            peer = (rank + NUM_SOURCES - (first + lane) % NUM_SOURCES) % NUM_SOURCES
            flags_ptr = dl.symm_at(arrivals_ptr, sending.arrivals, peer)
            dl.notify(flags_ptr + rank * FLAGS_PER_RANK + chunk, value, mask=first + lane < end)


@jit
def await_first_uses(
    awaited,
    last,
    expert,
    arrivals_ptr,
    epoch_ptr,
    needed_ptr,
    rank,
    E,
    rows,
    chunk_rows,
    group_ends,
    NUM_SOURCES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    FLAGS_PER_RANK: tl.constexpr,
):
    """Wait for the stages that a tile of ``expert`` needs, whose rows come from positions up to
    ``last``, behind the first ``awaited``; gives how many were awaited so far, and a token."""
    token = 0
    chunks = tl.cdiv(rows, chunk_rows)
    source = tl.arange(0, _PEERS)
    needed = 0
    for first in tl.static_range(0, NUM_SOURCES, _PEERS):
        counts_ptr = needed_ptr + (first + source) * (E + 1) + expert
        counts = tl.load(counts_ptr, mask=first + source < NUM_SOURCES, other=0)
        needed = tl.maximum(needed, tl.max(counts, 0))
    stages = tl.cdiv(needed, chunk_rows)
    for earlier in tl.static_range(NUM_GROUPS - 1):
        stages += tl.where(last >= ((group_ends >> (8 * earlier)) & 255), chunks, 0)
    stages = tl.where(last > 0, stages, 0)
    while awaited < stages:
        group = awaited // chunks
        chunk = awaited - group * chunks
        number = tl.minimum(tl.minimum(stages - awaited, chunks - chunk), _FLAGS)
        begin, end = ends_of_group(group_ends, group)
        for position in range(tl.maximum(begin, 1), end):
            shard = shard_in_arrival_order(position, rank, NUM_SOURCES)
            flags_ptr = arrivals_ptr + shard * FLAGS_PER_RANK + chunk + tl.arange(0, _FLAGS)
            token += dl.wait(flags_ptr, number, flag_of(epoch_ptr, rows), epoch_ptr + 1, True)
        awaited += number
    return awaited, token


@dataclass(frozen=True)
class FirstUses:
    """The order in which own tokens are sent, the tokens that each expert needs, and the launch
    that finds both. ``num_comm_sms`` programs send, in chunks of ``chunk_rows`` rows."""

    order: torch.Tensor
    needed: torch.Tensor
    chunk_rows: int
    num_comm_sms: int
    group_ends: tuple[int, ...]
    launch: Launch

    def options(self, gathered: GatheredShards) -> dict[str, object]:
        """Arguments of a product that sends and waits so."""
        push = gathered.push
        assert push is not None
        return {
            "sending": Sending(self.order, self.needed, push.shards, push.arrivals, push.consumed),
            "chunk_rows": self.chunk_rows,
            "group_ends": sum(end << 8 * group for group, end in enumerate(self.group_ends)),
            "NUM_GROUPS": len(self.group_ends),
            "NUM_COMM_SMS": self.num_comm_sms,
        }


def chunk_rows_of(rows: int, num_chunks: int) -> int:
    """Rows that share a flag, of ``rows`` in at most ``num_chunks`` chunks."""
    return ceil_div(ceil_div(rows, num_chunks), _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT


def first_uses(
    topk_ids: torch.Tensor,
    E: int,
    rank: int,
    group_ends: tuple[int, ...],
    num_chunks: int,
    num_comm_sms: int,
) -> FirstUses:
    """First uses of the tokens of topk_ids [M, topk], of as many ranks as ``group_ends`` says;
    nothing is launched yet."""
    (M, topk), sources = topk_ids.shape, group_ends[-1]
    rows = M // sources
    order = topk_ids.new_empty(rows, dtype=torch.int32)
    needed = topk_ids.new_empty(sources, E + 1, dtype=torch.int32)
    programs = sources * ceil_div(E + 1, _EXPERTS) + ceil_div(rows, _PLACED)
    block = min(_BLOCK, max(16, triton.next_power_of_2(rows)))
    options = {
        "TOPK": topk, "NUM_SOURCES": sources, "BLOCK": block, "EXPERTS": _EXPERTS,
        "PLACED": _PLACED, "num_warps": 4,
    }  # fmt: skip
    launch = Launch(
        kernel_first_uses, (programs,), (topk_ids, order, needed, rows, rank, E), options
    )
    chunk_rows = chunk_rows_of(rows, num_chunks)
    return FirstUses(order, needed, chunk_rows, num_comm_sms, group_ends, launch)
