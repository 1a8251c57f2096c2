"""The block map of a routing, against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.moe import routing, skew, spaces
from triton_dist.kernels.common.moe.routing import block_map, max_tiles
from triton_dist.kernels.common.moe.skew import SKEWS, skewed_ids
from triton_dist.testing import poisoned_empty


def expected_map(ids, E, block_m, rank=0, num_sources=1, group_ends=None):
    """(routes of rows, ends, records without the unused word), by the words of the module."""
    M, topk = ids.shape
    per_source = M // num_sources * topk
    flat = [e if 0 <= e < E else E for e in ids.flatten().tolist()]
    experts = [[] for _ in range(E + 1)]
    for position in range(num_sources):
        first = (rank + position) % num_sources * per_source
        for route in range(first, first + per_source):
            experts[flat[route]].append((route, position))
    routes = [route for expert in experts for route, _ in expert]
    ends = [sum(map(len, experts[: e + 1])) for e in range(E + 1)]
    records = []
    done = [0] * (E + 1)
    groups = group_ends or [num_sources]
    for end in groups:
        for e, expert in enumerate(experts):
            arrived = sum(position < end for _, position in expert)
            is_last = end == groups[-1]
            ready = -(-arrived // block_m) if is_last else arrived // block_m
            first_row = ends[e] - len(expert)
            run_rows = range(done[e] * block_m, min(ready * block_m, len(expert)))
            run = len(records), ready - done[e]
            for tile in range(done[e], ready):
                of_tile = expert[tile * block_m : (tile + 1) * block_m]
                positions = of_tile[0][1], of_tile[-1][1]
                rows = first_row + run_rows.start, first_row + run_rows.stop
                records.append([e, *rows, *run, *positions])
            done[e] = ready
    return routes, ends, records


def check(ids, E, block_m, **options):
    blocks = block_map(ids, E, block_m, **options)
    for launch in blocks.launches:
        launch.run()
    routes, ends, records = expected_map(ids, E, block_m, **options)
    assert blocks.routes.tolist() == routes
    assert [routes[row] for row in blocks.rows.tolist()] == list(range(len(routes)))
    assert blocks.ends.tolist() == ends
    assert blocks.num_tiles.tolist() == [len(records)]
    assert len(records) <= len(blocks.tiles)
    assert blocks.tiles[: len(records), :7].tolist() == records
    return blocks


@st.composite
def routings(draw):
    sources = draw(st.sampled_from([1, 1, 2, 3, 8]))
    tokens = sources * draw(st.integers(1, 40))
    topk = draw(st.integers(1, 10))
    E = draw(st.sampled_from([1, 2, 3, 8, 13, 60]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    low, high = draw(st.sampled_from([(0, E), (-1, E + 1), (-1, 0), (E - 1, E), (E // 2, E)]))
    ids = torch.randint(low, high, (tokens, topk), generator=generator, dtype=dtype)
    ends = sorted({*draw(st.sets(st.integers(1, sources), max_size=3)), sources})
    place = {"rank": draw(st.integers(0, sources - 1)), "num_sources": sources, "group_ends": ends}
    return ids, E, draw(st.sampled_from([16, 32, 64])), place


@settings(max_examples=15, deadline=None)
@given(routings())
def test_any_routing(routing):
    ids, E, block_m, place = routing
    with poisoned_empty():
        check(ids, E, block_m, **place)


@pytest.mark.parametrize("E", [300, pytest.param(512, marks=pytest.mark.stress)])
def test_many_experts(E):
    """Each of which has a program; drawn ones have fewer, as all of them take long to interpret."""
    ids = torch.randint(-1, E + 1, (12, 10), generator=torch.Generator().manual_seed(E))
    with poisoned_empty():
        check(ids, E, 16, rank=1, num_sources=3, group_ends=[1, 3])


@pytest.mark.parametrize(
    ("num_sources", "at_once", "chunks"), [(1, 2, 5), (2, 2, 6), (1, 8, 2), (2, 8, 2)]
)
def test_several_chunks_and_segments(num_sources, at_once, chunks, monkeypatch):
    """Of which the tests above have few."""
    monkeypatch.setattr(routing, "_SEGMENTS_PER_STEP", at_once)
    ids = torch.randint(-1, 9, (420, 3), generator=torch.Generator().manual_seed(1))
    blocks = check(ids, 8, 16, num_sources=num_sources)
    assert blocks.launches[0].grid == (chunks, 2)
    check(torch.full_like(ids, 3), 8, 16, num_sources=num_sources, group_ends=[num_sources])


def test_more_routes_than_chunks_are_cut_in_larger_ones(monkeypatch):
    monkeypatch.setattr(routing, "_SEGMENTS_PER_STEP", 1)
    monkeypatch.setattr(routing, "_COUNTS_PER_STEP", 32)
    ids = torch.randint(0, 4, (300, 2), generator=torch.Generator().manual_seed(2))
    assert check(ids, 4, 16).launches[0].grid == (2, 1)


def test_ids_beyond_32_bits_name_nobody():
    ids = torch.tensor([[2**32, 1], [0, -(2**32)], [2**40 + 1, 2**31]])
    check(ids, 2, 16)


@pytest.mark.parametrize(
    ("counts", "most"), [([1] * 7, 7), ([40], 3), ([17, 17, 17], 6), ([33, 1, 1], 5)]
)
def test_most_tiles_is_what_the_worst_routing_takes(counts, most):
    assert sum(-(-count // 16) for count in counts) == most
    assert max_tiles(sum(counts), len(counts), 16) >= most


def test_most_tiles_is_reached():
    # All but one row in one expert, and that one behind a full tile.
    assert max_tiles(16 * 3 + 1 + 4, 5, 16) == 4 + 4


@pytest.mark.parametrize(
    ("ids", "E", "options", "argument"),
    [
        (torch.zeros(4, 2), 3, {}, "topk_ids.dtype"),
        (torch.zeros(4, dtype=torch.int32), 3, {}, "topk_ids.shape"),
        (torch.zeros(0, 2, dtype=torch.int32), 3, {}, "topk_ids.shape"),
        (torch.zeros(4, 11, dtype=torch.int32), 3, {}, "topk_ids.shape"),
        (torch.zeros(2, 4, dtype=torch.int32).T, 3, {}, "topk_ids.stride()"),
        (torch.zeros(4, 2, dtype=torch.int32), 0, {}, "E"),
        (torch.zeros(4, 2, dtype=torch.int32), 513, {}, "E"),
        (torch.zeros(5, 2, dtype=torch.int32), 3, {"num_sources": 2}, "topk_ids.shape"),
        (torch.zeros(4, 2, dtype=torch.int32), 3, {"group_ends": [2]}, "group_ends"),
        (
            torch.zeros(8, 2, dtype=torch.int32), 3,
            {"num_sources": 8, "group_ends": [1, 3, 2, 8]}, "group_ends",
        ),
        (
            torch.zeros(8, 2, dtype=torch.int32), 3,
            {"num_sources": 8, "group_ends": [1, 2, 3, 4, 8]}, "group_ends",
        ),
    ],
)  # fmt: skip
def test_what_no_map_can_be_made_of_is_refused(ids, E, options, argument):
    with pytest.raises(InvalidArgument) as refusal:
        block_map(ids, E, 16, **options)
    assert refusal.value.argument == argument


class NoInterpreter:
    interprets = False


def test_other_batches_are_of_the_same_tokens_and_the_same_on_all_ranks(monkeypatch):
    monkeypatch.setattr(spaces, "current_device", NoInterpreter)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(101)]).int()
    batches = spaces.other_batches(ids, 4)
    assert len(batches) == 3
    tokens = {tuple(token) for token in ids.tolist()}
    for batch in batches:
        assert (batch.shape, batch.dtype, batch.is_contiguous()) == (ids.shape, ids.dtype, True)
        assert {tuple(token) for token in batch.tolist()} <= tokens
        assert not torch.equal(batch, ids)
    again = spaces.other_batches(ids.clone(), 4)
    assert all(map(torch.equal, batches, again))


@pytest.mark.parametrize(("tokens", "E"), [(15, 2), (31, 4), (40000, 8)])
def test_few_rows_and_many_are_not_drawn_again(tokens, E, monkeypatch):
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    assert spaces.other_batches(ids, E) == []
    monkeypatch.setattr(spaces, "current_device", NoInterpreter)
    assert spaces.other_batches(ids, E) == []


@pytest.mark.parametrize("name", skew.SKEWS)
def test_a_skew_selects_the_ids_that_a_tuning_measures(name):
    ids = torch.zeros(400, 3, dtype=torch.int32)
    (batch,) = spaces.other_batches(ids, 16, name)
    assert torch.equal(batch, skew.skewed_ids(ids, 16, name))
    assert (batch.shape, batch.dtype, batch.is_contiguous()) == (ids.shape, ids.dtype, True)
    assert all(len(set(token)) == 3 for token in batch.tolist())
    counts = torch.bincount(batch.flatten(), minlength=16)
    assert counts.sum() == 1200
    if name == "even":
        assert counts.min() > 50
        assert counts.max() < 100
    elif name == "zipf":  # expert 0 is among the three of most tokens, expert 15 of few
        assert counts[0] > 240
        assert counts[15] < 50
    else:
        assert counts[:3].tolist() == [400] * 3
    assert torch.equal(skew.skewed_ids(ids[:0], 16, name), ids[:0])


def test_skewed_ids_do_not_depend_on_the_default_device():
    given = torch.zeros(4, 2, dtype=torch.int32)
    with torch.device("meta"):
        for skew in SKEWS:
            assert skewed_ids(given, 8, skew).device.type == "cpu"
