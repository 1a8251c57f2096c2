"""Searches asked and answered without an engine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_dist._tuning.search import Exhaustive, Racing
from triton_dist._tuning.search.racing import FINALISTS
from triton_dist._tuning.values import Config, Failure, Measurement, Policy, Request, winner

ROUNDS = (1, 2, 5)
POLICY = Policy(warmup=0, repeat=10, search="racing")
FINAL = 10
"""Samples that a finalist gets in the final."""


def configs(count: int) -> list[Config]:
    return [Config({"n": n}) for n in range(count)]


def play(search, outcome: Callable[[Request], object]) -> Iterator[tuple[Request, object]]:
    """What is asked, and what came of it."""
    while (request := search.ask()) is not None:
        result = outcome(request)
        search.tell(request, result)
        yield request, result


def constant(times: list[float | None]) -> Callable[[Request], object]:
    """Each config always takes as long; ``None`` fails."""

    def outcome(request: Request) -> object:
        time = times[request.config["n"]]
        if time is None:
            return Failure("launch", "no", 0)
        return Measurement((time,) * request.samples, 0)

    return outcome


def noisy(draws: st.DataObject, low: float = 0.1, high: float = 10.0):
    def outcome(request: Request) -> object:
        sample = st.floats(low, high)
        if draws.draw(st.integers(0, 9)) == 0:
            return Failure("launch", "no", 0)
        times = draws.draw(st.lists(sample, min_size=request.samples, max_size=request.samples))
        return Measurement(tuple(times), 0)

    return outcome


def samples_of(played) -> Counter[int]:
    counts: Counter[int] = Counter()
    for request, outcome in played:
        if isinstance(outcome, Measurement):
            counts[request.config["n"]] += len(outcome.samples)
    return counts


def outcomes_of(played, count: int):
    samples, failed = defaultdict(tuple), {}
    for request, outcome in played:
        n = request.config["n"]
        if isinstance(outcome, Failure):
            failed[n] = outcome
        else:
            samples[n] += outcome.samples
    tried = [n for n in range(count) if n in samples or n in failed]
    return tried, [failed.get(n) or Measurement(samples[n], 0) for n in tried]


def test_exhaustive_asks_for_each_once_in_order():
    played = list(play(Exhaustive(configs(3), Policy(repeat=4)), constant([3.0, 1.0, 2.0])))
    assert [request for request, _ in played] == [Request(config, 4) for config in configs(3)]


@pytest.mark.parametrize("search", [Exhaustive, Racing])
def test_max_trials_counts_configs(search):
    played = play(search(configs(5), Policy(max_trials=2)), constant([3.0, 2.9, 1.0, 1.0, 1.0]))
    assert {request.config["n"] for request, _ in played} == {0, 1}


def test_clear_losers_leave_after_one_sample():
    counts = samples_of(play(Racing(configs(4), POLICY), constant([5.0, 1.0, 1.1, 2.1])))
    assert counts == {0: 5 + FINAL, 1: 5 + FINAL, 2: 2, 3: 1}


def test_without_noise_who_is_behind_by_more_than_the_zone_leaves_next():
    counts = samples_of(play(Racing(configs(3), POLICY), constant([1.0, 1.009, 1.011])))
    assert counts == {0: 5 + FINAL, 1: 5 + FINAL, 2: 2}


def test_noise_keeps_equals_in_the_race():
    samples = {0: [1.0, 1.1, 1.0, 1.1, 1.0], 1: [1.06, 1.16, 1.06, 1.16, 1.06], 2: [1.9] * 5}
    taken: Counter[int] = Counter()

    def outcome(request):
        n = request.config["n"]
        first, taken[n] = taken[n], taken[n] + request.samples
        return Measurement(tuple(samples[n][i % 5] for i in range(first, taken[n])), 0)

    counts = samples_of(play(Racing(configs(3), POLICY), outcome))
    assert counts == {0: 5 + FINAL, 1: 5 + FINAL, 2: 2}


def test_one_hiccup_does_not_end_a_race():
    taken: Counter[int] = Counter()

    def outcome(request):
        n = request.config["n"]
        taken[n] += 1
        hiccup = 9.0 if (n, taken[n]) == (1, 2) else 0.0
        return Measurement(tuple([2.0 - n + hiccup, *[2.0 - n] * 9][: request.samples]), 0)

    assert samples_of(play(Racing(configs(2), POLICY), outcome))[1] == 5 + FINAL


def test_the_final_is_run_forward_and_backward():
    asked = [
        (request.config["n"], request.samples)
        for request, _ in play(Racing(configs(3), POLICY), constant([1.004, 1.002, 1.0]))
    ]
    assert asked[:3] == [(0, 1), (1, 1), (2, 1)]
    assert asked[-6:] == [(2, 5), (1, 5), (0, 5), (0, 5), (1, 5), (2, 5)]


def test_few_meet_in_the_final():
    times = [2.5, *(1.0 + 0.0001 * n for n in range(20))]
    counts = samples_of(play(Racing(configs(21), POLICY), constant(times)))
    finalists = {n for n, count in counts.items() if count > ROUNDS[-1]}
    assert finalists == {0, *range(1, FINALISTS + 1)}


def test_who_is_left_alone_need_not_go_on():
    counts = samples_of(play(Racing(configs(3), POLICY), constant([1.0, 2.5, None])))
    assert counts == {0: ROUNDS[-1], 1: 1}


def test_the_incumbent_is_raced_to_the_end_whatever_the_limit():
    space = configs(6)
    search = Racing(space, Policy(max_trials=3), incumbent=space[5])
    counts = samples_of(play(search, constant([1.0, 1.0, 1.0, 1.0, 1.0, 9.0])))
    assert counts == {0: 15, 1: 15, 5: 15}


def test_an_incumbent_that_is_no_candidate_any_more_is_not_raced():
    search = Racing(configs(2), POLICY, incumbent=Config({"n": 7}))
    assert set(samples_of(play(search, constant([1.0, 1.0])))) == {0, 1}


def test_rounds_and_final_are_the_policys():
    policy = Policy(rounds=(2, 3), repeat=4)
    counts = samples_of(play(Racing(configs(4), policy), constant([1.0, 1.0, 1.02, 3.0])))
    assert counts == {0: 3 + 4, 1: 3 + 4, 2: 2, 3: 2}


def test_whom_a_failure_put_out_of_the_race_is_called_back():
    times, runs = [3.0, 1.2, 1.0, 9.0], Counter()

    def outcome(request):
        n = request.config["n"]
        runs[n] += 1
        if (n, runs[n]) == (2, 3):
            return Failure("launch", "no", 0)
        return Measurement((times[n],) * request.samples, 0)

    played = list(play(Racing(configs(4), POLICY), outcome))
    _, outcomes = outcomes_of(played, 4)
    assert winner(outcomes, POLICY.indifference) == 1
    assert samples_of(played) == {0: 15, 1: 15, 2: 2, 3: 1}


def test_all_fail():
    played = list(play(Racing(configs(3), POLICY), constant([None] * 3)))
    assert [request.config["n"] for request, _ in played] == [0, 1, 2]


def test_no_candidates():
    assert Racing([], POLICY).ask() is None


times = st.lists(st.floats(0.001, 1000.0) | st.none(), min_size=1, max_size=40)
close = st.lists(st.floats(1.0, 1.02), min_size=1, max_size=40)


@given(times | close)
def test_without_noise_the_best_is_never_dropped(each):
    played = list(play(Racing(configs(len(each)), POLICY), constant(each)))
    counts = samples_of(played)
    valid = [time for time in each if time is not None]
    if not valid:
        return
    best = each.index(min(valid))
    assert counts[best] == max(counts.values())
    tried, outcomes = outcomes_of(played, len(each))
    chosen = tried[winner(outcomes, POLICY.indifference)]
    assert each[chosen] <= min(valid) * (1 + POLICY.indifference)


@given(st.integers(1, 20), st.integers(1, 12), st.data())
def test_it_ends_and_the_samples_are_bounded(count, repeat, data):
    search = Racing(configs(count), Policy(repeat=repeat))
    played = list(play(search, noisy(data)))
    assert len(played) <= count * (len(ROUNDS) + 2)
    counts = samples_of(played)
    assert all(taken <= ROUNDS[-1] + repeat + 1 for taken in counts.values())
    if all(isinstance(outcome, Measurement) for _, outcome in played):
        finalists = [n for n, taken in counts.items() if taken > ROUNDS[-1]]
        assert len(finalists) <= FINALISTS + 1
        assert len(played) <= count * len(ROUNDS) + 2 * (FINALISTS + 1)


@given(st.integers(2, 20), st.data())
def test_default_and_incumbent_stay_to_the_end(count, data):
    space = configs(count)
    incumbent = data.draw(st.integers(0, count - 1))
    played = list(play(Racing(space, POLICY, space[incumbent]), noisy(data)))
    failed = {r.config["n"] for r, outcome in played if isinstance(outcome, Failure)}
    counts = samples_of(played)
    for seeded in {0, incumbent} - failed:
        assert counts[seeded] == max(taken for n, taken in counts.items() if n not in failed)


@given(st.integers(1, 15), st.data())
def test_what_failed_is_not_asked_for_again(count, data):
    failed = set()
    for request, outcome in play(Racing(configs(count), POLICY), noisy(data)):
        assert request.config["n"] not in failed
        if isinstance(outcome, Failure):
            failed.add(request.config["n"])


@given(st.integers(1, 12), st.data())
def test_the_same_outcomes_lead_to_the_same_requests(count, data):
    played = list(play(Racing(configs(count), POLICY), noisy(data)))
    again = Racing(configs(count), POLICY)
    for request, outcome in played:
        assert again.ask() == request
        again.tell(request, outcome)
    assert again.ask() is None


@given(close)
def test_whenever_time_is_up_the_winner_is_nearly_the_best_of_those_tried(each):
    played = list(play(Racing(configs(len(each)), POLICY), constant(each)))
    for end in range(1, len(played) + 1):
        tried, outcomes = outcomes_of(played[:end], len(each))
        chosen = tried[winner(outcomes, POLICY.indifference)]
        assert each[chosen] <= min(each[n] for n in tried) * (1 + POLICY.indifference)


@given(times)
def test_in_each_later_round_the_fastest_come_first(each):
    asked = [
        request
        for request, outcome in play(Racing(configs(len(each)), POLICY), constant(each))
        if isinstance(outcome, Measurement)
    ]
    second = [each[r.config["n"]] for r in asked[sum(t is not None for t in each) :]]
    left = len({r.config["n"] for r in asked[len([t for t in each if t is not None]) :]})
    assert all(earlier <= later for earlier, later in pairwise(second[:left]))
