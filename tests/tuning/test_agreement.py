"""Ranks that differ, on threads: every scenario ends, with one choice or with an error on all."""

from __future__ import annotations

import re
import traceback
from collections import Counter

import pytest

from tests.tuning.fakes import Rank, fingerprint, in_threads, thread_ranks, together
from triton_dist._tuning.engine.components import Hooks
from triton_dist._tuning.search import Racing
from triton_dist._tuning.store import MemoryStore
from triton_dist._tuning.values import Failure, Measurement, Policy, bucket
from triton_dist.errors import (
    NoValidConfig,
    RankDisagreement,
    RankTimeout,
    TritonDistError,
    TuningAborted,
    TuningTimeout,
    TuningWarning,
)

SPACE = [{"n": 3}, {"n": 1}, {"n": 2}]
SIZE = 3


def cost_is_n(rank, config):
    return float(config["n"])


def group(size, **options) -> list[Rank]:
    """Ranks with the same options; a list of ``size`` values is one for each."""
    ranks = thread_ranks(size)
    mine = [
        {
            name: value[rank] if isinstance(value, tuple) else value
            for name, value in options.items()
        }
        for rank in range(size)
    ]
    defaults = {"space": SPACE, "cost": cost_is_n}
    return [Rank(ranks=ranks[rank], **(defaults | mine[rank])) for rank in range(size)]


def each(size, one, others):
    """``one`` for the last rank, ``others`` for the rest."""
    return (*[others] * (size - 1), one)


def chosen(ranks) -> set[str]:
    return {repr(rank.tuned.best_config(1)) for rank in ranks}


def messages(results, kind) -> list[str]:
    assert [type(result) for result in results] == [kind] * len(results), results
    return [str(result) for result in results]


def test_all_choose_alike_and_the_leader_writes():
    ranks = group(SIZE, disk=tuple(MemoryStore() for _ in range(SIZE)))
    assert together(ranks) == [(1, {"n": 1})] * SIZE
    assert [len(list(rank.disk.records())) for rank in ranks] == [1] + [0] * (SIZE - 1)
    assert [rank.tuned.num_tunings for rank in ranks] == [1] * SIZE


def test_the_slowest_rank_of_each_sample_decides():
    slow = SIZE - 1
    ranks = group(
        SIZE, cost=lambda rank, config: 9.0 if (rank, config["n"]) == (slow, 1) else config["n"]
    )
    assert together(ranks) == [(1, {"n": 2})] * SIZE
    record = ranks[0].tuned.tune(1)
    outcome = next(t.outcome for t in record.trials if t.config == {"n": 1})
    assert outcome == Measurement((9.0, 9.0, 9.0), 1, "maximum")


def test_records_on_all_ranks_cost_two_messages_at_the_first_call():
    disk = MemoryStore()
    together(group(SIZE, disk=disk))
    warm = group(SIZE, disk=disk)
    assert together(warm) == [(1, {"n": 1})] * SIZE
    phases = ["first call of a key", "first use of a record"]
    assert [rank.ranks.phases for rank in warm] == [phases] * SIZE
    assert [rank.tuned.num_tunings for rank in warm] == [0] * SIZE
    ahead = group(SIZE, disk=disk)
    in_threads([lambda rank=rank: rank.tuned.tune(1) for rank in ahead])
    assert [rank.ranks.phases for rank in ahead] == [phases[:1]] * SIZE


@pytest.mark.parametrize("holder", [0, 1])
def test_a_record_on_one_rank_is_used_by_all(holder):
    disk = MemoryStore()
    together(group(SIZE, disk=disk))
    disks = tuple(disk if rank == holder else MemoryStore() for rank in range(SIZE))
    ranks = group(SIZE, disk=disks)
    assert together(ranks) == [(1, {"n": 1})] * SIZE
    assert [rank.tuned.num_tunings for rank in ranks] == [0] * SIZE
    assert len({rank.tuned.tune(1).digest for rank in ranks}) == 1
    memories = [rank.tuned._components_for(None, False).memory_store for rank in ranks]
    assert [len(list(memory.records())) for memory in memories] == [1] * SIZE


