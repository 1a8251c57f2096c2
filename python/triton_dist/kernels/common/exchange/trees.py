"""All-reduce along two trees, in one launch as the other exchanges (``exchange/protocol.py``): x is
two halves; in its tree a half is added on the way up to the root, and the sum goes down to all.

*Trees.* There are two binary ones over the same ranks, in which no rank has children twice. A tree
whose edges carry all of a tensor leaves half of the ranks idle: those without children send and get
it once, the others up to three times. So each of two trees carries one half, and who has children
in one is a leaf of the other (Sanders, Speck, Träff: "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", 2009).

The first tree has its ranks in order from left to right, at the positions 1, 2, 3, …; how often 2
divides a position is its height, so the odd ones are leaves:

    height 2            4
    height 1        2       6
    height 0      1   3   5   7

Of fewer positions, the right ends are cut off, and what hung below them moves up. The second tree
is the first one with all ranks a position further: odd and even change places. Of an odd number of
ranks, rank 0 is a leaf of both. No path from a root is longer than floor(log2(ranks)).

*Memory.* A slot is four halves: parts of the left and of the right child of the one tree in which
this rank has children, then the sum of the first and of the second half. Flags of the first phase
say that a child's part has come, those of the second that a sum has. By source rank they suffice
for both trees: parents in the two are different ranks, and children come in one tree alone.

*Order.* With each piece a program

    1. sends its part to the parent in the tree in which it is a leaf: without a wait;
    2. in the other awaits its children's parts and sends the sum of them and its own to its parent;
       the root to its children, for it is the sum of all;
    3. awaits the sum of the piece before, in this other tree, and passes it on to its children;
    4. awaits the other half's.

So a piece goes up while the one before goes down.

*Why nobody waits in a circle.* Programs of one number go through these steps in one order. Step 1
waits for nobody; step 2 for step 1 of leaves or step 2 of ranks below; step 3 for the root's step 2
of that piece or step 3 of ranks above; step 4 for either of these two. So every wait is for a step
that comes before in the order, or for the same step of a rank nearer to the leaves, in step 2, or
to the root, in step 3.

*Why a slot is free*, although a program hears from its neighbours only: a sum contains a part of
every rank, sent in this call, and comes to each program along releases and acquires. So whoever has
ended call n + 1 knows that every rank had begun it, and thus ended call n: all that
``exchange/protocol.py`` asks for. It holds for each program by itself, since one whose share is
empty, as all shares of the second half are where x is short, waits and tells like the others,
though no data goes with it.

*Sizes.* A rank hears from its neighbours only. One to which something came with another size tells
on with another size than its own, so that all ranks notice.

*Numerics.* A rank adds its own part, the left child's and the right one's in fp32 in this order,
and rounds the sum to x's dtype, in which it travels. So there are as many roundings as the tree is
high, floor(log2(ranks)): one of up to three ranks, two of up to seven. The shape of the trees
depends on the number of ranks alone, and all get what the root rounded: the same bits on every rank
and at every call, but of three ranks and more not those of a sum in the order of ranks.

*Arguments* are those of ``exchange/protocol.py``, and the seven numbers of a ``Role``:

=====================  ======  ======================================  ==================
argument               dtype   shape                                   who writes
=====================  ======  ======================================  ==================
x, out                 one     [total]                                 the caller; this kernel
slots.data             of x    [2, 4, room], see *Memory*              peers' kernels
peers.arrivals         int64   as there                                parents, children
leaf_tree to right     int     of a ``Role``; not specialised          the host
=====================  ======  ======================================  ==================
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.protocol import (
    ONE_PIECE,
    begin,
    behind,
    first_of,
    flag_of_piece,
    flag_offset,
    pieces_of,
)
from triton_dist.kernels.common.peers import target_at
from triton_dist.language.signals import wait_for_size

NOBODY = -1
_NOBODY = tl.constexpr(NOBODY)
# Where the sum of the first half lies in a slot, behind the parts of two children.
FIRST_SUM = tl.constexpr(2)


@dataclass(frozen=True)
class Place:
    """Neighbours of a rank in one tree."""

    parent: int
    """``NOBODY``: it is the root."""
    left: int
    right: int
    """Children, ``NOBODY`` where there is none; no right one without a left one."""
    is_right: bool
    """True for its parent's right child."""


