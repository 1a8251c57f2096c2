"""Predicted times (``prior_fn``): the order of a race, ``search="prior"``, and answers without any
measurement (``TRITON_DIST_AUTOTUNE=prior``)."""

from __future__ import annotations

import math

import pytest

from tests.tuning.fakes import Rank, thread_ranks, together
from triton_dist import knobs, tune
from triton_dist._tuning.search import search_for
from triton_dist._tuning.values import Policy
from triton_dist.errors import InvalidArgument, NoValidConfig, PriorFailed, RankDisagreement

NUMBER = 20
SPACE = [{"n": n} for n in range(NUMBER)]
BEST = 13


def cost(rank, config) -> float:
    return 10.0 + abs(config["n"] - BEST)


def truth(config, x, **_) -> float:
    return cost(0, config)


def some(size=1, search="racing", **options):
    policy = Policy.for_device("cuda", timing="events", search=search)
    options = {"prior_fn": truth, "search": search_for, "policy": policy} | options
    return [Rank(each, SPACE, cost, **options) for each in thread_ranks(size)]


def order_of(rank) -> list[int]:
    """The configs in the order in which they first ran."""
    return list(dict.fromkeys(call["n"] for call in rank.calls))


def by_truth(number: int) -> list[int]:
    return sorted(range(NUMBER), key=lambda n: truth({"n": n}, 1))[:number]


def test_promising_configs_race_first_and_hopeless_ones_not_at_all():
    (rank,) = some()
    assert rank.tuned(1) == (1, {"n": BEST})
    # The default of the space always takes part.
    assert order_of(rank) == [0, *by_truth(len(order_of(rank)) - 1)]
    assert len(order_of(rank)) < NUMBER / 2


@pytest.mark.parametrize(
    "prior_fn",
    [
        lambda config, x, **_: 1 / truth(config, x),
        lambda config, x, **_: 1.0 + config["n"] * 7 % NUMBER,
    ],
)
def test_wrong_predictions_do_not_change_the_winner(prior_fn):
    """A rule that trusts the predictions blindly skips the winner in each of these races."""
    (rank,) = some(prior_fn=prior_fn)
    ranked = sorted(range(1, NUMBER), key=lambda n: prior_fn({"n": n}, 1))
    assert rank.tuned(1) == (1, {"n": BEST})
    assert order_of(rank) == [0, *ranked]


def test_an_earlier_winner_races_though_it_is_hopeless_now():
    (before,) = some(prior_fn=None)
    before.cost = lambda rank, config: 20.0 - config["n"]
    assert before.tuned(1) == (1, {"n": NUMBER - 1})
    (rank,) = some(disk=before.disk, always_tune=True)
    assert rank.tuned(1) == (1, {"n": BEST})
    assert NUMBER - 1 in order_of(rank)
    assert len(order_of(rank)) < NUMBER / 2


def test_configs_that_a_failing_one_made_hopeless_race_again():
    runs = []

    def fails_later(rank, config):
        runs.append(config["n"])
        if config["n"] == BEST and runs.count(BEST) > 4:
            raise RuntimeError("no")
        return cost(rank, config) / (5 if config["n"] == BEST else 1)

    (rank,) = some()
    rank.cost = fails_later
    assert rank.tuned(1)[1]["n"] in (BEST - 1, BEST + 1)


def test_an_algorithm_is_not_skipped_before_one_of_its_configs_is_sampled():
    space = [each | {"algorithm": "a"} for each in SPACE] + [{"n": BEST, "algorithm": "b"}]

    def cheaper(rank, config):
        return cost(rank, config) - (config["algorithm"] == "b")

    def wrong(config, x, **_):
        return cost(0, config) * (4 if config["algorithm"] == "b" else 1)

    policy = Policy.for_device("cuda", timing="events", search="racing")
    (own,) = thread_ranks(1)
    rank = Rank(own, space, cheaper, prior_fn=wrong, search=search_for, policy=policy)
    assert rank.tuned(1)[1] == {"n": BEST, "algorithm": "b"}
    assert len({call["n"] for call in rank.calls}) < NUMBER / 2


def test_only_the_most_promising_are_measured():
    (rank,) = some(search="prior")
    assert rank.tuned(1) == (1, {"n": BEST})
    assert order_of(rank) == by_truth(8)
    (rank,) = some(search="prior", prior_fn=None)
    rank.tuned(1)
    assert order_of(rank) == list(range(8))


def test_unknown_predictions_are_last_and_are_not_skipped():
    def unknown(config, x, **_):
        return {3: math.nan, 5: math.inf}.get(config["n"], truth(config, x))

    (rank,) = some(prior_fn=unknown)
    rank.tuned(1)
    assert order_of(rank)[-2:] == [3, 5]
    assert len(order_of(rank)) <= NUMBER / 2
    (rank,) = predicting(prior_fn=lambda config, x: 2.0 if config["n"] == 7 else math.nan)
    assert rank.tuned(1) == (1, {"n": 7})


def predicting(size=1, **options):
    return some(size, predict_only=True, **options)


