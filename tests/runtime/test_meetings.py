"""Conversations over a store, the ranks on threads: who leaves, who is told, who meets where."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_dist.errors import RankTimeout
from triton_dist.runtime.ranks import StoreRanks, WorldRank, store_ranks

LIMIT = 20.0


def ranks_of(size, world=None):
    store = dist.HashStore()
    return [StoreRanks(store, rank, size, world) for rank in range(size)]


def on_threads(*bodies):
    """What each gave or raised, and after how many seconds."""

    def timed(body):
        begin = time.monotonic()
        try:
            result = body()
        except RankTimeout as error:
            result = error
        return result, time.monotonic() - begin

    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(timed, bodies))


def meet(ranks, function="op", call=0, delay=0.0, limit=LIMIT):
    time.sleep(delay)
    talk = ranks.converse(function, "7", call)
    try:
        return talk.meet("first call", (ranks.rank, function), limit)
    except RankTimeout as error:
        talk.leave(f"RankTimeout: {error}")
        raise


def refuse(ranks, function="op", call=0, delay=0.0):
    """A call that raises before it says a word."""
    time.sleep(delay)
    ranks.converse(function, call=call).leave("KeyError: 'M'", refused=True)


@pytest.mark.parametrize("late", [0.0, 0.4])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_raises_is_known_to_all_within_a_second_or_so(size, late):
    """Whether they wait for it already or come later; and they do not add up their patience."""
    ranks = ranks_of(size)
    *others, _ = on_threads(
        *[lambda r=r: meet(r, delay=late) for r in ranks[:-1]], lambda: refuse(ranks[-1])
    )
    for error, seconds in others:
        assert isinstance(error, RankTimeout)
        assert error.refusals == {size - 1: "KeyError: 'M'"}
        assert seconds < late + 2
    assert_in_step(ranks)


def assert_in_step(ranks):
    for function in ("op", "op", "other"):
        expected = [(rank.rank, function) for rank in ranks]
        results = on_threads(*[lambda r=r, f=function: meet(r, f) for r in ranks])
        assert [result for result, _ in results] == [expected] * len(ranks), results


@pytest.mark.parametrize(("function", "call"), [("other", 1), ("op", 1), ("op", 3)])
@pytest.mark.parametrize("delays", [(0.0, 0.1), (0.2, 0.0)])
def test_a_rank_that_raised_alone_disturbs_no_other_meeting(function, call, delays):
    """The others had a hit there, and wait in the next call already or come later."""
    ranks = ranks_of(2)

    def raises_then_comes():
        refuse(ranks[1], function, call, delay=delays[1])
        return meet(ranks[1], call=2)

    first, second = on_threads(lambda: meet(ranks[0], call=2, delay=delays[0]), raises_then_comes)
    assert first[0] == second[0] == [(0, "op"), (1, "op")]
    assert_in_step(ranks)


def test_a_call_that_is_refused_on_all_ranks_makes_no_later_one_impatient(monkeypatch):
    monkeypatch.setattr(store_ranks, "_RETURN_SECONDS", 0.05)
    for order in ((0, 1, 2), (2, 0, 1)):
        ranks = ranks_of(3)
        for call in (1, 2):
            for rank in order:
                refuse(ranks[rank], call=call)
        results = on_threads(*[lambda r=r: meet(r, "op", 3, r.rank * 0.3) for r in ranks])
        assert all(isinstance(result, list) for result, _ in results), results
        assert_in_step(ranks)


def test_one_that_came_back_is_not_why_another_is_late(monkeypatch):
    monkeypatch.setattr(store_ranks, "_RETURN_SECONDS", 0.3)
    ranks = ranks_of(3)

    def raises_then_comes():
        refuse(ranks[1], call=1)
        return meet(ranks[1])

    results = on_threads(
        lambda: meet(ranks[0]), raises_then_comes, lambda: meet(ranks[2], delay=1.2)
    )
    assert all(isinstance(result, list) for result, _ in results), results


def test_one_that_gave_up_meets_at_the_next_attempt():
    ranks = ranks_of(2)

    def tries_twice():
        with pytest.raises(RankTimeout):
            meet(ranks[0], limit=0.2)
        return meet(ranks[0])

    first, second = on_threads(tries_twice, lambda: meet(ranks[1], delay=0.6))
    assert first[0] == second[0] == [(0, "op"), (1, "op")]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("meet"), st.sampled_from(["op", "other"])),
        st.tuples(st.just("one raises"), st.integers(0, 2)),
        st.tuples(st.just("all raise"), st.permutations([0, 1, 2])),
        st.tuples(st.just("one gives up"), st.integers(0, 2)),
    ),
    max_size=6,
)


@given(ACTIONS)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_whatever_came_before_ranks_meet(actions):
    """A rank that is alone in a conversation leaves it; then all meet in the same one."""
    ranks = ranks_of(3)
    for kind, what in [*actions, ("meet", "op")]:
        if kind == "one raises":
            refuse(ranks[what], call=1)
        elif kind == "all raise":
            for rank in what:
                refuse(ranks[rank], random.choice(["op", "other"]), call=1)
        elif kind == "one gives up":
            with pytest.raises(RankTimeout):
                meet(ranks[what], call=1, limit=0.01)
        else:
            expected = [(rank, what) for rank in range(3)]
            results = on_threads(*[lambda r=r, f=what: meet(r, f) for r in ranks])
            assert [result for result, _ in results] == [expected] * 3, results


def test_who_is_awaited_is_said_after_a_while(monkeypatch, caplog):
    monkeypatch.setattr(store_ranks, "_REMIND_SECONDS", 0.1)
    ranks = ranks_of(2, world=(4, 6))
    ranks[1].note("op", "called it with autotune=False")
    with pytest.raises(RankTimeout, match=r"rank 6 .* called it with autotune=False"):
        meet(ranks[0], limit=0.8)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "op, first call 7: waiting for rank(s) 6 (" in line
    assert "called it with autotune=False" in line


def test_a_hint_is_said_where_nothing_is_known(monkeypatch, caplog):
    monkeypatch.setattr(store_ranks, "_REMIND_SECONDS", 0.1)
    with pytest.raises(RankTimeout):
        ranks_of(2)[0].converse("op", "7", hint="6 is tuned.").meet("first call", 0, 0.8)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(" s. 6 is tuned.")


def test_a_group_that_is_not_the_world_says_where_its_ranks_are(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    first, second = ranks_of(2, world=(4, 6))
    host = f"host {first._mailbox.process(0).host}"
    assert str(first.named(1)) == f"6 ({host}, local rank 2)"
    assert (first.named(0), second.named(0), second.named(1)) == (4, 4, 6)
    assert [str(rank.named(1)) for rank in ranks_of(2)] == ["1", "1"]
    with pytest.raises(RankTimeout) as late:
        meet(first, limit=0.1)
    assert (late.value.rank, late.value.missing) == (4, (6,))
    assert f"rank(s) 6 ({host}, local rank 2) did not arrive" in str(late.value)


def test_a_rank_of_the_world_is_a_number():
    rank = WorldRank(3, "host a, local rank 1")
    assert f"rank {rank}, {rank!s}, {[rank]}" == (
        "rank 3 (host a, local rank 1), 3 (host a, local rank 1), [3]"
    )
    assert {rank: "x"} == {3: "x"}
