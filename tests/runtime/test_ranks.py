"""Words that ranks say together: what they give, and what happens when a rank is missing."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.runtime import group_ranks
from triton_dist.errors import InvalidArgument, RankDisagreement, RanksFailed, RankTimeout
from triton_dist.runtime.ranks import ProcessGroupRanks, SoloRank, group_for

SHORT = {"TRITON_DIST_AUTOTUNE_TIMEOUT": "1"}


def say_every_word(members):
    """In the group of this rank, all groups at once: every word's result, twice over."""
    groups = [dist.new_group(ranks) for ranks in members] if members else [None]
    mine = 0 if not members else [dist.get_rank() in ranks for ranks in members].index(True)
    ranks = group_for(groups[mine])
    said = []
    for number in range(2):
        said.append(
            (
                ranks.rank,
                ranks.size,
                ranks.is_leader,
                ranks.gather("gather", {"rank": dist.get_rank(), "number": number}),
                ranks.decide("decide", [number, "leader's"] if ranks.is_leader else None),
                ranks.maximum("maximum", [float(ranks.rank), -float(ranks.rank), 7.5]),
                ranks.barrier("barrier"),
                ranks.align(),
            )
        )
    return said


@pytest.mark.parametrize(
    ("world_size", "members"),
    [
        (2, None),
        (4, [[3, 0], [2, 1]]),
        (3, [[1], [0, 2]]),
    ],
)
def test_words(spawn_ranks, world_size, members):
    for rank, said in enumerate(spawn_ranks(world_size, say_every_word, members)):
        group = range(world_size) if members is None else next(g for g in members if rank in g)
        group = sorted(group)
        for number, words in enumerate(said):
            own, size, is_leader, gathered, decided, slowest, *nothing = words
            assert (own, size, is_leader) == (group.index(rank), len(group), own == 0)
            assert gathered == [{"rank": member, "number": number} for member in group]
            assert decided == [number, "leader's"]
            assert slowest == [size - 1.0, 0.0, 7.5]
            assert nothing == [None, None]


def come_late(here):
    """Whether the last rank has come when a barrier ends."""
    if dist.get_rank() == 1:
        time.sleep(0.2)
        here.touch()
    group_for().barrier("late")
    return here.exists()


def test_a_barrier_waits_for_the_last(spawn_ranks, tmp_path):
    assert spawn_ranks(2, come_late, tmp_path / "here") == [True, True]


def say_different_things():
    ranks, seen = group_for(), []
    for call in (
        lambda: ranks.gather("mine" if ranks.rank == 1 else "ours", 1),
        lambda: ranks.decide("mine" if ranks.rank == 1 else "ours", 1),
        lambda: ranks.barrier("then") if ranks.rank else ranks.gather("first", 1),
    ):
        try:
            call()
            seen.append(None)
        except RankDisagreement as error:
            seen.append(error.by_rank)
    return seen, ranks.gather("all together again", ranks.rank)


@pytest.mark.parametrize("world_size", [2, 3])
def test_different_phases_are_an_error_on_every_rank(spawn_ranks, world_size):
    others = dict.fromkeys(range(world_size), "ours")
    for rank, (seen, after) in enumerate(spawn_ranks(world_size, say_different_things)):
        gather, decide, barrier = seen
        assert gather == others | {1: "mine"}
        # A leader does not wait for the others when it decides; who hears another phase raises.
        assert decide == ({0: "ours", 1: "mine"} if rank == 1 else None)
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


@pytest.mark.parametrize(("word", "missing_rank"), [("gather", 1), ("decide", 0)])
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
        ranks.gather("warm-up", number)
    ranks.barrier("counted from here")
    before = entries.num_keys()
    for number in range(200):
        ranks.gather("many", number)
        ranks.decide("many", number)
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
        results["first"] = first.gather("late", first.rank)

    def step_in_second():
        results["second"] = [second.gather("quick", (n, second.rank)) for n in range(20)]
        stepped.set()

    threads = [threading.Thread(target=work) for work in (wait_in_first, step_in_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
    assert alone.gather("phase", 3) == [3]
    assert alone.decide("phase", 3) == 3
    assert alone.maximum("phase", [1.0, 2.0]) == [1.0, 2.0]
    assert alone.barrier("phase") is alone.align() is None
    assert alone.facts()["world_size"] == "1"


def test_an_unknown_scope_is_refused():
    with pytest.raises(InvalidArgument, match="scope is 'host', expected 'world' or 'rank'"):
        group_for(scope="host")


def test_a_mesh_is_a_group_and_other_values_are_refused(spawn_ranks):
    expected = "a process group that this rank belongs to, a 1-D DeviceMesh of one, or None"
    for gathered, size, same, shared, *errors in spawn_ranks(
        2, group_ranks.meshes_and_other_values
    ):
        assert (gathered, size, same, shared) == ([0, 1], 2, True, 2)
        assert len(errors) == 4
        assert all(error.startswith("group_for: group is ") for error in errors)
        assert all(error.endswith(f"expected {expected}") for error in errors)


def test_a_world_that_is_initialised_anew_is_another_group(spawn_ranks):
    worlds = spawn_ranks(2, group_ranks.a_world_after_another)
    assert worlds == [[True, False, True, False]] * 2


def test_a_store_that_ended_with_rank_0_is_said(spawn_ranks):
    with pytest.raises(RanksFailed) as failed:
        spawn_ranks(2, group_ranks.the_store_ends_with_rank_0)
    message = failed.value.by_rank[1].message
    assert "rank(s) 0 did not arrive" in message
    assert "rank 0, which serves the store, ended or cannot be reached (" in message
    assert "\n" not in message  # frames of C++


def test_groups_without_other_ranks():
    assert group_ranks.fake_backend()
    assert group_ranks.store_in_python() == [7]