def test_of_different_records_the_leaders_is_used():
    ours, theirs = MemoryStore(), MemoryStore()
    together(group(2, disk=theirs, cost=lambda rank, config: -config["n"] + 9.0))
    together(group(2, disk=ours))
    ranks = group(2, disk=(ours, theirs))
    assert together(ranks) == [(1, {"n": 1})] * 2
    assert chosen(ranks) == {"{'n': 1}"}
    ranks = group(3, disk=(MemoryStore(), theirs, ours))
    assert together(ranks) == [(1, {"n": 3})] * 3


@pytest.mark.parametrize(
    ("always", "tunings"), [((True, False), 1), ((False, True), 0), (True, 1), (False, 0)]
)
def test_whether_to_tune_again_is_the_leaders_word(always, tunings):
    disk = MemoryStore()
    together(group(2, disk=disk))
    ranks = group(2, disk=disk, always_tune=always)
    together(ranks)
    assert [rank.tuned.num_tunings for rank in ranks] == [tunings] * 2


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        ({"key_fn": lambda x, **_: (x, "other")}, ["(1, 'other')", "rank 0: 1 on"]),
        ({"space": [{"n": 1}]}, ["1 configs", "3 configs"]),
        ({"space": SPACE[::-1]}, ["config space"]),
        ({"fingerprint": fingerprint(source={"run": "new"})}, ["source: run changed"]),
        ({"fingerprint": fingerprint(software={})}, ["software: torch was 2.9.1+cpu"]),
        ({"name": "walk"}, ["ops.run", "ops.walk"]),
    ],
)
def test_a_difference_is_an_error_on_every_rank_that_says_who_has_what(difference, said):
    common = {
        "key_fn": lambda x, **_: x,
        "space": SPACE,
        "fingerprint": fingerprint(),
        "name": "run",
    }
    ((name, other),) = difference.items()
    ranks = group(SIZE, **{name: each(SIZE, other, common[name])})
    for message in messages(together(ranks), RankDisagreement):
        assert f"rank {SIZE - 1}: " in message
        assert all(part in message for part in said), message
    assert not any(rank.calls for rank in ranks)


def test_an_exception_of_key_fn_is_the_ranks_own_and_told_to_the_others():
    def refuses(x, **_):
        raise ValueError("M is 7, expected a multiple of 2")

    ranks = group(SIZE, key_fn=each(SIZE, refuses, lambda x, **_: x))
    *others, own = together(ranks)
    assert type(own) is ValueError
    assert own.__context__ is None
    for rank, message in enumerate(messages(others, RankDisagreement)):
        assert f"rank {rank}: valid" in message  # others may come later than the refusal
        assert f"rank {SIZE - 1}: ValueError: M is 7, expected a multiple of 2" in message


def test_an_unhashable_key_is_an_error_on_all_ranks():
    *others, own = together(group(2, key_fn=(lambda x, **_: x, lambda x, **_: [x])))
    assert re.search(r"the result of key_fn is \[1\].*hashable", str(own))
    assert type(others[0]) is RankDisagreement


def test_a_prune_fn_that_differs_by_rank_is_the_leaders():
    def keep(*numbers):
        return lambda config, x: config["n"] in numbers

    ranks = group(SIZE, prune_fn=each(SIZE, keep(1), keep(2, 3)))
    assert together(ranks) == [(1, {"n": 2})] * SIZE
    record = ranks[0].tuned.tune(1)
    assert [t.outcome for t in record.trials if t.config == {"n": 1}] == [
        Failure("pruned", "<lambda> dropped it")
    ]


def test_a_prune_fn_that_leaves_nothing_is_an_error_on_all():
    ranks = group(SIZE, prune_fn=lambda config, x: False)
    for message in messages(together(ranks), NoValidConfig):
        assert "{'n': 3}: <lambda> dropped it" in message
    assert not any(rank.calls for rank in ranks)


def fails(when, error):
    """Costs n; raises ``error`` on the ranks and configs that ``when`` says."""

    def cost(rank, config):
        if when(rank, config):
            raise error
        return config["n"]

    return cost


