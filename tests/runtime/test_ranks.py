"""Messages that ranks exchange, over process groups and over a store with ranks on threads: their
results, and errors when a rank is missing or raises."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from tests.tuning.fakes import in_threads
from triton_dist.errors import InvalidArgument, RankDisagreement, RanksFailed, RankTimeout
from triton_dist.runtime import symmetric
from triton_dist.runtime.ranks import (
    ProcessGroupRanks,
    SoloRank,
    StoreRanks,
    WorldRank,
    group_for,
    store_ranks,
)

SHORT = {"TRITON_DIST_AUTOTUNE_TIMEOUT": "1"}


def say_every_word(members):
    """In the group of this rank, all groups at once: every word's result, twice over."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [dist.get_rank() in ranks for ranks in members].index(True)
    ranks = group_for(groups[mine])
    said = []
    for number in range(2):
        said.append(
            (
                ranks.rank,
                ranks.size,
                ranks.is_leader,
                ranks.all_gather("all_gather", {"rank": dist.get_rank(), "number": number}),
                ranks.broadcast("broadcast", [number, "leader's"] if ranks.is_leader else None),
                ranks.barrier("barrier"),
                ranks.device_barrier(),
            )
        )
    return said


@pytest.mark.parametrize(
    ("world_size", "members"),
    [
        (4, [[3, 0], [2, 1]]),
        (3, [[1], [0, 2]]),
    ],
)
def test_words(spawn_ranks, world_size, members):
    for rank, said in enumerate(spawn_ranks(world_size, say_every_word, members)):
        group = sorted(next(g for g in members if rank in g))
        for number, words in enumerate(said):
            own, size, is_leader, gathered, decided, *nothing = words
            assert (own, size, is_leader) == (group.index(rank), len(group), own == 0)
            assert gathered == [{"rank": member, "number": number} for member in group]
            assert decided == [number, "leader's"]
            assert nothing == [None, None]


def say_different_things():
    ranks, seen = group_for(), []
    for call in (
        lambda: ranks.all_gather("mine" if ranks.rank == 1 else "ours", 1),
        lambda: ranks.broadcast("mine" if ranks.rank == 1 else "ours", 1),
        lambda: ranks.barrier("then") if ranks.rank else ranks.all_gather("first", 1),
    ):
        try:
            call()
            seen.append(None)
        except RankDisagreement as error:
            seen.append(error.by_rank)
    return seen, ranks.all_gather("all together again", ranks.rank)


def test_different_phases_are_an_error_on_every_rank(spawn_ranks):
    world_size = 3
    others = dict.fromkeys(range(world_size), "ours")
    for rank, (seen, after) in enumerate(spawn_ranks(world_size, say_different_things)):
        all_gather, broadcast, barrier = seen
        assert all_gather == others | {1: "mine"}
        # A leader does not wait for the others when it decides; who hears another phase raises.
        assert broadcast == ({0: "ours", 1: "mine"} if rank == 1 else None)
        assert barrier == {0: "first"} | dict.fromkeys(range(1, world_size), "then")
        assert after == list(range(world_size))


def leave_out_one_rank(word, missing_rank):
    ranks = group_for()
    ranks.barrier("all are there")
    if ranks.rank == missing_rank:
        time.sleep(2)
        return None
    begin = time.monotonic()
    with pytest.raises(RankTimeout) as overdue:
        getattr(ranks, word)("prepare config 3", 1)
    return time.monotonic() - begin, overdue.value.missing, str(overdue.value)


@pytest.mark.parametrize(("word", "missing_rank"), [("all_gather", 1), ("broadcast", 0)])
def test_a_missing_rank_is_named_in_time(spawn_ranks, word, missing_rank):
    """Also the leader, who decides; where another rank is missing it waits for nobody."""
    waited = spawn_ranks(3, leave_out_one_rank, word, missing_rank, env=SHORT)
    for rank in {0, 1, 2} - {missing_rank}:
        seconds, missing, message = waited[rank]
        assert 0.9 < seconds < 10
        assert missing == (missing_rank,)
        named = f"rank(s) {missing_rank} did not arrive within"
        assert message.startswith(f"rank {rank}: prepare config 3: {named}")
        assert "TRITON_DIST_AUTOTUNE_TIMEOUT" in message


