"""The race in a tuning of several ranks."""

from __future__ import annotations

from collections import Counter

from tests.tuning.fakes import Rank, thread_ranks, together
from triton_dist._tuning.search import Racing
from triton_dist._tuning.values import Failure, Measurement, Policy

POLICY = Policy.on("cuda", timing="events", search="racing")
SPACE = [{"n": n} for n in range(6)]


def racers(cost, count=2, **options):
    return [
        Rank(ranks, SPACE, cost, search=Racing, policy=POLICY, **options)
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
    policy = Policy.on("cuda", timing="events", search="racing", max_trials=3)
    (rank,) = racers(lambda rank, config: 6.0 - config["n"], count=1)
    together([rank])
    (again,) = racers(
        lambda rank, config: 6.0 - config["n"], count=1, disk=rank.disk, always_tune=True
    )
    again.policy = policy
    assert together([again]) == [(1, {"n": 5})]
    outcomes = by_config(again.tuned.tune(1))
    assert {n for n, each in outcomes.items() if isinstance(each, Measurement)} == {0, 1, 5}