@pytest.mark.parametrize("where", [0, 1])
def test_a_failure_on_one_rank_is_a_failure_on_all(where):
    cost = fails(lambda rank, config: (rank, config["n"]) == (where, 1), RuntimeError("bad PTX"))
    ranks = group(SIZE, cost=cost)
    assert together(ranks) == [(1, {"n": 2})] * SIZE
    for rank in ranks:
        outcome = next(t.outcome for t in rank.tuned.tune(1).trials if t.config == {"n": 1})
        assert outcome == Failure("launch", "RuntimeError: bad PTX", where)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("spins"), "timeout"),
        (MemoryError("shared"), "resources"),
        (type("OutOfResources", (Exception,), {})("shared memory"), "resources"),
        (type("CompilationError", (Exception,), {})("at 3:1"), "compile"),
        (NoValidConfig("inner", 1, {}), "launch"),
    ],
)
def test_a_failure_has_a_kind(error, kind):
    ranks = group(2, cost=fails(lambda rank, config: config["n"] == 1, error))
    together(ranks)
    outcome = next(t.outcome for t in ranks[0].tuned.tune(1).trials if t.config == {"n": 1})
    assert (outcome.kind, outcome.rank) == (kind, 0)


def test_a_failure_is_what_came_before_a_timeout_of_its_clean_up():
    def cost(rank, config):
        if config["n"] > 1:
            return config["n"]
        try:
            raise MemoryError("the real error")
        finally:
            thread_ranks(2)[0].barrier("clean-up", 0.01)

    (rank,) = group(1, cost=cost)
    rank.tuned(1)
    outcome = next(t.outcome for t in rank.tuned.tune(1).trials if t.config == {"n": 1})
    assert outcome.kind == "resources"
    assert outcome.message.startswith("MemoryError: the real error; then RankTimeout: ")


def test_when_all_fail_the_traceback_has_the_first_exception_of_the_function():
    def cost(rank, config):
        raise KeyError(config["n"])

    ranks = group(2, cost=lambda rank, config: cost(rank, config) if rank else 1.0)
    good, bad = together(ranks)
    assert good.__cause__ is None
    frames = traceback.extract_tb(bad.__cause__.__traceback__)
    assert (repr(bad.__cause__), frames[-1].name) == ("KeyError(3)", "cost")


def test_when_all_fail_every_rank_raises_every_cause_and_nothing_is_kept():
    disk = MemoryStore()
    cost = fails(lambda rank, config: rank == 1, RuntimeError("no such device"))
    ranks = group(SIZE, disk=disk, cost=cost)
    for message in messages(together(ranks), NoValidConfig):
        assert message.count("launch on rank 1: RuntimeError: no such device") == 3
    assert not list(disk.records())
    assert [rank.tuned.num_tunings for rank in ranks] == [0] * SIZE


def test_prepare_is_voted_before_any_rank_launches():
    def prepare(x, n):
        if n == 1:
            raise RuntimeError(f"{n} needs too many registers")

    ranks = group(2, hooks=(Hooks(prepare=lambda x, n: None), Hooks(prepare=prepare)))
    assert together(ranks) == [(1, {"n": 2})] * 2
    tried = [config["n"] for rank in ranks for config in rank.calls]
    assert 1 not in tried
    outcome = next(t.outcome for t in ranks[0].tuned.tune(1).trials if t.config == {"n": 1})
    assert outcome == Failure("compile", "RuntimeError: 1 needs too many registers", 1)


def test_a_device_that_does_not_come_back_ends_the_tuning_on_all_ranks():
    ranks = group(2)

    def cost(rank, config):
        if (rank, config["n"]) == (1, 1):
            ranks[1].device.synchronize_error = TimeoutError("still spinning")
            raise RuntimeError("launch failed")
        return config["n"]

    for rank in ranks:
        rank.cost = cost
    for message in messages(together(ranks), TuningAborted):
        assert "rank 1: TimeoutError: still spinning" in message
        assert "{'n': 1}" in message