def test_an_answer_without_a_measurement_is_agreed_and_not_stored():
    ranks = predicting(2)
    ranks[1].prior_fn = None
    ranks[1].tuned.prior_fn = lambda config, x: 1.0 + config["n"]
    ranks[1].predict_only = False  # one rank is enough
    assert together(ranks) == [(1, {"n": BEST})] * 2
    assert [rank.calls for rank in ranks] == [[{"n": BEST}]] * 2
    assert [list(rank.disk.records()) for rank in ranks] == [[], []]
    assert [rank.tuned.num_tunings for rank in ranks] == [0, 0]
    for rank in ranks:
        rank.ranks.phases.clear()
    assert together(ranks) == [(1, {"n": BEST})] * 2
    assert [rank.ranks.phases for rank in ranks] == [[], []]


def test_the_first_of_nearly_equal_predictions_is_the_answer():
    """1 % is ``Policy.indifference``. The space lists preferred configs first."""
    times = {4: 1.011, 6: 1.009, 9: 1.0}
    (rank,) = predicting(prior_fn=lambda config, x: times.get(config["n"], 2.0))
    assert rank.tuned(1) == (1, {"n": 6})


def test_a_tuning_replaces_the_answer():
    (rank,) = predicting(prior_fn=lambda config, x: 1.0 + config["n"])
    assert rank.tuned(1) == (1, {"n": 0})
    record = rank.tuned.tune(1)
    assert dict(rank.tuned.config_space.find(record.best.digest)) == {"n": BEST}
    assert rank.tuned(1) == (1, {"n": BEST})
    assert rank.tuned.num_tunings == 1
    (later,) = predicting(prior_fn=lambda config, x: 1.0 + config["n"], disk=rank.disk)
    assert later.tuned(1) == (1, {"n": BEST})
    assert later.calls == [{"n": BEST}]


@pytest.mark.parametrize(
    ("fallback_fn", "expected"), [(lambda config: config["n"] in (4, 6), 4), (lambda c: False, 1)]
)
def test_without_prior_fn_a_fallback_or_the_first_config_is_used(fallback_fn, expected):
    (rank,) = predicting(
        prior_fn=None, fallback_fn=fallback_fn, prune_fn=lambda config, x: config["n"] > 0
    )
    assert rank.tuned(1) == (1, {"n": expected})
    assert rank.calls == [{"n": expected}]


def test_pruned_configs_are_not_answers():
    (rank,) = predicting(prune_fn=lambda config, x: config["n"] != BEST)
    assert rank.tuned(1) == (1, {"n": BEST - 1})
    ranks = predicting(2, prune_fn=lambda config, x: False)
    assert [type(error) for error in together(ranks)] == [NoValidConfig] * 2

    def broken(config, x):
        raise ArithmeticError

    errors = together(predicting(2, prune_fn=broken))
    assert [type(error) for error in errors] == [ArithmeticError, RankDisagreement]


@pytest.mark.parametrize("predict_only", [False, True])
@pytest.mark.parametrize(
    ("value", "cause"),
    [(ZeroDivisionError("no"), "ZeroDivisionError: no"), (-1.0, "returned -1.0")],
)
def test_a_failing_prior_fn_is_an_error_on_all_ranks(predict_only, value, cause):
    def fails(config, x):
        if config["n"] != 3:
            return 1.0
        if isinstance(value, Exception):
            raise value
        return value

    ranks = some(2, prior_fn=fails, predict_only=predict_only)
    errors = together(ranks)
    for error in errors:
        assert isinstance(error, PriorFailed)
        assert (error.rank, error.config) == (0, "{'n': 3}")
        assert "ops.run, key 1: prior_fn failed on rank 0 for config {'n': 3}: " in str(error)
        assert cause in str(error)
    assert [rank.calls for rank in ranks] == [[], []]
    for rank in ranks:
        rank.tuned.prior_fn = truth
    assert together(ranks) == [(1, {"n": BEST})] * 2


def test_combinations_without_a_meaning_are_refused():
    large = tune.Product({name: tuple(range(100)) for name in "abc"})
    with pytest.raises(InvalidArgument, match=r"prior_fn is .* expected None: it would be called"):
        tune.autotune(large, len, prior_fn=truth, search="surrogate")
    with pytest.raises(InvalidArgument, match="search is 'prior', expected \"surrogate\""):
        tune.autotune(large, len, search="prior")
    with pytest.raises(InvalidArgument, match="prior_fn is 5, expected a function"):
        tune.autotune(SPACE, len, prior_fn=5)  # type: ignore[arg-type]


def test_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")  # no effect
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "prior")
    calls, broken = [], []

    @tune.autotune(
        SPACE, lambda x: None, scope="rank", sizes=("x",), search="prior", prior_fn=truth
    )
    def work(x: int, n: int) -> int:
        calls.append(n)
        if n == BEST and broken:
            raise ValueError
        return n

    assert (work(1000), work(1001), calls) == (BEST, BEST, [BEST] * 2)
    assert not list(tmp_path.rglob("*.json"))
    monkeypatch.delenv("TRITON_DIST_AUTOTUNE_FROZEN")
    broken.append(True)
    assert len(work.tune(1000).trials) == 8
    assert work(1000) == work(1001) != BEST
    with tune.autotuning():
        work(1)
    assert work.num_tunings == 2
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "maybe")
    with pytest.raises(knobs.InvalidKnob, match="expected 0, 1 or prior"):
        work(3)
