"""Two binary trees over the same ranks, in which no rank has children twice.

A tree whose edges carry all of a tensor leaves half of the ranks idle: those without children send
and get it once, the others up to three times. So each of two trees carries one half, and who has
children in one is a leaf of the other (Sanders, Speck, Träff: "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", 2009).

The first tree has its ranks in order from left to right, at the positions 1, 2, 3, …; how often 2
divides a position is its height, so the odd ones are leaves:

    height 2            4
    height 1        2       6
    height 0      1   3   5   7

Of fewer positions, the right ends are cut off, and what hung below them moves up. The second tree
is the first one with all ranks a position further: odd and even change places. Of an odd number of
ranks, rank 0 is a leaf of both. No path from a root is longer than floor(log2(ranks)).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

NOBODY = -1


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