def test_reset_comes_before_each_run():
    log = []
    (solo,) = group(1, hooks=Hooks(reset=lambda x: log.append("reset")))
    solo.cost = lambda rank, config: log.append("run") or 1.0
    solo.tuned.tune(1)
    runs = 3 * (1 + 1 + 3)
    assert log == ["reset", "run"] * runs + ["reset"]


def test_a_reset_that_fails_after_the_last_run_is_told_to_all_ranks():
    count = []

    def reset(x):
        count.append(1)
        if len(count) == 3 * (1 + 1 + 3) + 1:
            raise RuntimeError("no memory to reset")

    ranks = group(2, hooks=(Hooks(reset=lambda x: None), Hooks(reset=reset)))
    for message in messages(together(ranks), TritonDistError):
        assert "reset_fn failed after the last run of a tuning, on rank 1" in message
        assert "no memory to reset" in message


def wrong_for(n, how):
    def check(output, reference):
        assert reference[1]["n"] == 3, "the reference is the first config's output"
        if output[1]["n"] == n:
            return how()
        return None

    return check


def raises():
    raise AssertionError("off by 7")


@pytest.mark.parametrize("how", [raises, lambda: False])
def test_a_wrong_result_on_one_rank_rejects_the_config_on_all(how):
    ranks = group(
        2, hooks=(Hooks(check=lambda output, reference: True), Hooks(check=wrong_for(1, how)))
    )
    assert together(ranks) == [(1, {"n": 2})] * 2
    outcome = next(t.outcome for t in ranks[0].tuned.tune(1).trials if t.config == {"n": 1})
    assert (outcome.kind, outcome.rank) == ("wrong_result", 1)


def test_a_rank_that_does_not_come_is_named():
    ranks = thread_ranks(2, seconds=0.2)
    alone = Rank(ranks[0], SPACE, cost_is_n)
    with pytest.raises(TuningTimeout, match=r"ops.run, first call of a key: rank\(s\) 1"):
        alone.tuned(1)


def test_a_timeout_of_a_clean_up_keeps_the_exception_before_it():
    ranks = thread_ranks(2, seconds=0.1)
    tuned = Rank(ranks[0], SPACE, cost_is_n).tuned

    def fail(clean_up):
        try:
            raise ValueError("the real error")
        finally:
            clean_up()

    for clean_up in (lambda: tuned(1), lambda: ranks[0].barrier("end", 0.1)):
        with pytest.raises(RankTimeout) as raised:
            fail(clean_up)
        shown = "".join(traceback.format_exception(raised.value))
        assert "ValueError: the real error" in shown
        assert shown.count("Error") == shown.count("real error") == 2  # the line and its message


def test_during_capture_on_one_rank_all_use_the_default_and_one_warns():
    ranks = group(2)
    ranks[1].device.capturing = True
    with pytest.warns(TuningWarning, match="capture") as caught:
        assert together(ranks) == [(1, {"n": 3})] * 2
    assert len(caught) == 1
    assert [len(rank.calls) for rank in ranks] == [1, 1]
    ranks[1].device.capturing = False
    assert together(ranks) == [(1, {"n": 1})] * 2


def test_during_capture_a_record_on_any_rank_is_used():
    disk = MemoryStore()
    together(group(2, disk=disk))
    ranks = group(2, disk=(MemoryStore(), disk), always_tune=True)
    ranks[0].device.capturing = True
    assert together(ranks) == [(1, {"n": 1})] * 2


@pytest.mark.parametrize(
    ("policy", "tried"),
    [
        (Policy(warmup=0, repeat=1, max_trials=2), 2),
        (Policy(warmup=0, repeat=1, max_seconds=1e-9), 1),
        (Policy(warmup=0, repeat=1, max_seconds=1e9), 3),
    ],
)
def test_a_budget_ends_the_search_on_all_ranks(policy, tried):
    ranks = group(2, policy=policy)
    together(ranks)
    assert [len(rank.tuned.tune(1).trials) for rank in ranks] == [tried] * 2


def test_a_record_whose_winner_left_the_space_is_not_used():
    disk = MemoryStore()
    together(group(1, disk=disk))
    (rank,) = group(1, disk=disk, space=[{"n": 2}, {"n": 5}])
    assert rank.tuned(1) == (1, {"n": 2})
    assert rank.tuned.num_tunings == 1