def count_entries():
    ranks = group_for()
    entries = distributed_c10d._get_process_group_store(dist.group.WORLD)
    for number in range(20):
        ranks.all_gather("warm-up", number)
    ranks.barrier("counted from here")
    before = entries.num_keys()
    for number in range(200):
        ranks.all_gather("many", number)
        ranks.broadcast("many", number)
    ranks.barrier("counted to here")
    after = entries.num_keys()
    ranks.barrier("both have counted")
    return after - before


def test_the_store_does_not_fill_up(spawn_ranks):
    # Of 600 entries, those of the last step or two may be there still.
    assert max(map(abs, spawn_ranks(2, count_entries))) <= 8


def words_on_two_threads():
    """One group waits for rank 1, which comes when the other group, on another thread, has done all
    its steps; whether it had."""
    first, second = (group_for(dist.new_group([0, 1])) for _ in range(2))
    stepped, results = threading.Event(), {}

    def wait_in_first():
        if first.rank == 1:
            results["in time"] = stepped.wait(30)
        results["first"] = first.all_gather("late", first.rank)

    def step_in_second():
        results["second"] = [second.all_gather("quick", (n, second.rank)) for n in range(20)]
        stepped.set()

    in_threads([wait_in_first, step_in_second])
    return results


def test_two_groups_on_two_threads_do_not_wait_for_each_other(spawn_ranks):
    results = spawn_ranks(2, words_on_two_threads)
    for each in results:
        assert each["first"] == [0, 1]
        assert each["second"] == [[(n, 0), (n, 1)] for n in range(20)]
    assert results[1]["in time"]


def which_group():
    world, again = group_for(), group_for(dist.group.WORLD)
    half = dist.new_group([0])
    seen = [world is again, type(world), type(group_for(scope="rank"))]
    if dist.get_rank() == 1:
        with pytest.raises(InvalidArgument, match="a process group that this rank belongs to"):
            group_for(half)
    else:
        seen.append(group_for(half).size)
    seen.append(world.facts())
    return seen


def test_the_group_for_a_call(spawn_ranks):
    facts = {"world_size": "2", "local_world_size": "2"}
    known = [True, ProcessGroupRanks, SoloRank]
    assert spawn_ranks(2, which_group) == [[*known, 1, facts], [*known, facts]]


def test_alone_every_word_is_answered_here():
    alone = group_for()
    assert isinstance(alone, SoloRank)
    assert (alone.rank, alone.size, alone.is_leader) == (0, 1, True)
    assert alone.all_gather("phase", 3) == [3]
    assert alone.broadcast("phase", 3) == 3
    assert alone.barrier("phase") is alone.device_barrier() is None
    assert alone.facts()["world_size"] == "1"


def test_an_unknown_scope_is_refused():
    with pytest.raises(InvalidArgument, match="scope is 'host', expected 'world' or 'rank'"):
        group_for(scope="host")


def test_a_mesh_is_a_group_and_other_values_are_refused(spawn_ranks):
    expected = "a process group that this rank belongs to, its 1-D DeviceMesh, or None"
    for gathered, size, same, shared, *errors in spawn_ranks(2, meshes_and_other_values):
        assert (gathered, size, same, shared) == ([0, 1], 2, True, 2)
        assert len(errors) == 4
        assert all(error.startswith("group_for: group is ") for error in errors)
        assert all(error.endswith(f"expected {expected}") for error in errors)


def test_a_world_that_is_initialised_anew_is_another_group(spawn_ranks):
    worlds = spawn_ranks(2, a_world_after_another)
    assert worlds == [[True, False, True, False]] * 2


def test_a_store_that_ended_with_rank_0_is_said(spawn_ranks):
    with pytest.raises(RanksFailed) as failed:
        spawn_ranks(2, the_store_ends_with_rank_0)
    message = failed.value.by_rank[1].message
    assert "rank(s) 0 did not arrive" in message
    assert "rank 0, which serves the store, ended or cannot be reached (" in message
    assert "\n" not in message  # frames of C++