@dataclass(frozen=True)
class Role:
    """Role of a rank in both trees; they are numbered as the halves that they carry.

    leaf_tree: one of which it is a leaf, the first such. as_leaf: its place there. as_inner: its
    place in the other, where it has children, unless it is a leaf of both.
    """

    leaf_tree: int
    as_leaf: Place
    as_inner: Place

    @functools.cached_property
    def sources(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Whom it waits for: on the way up, and on the way down."""
        inner = self.as_inner
        up, down = (inner.left, inner.right), (self.as_leaf.parent, inner.parent)
        return tuple(r for r in up if r != NOBODY), tuple(r for r in down if r != NOBODY)

    @functools.cached_property
    def arguments(self) -> tuple[int, ...]:
        """As a kernel takes it: the tree in which it is a leaf, the parent there and whether it is
        its right child; the same of the other tree, and the children there."""
        leaf, inner = self.as_leaf, self.as_inner
        return (
            self.leaf_tree, leaf.parent, int(leaf.is_right),
            inner.parent, int(inner.is_right), inner.left, inner.right,
        )  # fmt: skip


def place_in(tree: int, rank: int, num_ranks: int) -> Place:
    """Neighbours of ``rank`` in tree 0 or 1."""

    def rank_at(position: int) -> int:
        return (position - 1 + tree) % num_ranks if position else NOBODY

    position = (rank - tree) % num_ranks + 1
    lowest = position & -position
    above = position + lowest
    parent = position - lowest if position & 2 * lowest or above > num_ranks else above
    step = lowest // 2
    left = position - step if step else 0
    while position + step > num_ranks:
        step //= 2
    right = position + step if step else 0
    return Place(rank_at(parent), rank_at(left), rank_at(right), 0 < parent < position)


@functools.cache
def role_of(rank: int, num_ranks: int) -> Role:
    """Role of ``rank`` of ``num_ranks`` >= 2 in both trees."""
    places = place_in(0, rank, num_ranks), place_in(1, rank, num_ranks)
    leaf_tree = 0 if places[0].left == NOBODY else 1
    return Role(leaf_tree, places[leaf_tree], places[1 - leaf_tree])


@jit
def slot_at(slots, peer, offset):
    """The slot of ``peer``; of nobody, one that nothing is stored to."""
    return target_at(slots.table, tl.maximum(peer, 0), slots.data) + offset


@jit
def await_neighbour(peers, phase, value, source, NUM_RANKS: tl.constexpr):
    """Wait until this program of ``source`` has got to ``value`` (acquire); gives a token, and 0,
    or 1 if it came with another size. For nobody, do not wait."""
    token, differs = 0, 0
    if source >= 0:
        program = tl.program_id(0) * NUM_RANKS
        flag = peers.arrivals + flag_offset(phase, value, NUM_RANKS) + program + source
        waited, agrees = wait_for_size(flag, value, peers.guard)
        token += waited
        differs += 1 - agrees.to(tl.int32)
    return token, differs


@jit
def tell_two(call, phase, value, first, second, plan: tl.constexpr):
    """Set the flag of this program at two ranks, of which either may be nobody, after everything
    that it stored (release)."""
    tl.debug_barrier()  # a release is one thread's; all threads' stores come before it
    peer = tl.arange(0, plan.LANES)
    there = (peer == first) | (peer == second)
    values = tl.full((plan.LANES,), 0, tl.int64) + value
    tl.atomic_xchg(
        call.flags + flag_offset(phase, value, plan.NUM_RANKS), values, mask=there,
        sem="release", scope="sys",
    )  # fmt: skip


@jit
def add_children(
    x_ptr,
    slots_ptr,
    out_ptr,
    parent_ptr,
    left_ptr,
    right_ptr,
    offset,
    length,
    shard_elements,
    first_block,
    end_block,
    token,
    parent,
    left,
    right,
    BLOCK: tl.constexpr,
):
    """Add this program's blocks of x [length] and of its children's parts, own, left, right, in
    fp32, and store the rounded sums to the parent; those of the root, to out and to the
    children."""
    left_length, right_length = tl.where(left >= 0, length, 0), tl.where(right >= 0, length, 0)
    for block in range(first_block, end_block):
        index = first_of(block, BLOCK) + tl.arange(0, BLOCK)
        mask = index < length
        parts_ptr = slots_ptr + behind(offset, token)
        own = tl.load(x_ptr + index, mask=mask)
        # From L2, where peers' stores are; L1 may know these addresses from before.
        lefts = tl.load(
            parts_ptr + index, mask=index < left_length, other=0.0, cache_modifier=".cg"
        )
        rights = tl.load(
            parts_ptr + shard_elements + index,
            mask=index < right_length, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        sums = tl.zeros((BLOCK,), dtype=tl.float32) + own.to(tl.float32)
        sums = (sums + lefts.to(tl.float32)) + rights.to(tl.float32)
        values = sums.to(out_ptr.dtype.element_ty)
        if parent >= 0:
            tl.store(parent_ptr + index, values, mask=mask)
        else:
            tl.store(out_ptr + index, values, mask=mask)
            tl.store(left_ptr + index, values, mask=mask)
            if right >= 0:
                tl.store(right_ptr + index, values, mask=mask)


@jit
def pass_on(
    source_ptr,
    target_ptr,
    left_ptr,
    right_ptr,
    length,
    first_block,
    end_block,
    left,
    right,
    BLOCK: tl.constexpr,
):
    """Copy this program's blocks of a half [length] from ``source`` to ``target``, and to the
    children that there are."""
    for block in range(first_block, end_block):
        index = first_of(block, BLOCK) + tl.arange(0, BLOCK)
        mask = index < length
        values = tl.load(source_ptr + index, mask=mask, cache_modifier=".cg")
        tl.store(target_ptr + index, values, mask=mask)
        if left >= 0:
            tl.store(left_ptr + index, values, mask=mask)
        if right >= 0:
            tl.store(right_ptr + index, values, mask=mask)


@jit(
    do_not_specialize=[
        "size", "rank", "leaf_tree", "leaf_parent", "leaf_is_right", "parent", "is_right", "left",
        "right",
    ]
)  # fmt: skip
def kernel_all_reduce_double_tree(
    x_ptr,
    out_ptr,
    slots,
    peers,
    lengths,
    size,
    rank,
    leaf_tree,
    leaf_parent,
    leaf_is_right,
    parent,
    is_right,
    left,
    right,
    plan: tl.constexpr,
):
    """Sum x [total] over all ranks into out; ``lengths.shard`` is what a half has, of which the
    second may have less. ``exchange/protocol.py`` says what it takes.

    What follows ``rank`` is its ``Role``, numbers by themselves, since a member of a tuple would be
    specialised: the tree in which it is a leaf, the parent there and whether this rank is its right
    child; the same of the other tree, and the children."""
    call = begin(slots, peers, size, rank, plan)
    offset, room = call.offset, lengths.room.to(tl.int64)
    tree = 1 - leaf_tree
    leaf_begin, own_begin = leaf_tree * lengths.shard, tree * lengths.shard
    leaf_length = tl.minimum(lengths.total - leaf_begin, lengths.shard)
    length = tl.minimum(lengths.total - own_begin, lengths.shard)
    leaf_sums, sums = (FIRST_SUM + leaf_tree) * room, (FIRST_SUM + tree) * room
    leaf_parent_ptr = slot_at(slots, leaf_parent, offset) + leaf_is_right * room
    parent_ptr = slot_at(slots, parent, offset) + is_right * room
    left_ptr = slot_at(slots, left, offset) + sums
    right_ptr = slot_at(slots, right, offset) + sums
    # Whom a sum of children's parts is told, and in which phase.
    is_root = parent < 0
    told, also_told = tl.where(is_root, left, parent), tl.where(is_root, right, _NOBODY)
    up_phase = is_root.to(tl.int32)
    blocks = pieces_of(lengths.shard, plan)
    value = flag_of_piece(call, 0)
    differs = 0  # the size of what has come, from this one's: all that passes on says so
    for piece in range(plan.NUM_PIECES + 1):
        first = piece * blocks
        if piece < plan.NUM_PIECES:
            pass_on(
                x_ptr + leaf_begin, leaf_parent_ptr, leaf_parent_ptr, leaf_parent_ptr, leaf_length,
                first, first + blocks, _NOBODY, _NOBODY, plan.BLOCK,
            )  # fmt: skip
            tell_two(call, 0, value ^ differs, leaf_parent, _NOBODY, plan)
            token, of_left = await_neighbour(peers, 0, value, left, plan.NUM_RANKS)
            waited, of_right = await_neighbour(peers, 0, value, right, plan.NUM_RANKS)
            differs |= of_left | of_right
            add_children(
                x_ptr + own_begin, slots.data, out_ptr + own_begin, parent_ptr, left_ptr,
                right_ptr, offset, length, room, first, first + blocks, token + waited, parent,
                left, right, plan.BLOCK,
            )  # fmt: skip
            tell_two(call, up_phase, value ^ differs, told, also_told, plan)
        if piece >= 1:
            before = value - ONE_PIECE
            if parent >= 0:
                token, of_parent = await_neighbour(peers, 1, before, parent, plan.NUM_RANKS)
                differs |= of_parent
                pass_on(
                    slots.data + behind(offset + sums, token), out_ptr + own_begin, left_ptr,
                    right_ptr, length, first - blocks, first, left, right, plan.BLOCK,
                )  # fmt: skip
                tell_two(call, 1, before ^ differs, left, right, plan)
            token, of_parent = await_neighbour(peers, 1, before, leaf_parent, plan.NUM_RANKS)
            differs |= of_parent
            pass_on(
                slots.data + behind(offset + leaf_sums, token), out_ptr + leaf_begin,
                out_ptr, out_ptr, leaf_length, first - blocks, first, _NOBODY, _NOBODY, plan.BLOCK,
            )  # fmt: skip
        value += ONE_PIECE