@pytest.mark.parametrize("size", [1, 3])
def test_what_must_be_the_same_besides_the_key(size):
    """The key is a bucket; ``agree`` tells what is in it."""
    ranks = some_that_agree(size, lambda x, **_: f"{x} rows")
    assert [result[1] for result in together(ranks, 5)] == [{"n": 1}] * size
    if size == 1:
        return
    different = some_that_agree(size, lambda x, **_: f"{x} rows")
    results = in_threads([lambda r=r: r.tuned(5 + r.ranks.rank // 2) for r in different])
    for error in results:
        assert isinstance(error, RankDisagreement)
        assert error.by_rank == {0: "5 rows", 1: "5 rows", 2: "6 rows"}
        assert "ranks disagree on the arguments of ops.run" in str(error)


def test_an_agree_fn_that_fails_is_an_error_on_all():
    def agree(x, **_):
        return 1 // (x - 6)

    results = in_threads([lambda r=r: r.tuned(5 + r.ranks.rank) for r in some_that_agree(2, agree)])
    assert [type(error) for error in results] == [RankDisagreement, ZeroDivisionError]
    assert "rank 1: ZeroDivisionError" in str(results[0])


def some_that_agree(size, agree):
    return group(size, key_fn=lambda x, **_: bucket(x), hooks=Hooks(agree=agree))


RACING = Policy.for_device("cuda", timing="events", search="racing")
SPACE_OF_6 = [{"n": n} for n in range(6)]


def racers(cost, count=2, **options):
    return [
        Rank(ranks, SPACE_OF_6, cost, search=Racing, policy=RACING, **options)
        for ranks in thread_ranks(count)
    ]


def by_config(record):
    return {dict(trial.config)["n"]: trial.outcome for trial in record.trials}


def test_the_slowest_rank_decides_who_leaves():
    milliseconds = {0: [3.0, 3.0], 1: [1.0, 8.0], 2: [8.0, 1.0], 3: [2.0, 2.0]}
    ranks = racers(lambda rank, config: milliseconds.get(config["n"], [9.0, 9.0])[rank])
    assert together(ranks) == [(1, {"n": 3})] * 2
    record = ranks[0].tuned.tune(1)
    taken = {n: len(outcome.samples) for n, outcome in by_config(record).items()}
    assert taken == {0: 11, 1: 1, 2: 1, 3: 11, 4: 1, 5: 1}


def test_every_candidate_is_run_once_before_its_first_sample_alone():
    ranks = racers(lambda rank, config: 1.0 + config["n"], count=1)
    together(ranks)
    runs = Counter(call["n"] for call in ranks[0].calls)
    # the call that returns the result is an ordinary one
    assert runs == {0: 1 + 5 + 1, 1: 1 + 2, 2: 1 + 2, 3: 2, 4: 2, 5: 2}


def test_a_failure_on_one_rank_leaves_the_race_on_all():
    runs = Counter()

    def cost(rank, config):
        runs[rank, config["n"]] += 1
        if rank == 1 and config["n"] == 2 and runs[rank, 2] == 4:
            raise RuntimeError("the fourth time")
        return [3.0, 1.2, 1.0, 9.0, 9.0, 9.0][config["n"]]

    ranks = racers(cost)
    assert together(ranks) == [(1, {"n": 1})] * 2
    outcome = by_config(ranks[0].tuned.tune(1))[2]
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.rank) == ("launch", 1)


def test_the_winner_of_a_record_that_is_not_valid_any_more_is_raced():
    policy = Policy.for_device("cuda", timing="events", search="racing", max_trials=3)
    (rank,) = racers(lambda rank, config: 6.0 - config["n"], count=1)
    together([rank])
    (again,) = racers(
        lambda rank, config: 6.0 - config["n"], count=1, disk=rank.disk, always_tune=True
    )
    again.policy = policy
    assert together([again]) == [(1, {"n": 5})]
    outcomes = by_config(again.tuned.tune(1))
    assert {n for n, each in outcomes.items() if isinstance(each, Measurement)} == {0, 1, 5}