def test_groups_without_other_ranks():
    assert fake_backend()
    assert store_in_python() == [7]


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
    talk = ranks.channel(function, "7", call)
    try:
        return talk.first_all_gather("first call", (ranks.rank, function), limit)
    except RankTimeout as error:
        talk.abort(f"RankTimeout: {error}")
        raise


def refuse(ranks, function="op", call=0, delay=0.0):
    """A call that raises before it says a word."""
    time.sleep(delay)
    ranks.channel(function, call=call).abort("KeyError: 'M'", refused=True)


@pytest.mark.parametrize(("late", "size"), [(0.0, 4), (0.4, 2)])
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
        ranks_of(2)[0].channel("op", "7", hint="6 is tuned.").first_all_gather("first call", 0, 0.8)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(" s. 6 is tuned.")


def test_a_group_that_is_not_the_world_says_where_its_ranks_are(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    first, second = ranks_of(2, world=(4, 6))
    host = f"host {first._mailbox.process(0).host}"
    assert str(first.global_rank(1)) == f"6 ({host}, local rank 2)"
    assert (first.global_rank(0), second.global_rank(0), second.global_rank(1)) == (4, 4, 6)
    assert [str(rank.global_rank(1)) for rank in ranks_of(2)] == ["1", "1"]
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


def meshes_and_other_values() -> list[Any]:
    """A mesh of one dimension is its group; what is no group is refused."""
    mesh = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    seen: list[Any] = [group_for(mesh).all_gather("mesh", dist.get_rank())]
    seen.append(group_for(square["b"]).size)
    seen.append(group_for(mesh) is group_for(mesh.get_group()))
    with symmetric.allocate("test", {"x": ((1,), torch.int32)}, mesh) as memory:
        seen.append(len(memory["x"].peers))
    for wrong in (square, [0, 1], "0", 3):
        try:
            group_for(wrong)  # type: ignore[arg-type]
        except InvalidArgument as error:
            seen.append(str(error))
    return seen


def a_world_after_another() -> list[bool]:
    """The second has ranks of its own, which meet from the beginning. Threads and connections of
    the first one end with it: nobody keeps its process group."""
    first, process_group = group_for(), weakref.ref(dist.group.WORLD)
    first.barrier("first")
    first.channel("op").first_all_gather("word", 1)
    current = [first.is_current()]
    enter_world_of_own_store()
    assert process_group() is None
    second = group_for()
    assert second.channel("op").first_all_gather("word", dist.get_rank()) == [0, 1]
    seen = [*current, first.is_current(), second.is_current(), first is second]
    dist.barrier()  # rank 0 serves the store
    return seen


def enter_world_of_own_store() -> None:
    """Instead of the present one; rank 0 serves the store, and no launcher."""
    rank, size, port = dist.get_rank(), dist.get_world_size(), [0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    address = f"tcp://127.0.0.1:{port[0]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)


def the_store_ends_with_rank_0() -> None:
    enter_world_of_own_store()
    ranks = group_for()
    ranks.barrier("both are here")
    if ranks.rank == 0:
        os._exit(0)
    time.sleep(0.5)
    ranks.barrier("rank 0 is gone")


class PythonStore(dist.Store):
    """A store as a user may write one: no ``clone``."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.entries[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self.entries[key]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if key not in self.entries:
            self.set(key, desired)
        return self.entries[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.entries for key in keys)

    def wait(self, *_: Any) -> None:
        pass

    def add(self, key: str, amount: int) -> int:
        self.entries[key] = str(int(self.entries.get(key, b"0")) + amount).encode()
        return int(self.entries[key])

    def set_timeout(self, timeout: Any) -> None:
        pass


def fake_backend() -> bool:
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        return isinstance(group_for(), SoloRank)
    finally:
        dist.destroy_process_group()


def store_in_python() -> list[int]:
    store = PythonStore()  # torch does not keep it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ranks = group_for()
        for _ in range(3):
            ranks.channel("op").first_all_gather("word", 1)
        ranks.channel("op").abort("in vain")
        return ranks.channel("op").first_all_gather("word", 7)
    finally:
        dist.destroy_process_group()
