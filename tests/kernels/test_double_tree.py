"""The shape of the two trees of an all-reduce, for any number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_dist.kernels.common.exchange import trees
from triton_dist.kernels.common.exchange.trees import NOBODY, Place, place_in, role_of

NUMBERS_OF_RANKS = st.integers(2, 300)


def places(tree, num_ranks):
    return [place_in(tree, rank, num_ranks) for rank in range(num_ranks)]


def children(place):
    return [rank for rank in (place.left, place.right) if rank != NOBODY]


def depth_below(tree, root):
    """Ranks below ``root`` with their distance from it."""
    found, waiting = {}, [(root, 0)]
    while waiting:
        rank, depth = waiting.pop()
        assert rank not in found
        found[rank] = depth
        waiting += [(child, depth + 1) for child in children(tree[rank])]
    return found


@given(num_ranks=NUMBERS_OF_RANKS, number=st.integers(0, 1))
def test_a_tree_spans_all_ranks_and_is_flat(num_ranks, number):
    tree = places(number, num_ranks)
    (root,) = [rank for rank, place in enumerate(tree) if place.parent == NOBODY]
    depths = depth_below(tree, root)
    assert sorted(depths) == list(range(num_ranks))
    assert 2 ** max(depths.values()) <= num_ranks


@given(num_ranks=NUMBERS_OF_RANKS, number=st.integers(0, 1))
def test_parents_and_children_agree(num_ranks, number):
    tree = places(number, num_ranks)
    for rank, place in enumerate(tree):
        assert (place.left == NOBODY) <= (place.right == NOBODY)
        assert all(tree[child].parent == rank for child in children(place))
        if place.parent != NOBODY:
            parent = tree[place.parent]
            assert (parent.right if place.is_right else parent.left) == rank


@given(num_ranks=NUMBERS_OF_RANKS)
def test_no_rank_has_children_in_both(num_ranks):
    with_children = [
        {rank for rank, place in enumerate(places(tree, num_ranks)) if children(place)}
        for tree in (0, 1)
    ]
    assert not with_children[0] & with_children[1]
    # Fewer cannot span a binary tree, so that one rank of an odd number is a leaf of both.
    assert [len(each) for each in with_children] == [num_ranks // 2] * 2


@given(num_ranks=NUMBERS_OF_RANKS)
def test_flags_by_source_and_phase_suffice_for_both_trees(num_ranks):
    """Nobody waits for one rank twice in a phase; and a rank waits for whoever tells it."""
    told = {(phase, rank): [] for phase in (0, 1) for rank in range(num_ranks)}
    for rank in range(num_ranks):
        role = role_of(rank, num_ranks)
        for place in (role.as_leaf, role.as_inner):
            if place.parent != NOBODY:
                told[0, place.parent].append(rank)
            for child in children(place):
                told[1, child].append(rank)
    for (phase, rank), sources in told.items():
        assert sorted(sources) == sorted(role_of(rank, num_ranks).sources[phase])
        assert len(set(sources)) == len(sources)


@given(num_ranks=NUMBERS_OF_RANKS)
def test_a_role_says_where_a_rank_is_a_leaf(num_ranks):
    for rank in range(num_ranks):
        role = role_of(rank, num_ranks)
        assert not children(role.as_leaf)
        assert role.as_leaf == place_in(role.leaf_tree, rank, num_ranks)
        assert role.as_inner == place_in(1 - role.leaf_tree, rank, num_ranks)


@pytest.mark.parametrize(
    ("rank", "place"),
    [
        (0, Place(1, NOBODY, NOBODY, False)),
        (1, Place(3, 0, 2, False)),
        (3, Place(NOBODY, 1, 5, False)),
        (4, Place(5, NOBODY, NOBODY, False)),
        (5, Place(3, 4, NOBODY, True)),
    ],
)
def test_a_tree_of_six(rank, place):
    assert place_in(0, rank, 6) == place
    above, *below = ((each + 1) % 6 if each != NOBODY else NOBODY
                     for each in (place.parent, place.left, place.right))  # fmt: skip
    assert place_in(1, (rank + 1) % 6, 6) == Place(above, *below, place.is_right)


def test_the_kernel_knows_nobody_by_the_same_number():
    assert trees._NOBODY.value == NOBODY
