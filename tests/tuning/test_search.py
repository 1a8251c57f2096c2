"""Searches without an engine, and the rule by which an outcome wins."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tests.tuning.strategies  # noqa: F401  its profile: no example has a deadline
from tests.tuning.strategies import failures, milliseconds
from triton_dist._tuning.search import Exhaustive, Racing
from triton_dist._tuning.search.racing import MAX_FINALISTS, MIN_FINAL_ROUNDS
from triton_dist._tuning.values import Config, Failure, Measurement, Policy, Request, winner

ROUNDS = (1, 2, 5)
POLICY = Policy(warmup=0, repeat=10, search="racing")
FINAL = MIN_FINAL_ROUNDS
"""Laps of a final in which nothing is in doubt."""


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
        return Measurement((time,) * request.num_samples, 0)

    return outcome


def noisy(draws: st.DataObject, low: float = 0.1, high: float = 10.0):
    numbers = random.Random(draws.draw(st.integers(0, 1 << 32)))
    failing = draws.draw(st.sampled_from((0.0, 0.02, 0.1)))

    def outcome(request: Request) -> object:
        if numbers.random() < failing:
            return Failure("launch", "no", 0)
        return Measurement(tuple(numbers.uniform(low, high) for _ in range(request.num_samples)), 0)

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


IN_FINAL = ROUNDS[-1] + FINAL
"""Samples of a config that reached the final."""
# Times, policy, place of the incumbent in a larger space, and samples by config.
RACES = {
    "clear losers leave after one sample":
        ([5.0, 1.0, 1.1, 3.1], POLICY, None, {0: IN_FINAL, 1: IN_FINAL, 2: 2, 3: 1}),
    "without noise, who is behind by more than the zone leaves next":
        ([1.0, 1.009, 1.011], POLICY, None, {0: IN_FINAL, 1: IN_FINAL, 2: 2}),
    "who is left alone need not go on": ([1.0, 3.5, None], POLICY, None, {0: ROUNDS[-1], 1: 1}),
    "the incumbent is in the final whatever the limit":
        ([1.0] * 5 + [9.0], Policy(warmup=0, max_trials=3), 5, dict.fromkeys((0, 1, 5), IN_FINAL)),
    "an incumbent that is no candidate any more is not raced":
        ([1.0, 1.0], POLICY, 7, {0: IN_FINAL, 1: IN_FINAL}),
    "rounds and final are the policy's":
        ([1.0, 1.0, 1.02, 3.0], Policy(rounds=(2, 3), repeat=4), None, {0: 7, 1: 7, 2: 2, 3: 2}),
}  # fmt: skip


@pytest.mark.parametrize("race", RACES)
def test_samples_of_a_race_without_noise(race):
    times, policy, incumbent, expected = RACES[race]
    known = None if incumbent is None else Config({"n": incumbent})
    search = Racing(configs(len(times)), policy, incumbent=known)
    assert samples_of(play(search, constant(times))) == expected


def test_of_many_only_those_that_are_close_get_a_second_sample():
    times = [1.0 + 0.01 * n for n in range(100)]
    counts = samples_of(play(Racing(configs(100), POLICY), constant(times)))
    assert {n for n, count in counts.items() if count > 5} == {0, 1}
    tellers = 3 * math.ceil(100 / 16)
    assert sum(count > 1 for count in counts.values()) <= 25 + tellers
    assert all(counts[n] > 1 for n in range(6))


def test_noise_keeps_equals_in_the_race():
    samples = {0: [1.0, 1.1, 1.1, 1.0, 1.1], 1: [1.12, 1.02, 1.12, 1.02, 1.02], 2: [1.9] * 5}
    taken: Counter[int] = Counter()

    def outcome(request):
        n = request.config["n"]
        first, taken[n] = taken[n], taken[n] + request.num_samples
        return Measurement(tuple(samples[n][i % 5] for i in range(first, taken[n])), 0)

    counts = samples_of(play(Racing(configs(3), POLICY), outcome))
    assert counts == {0: 5 + POLICY.repeat, 1: 5 + POLICY.repeat, 2: 2}


@pytest.mark.parametrize("late", range(1, 10))
def test_one_hiccup_does_not_end_a_race(late):
    """Of the best, in any of its samples."""
    taken: Counter[int] = Counter()

    def outcome(request):
        n = request.config["n"]
        taken[n] += 1
        return Measurement((1.2 - 0.1 * n + (0.45 if (n, taken[n]) == (1, late) else 0.0),), 0)

    played = list(play(Racing(configs(2), POLICY), outcome))
    tried, outcomes = outcomes_of(played, 2)
    assert tried[winner(outcomes, POLICY.indifference)] == 1
    assert samples_of(played)[1] >= 5 + FINAL


def test_one_lucky_sample_makes_no_leader():
    taken: Counter[int] = Counter()

    def outcome(request):
        n = request.config["n"]
        taken[n] += 1
        return Measurement((0.5 if (n, taken[n]) == (2, 1) else 1.0 + 0.05 * n,), 0)

    played = list(play(Racing(configs(3), POLICY), outcome))
    tried, outcomes = outcomes_of(played, 3)
    assert tried[winner(outcomes, POLICY.indifference)] == 0


def drifting(times: list[float], clock: Callable[[int], float]) -> Callable[[Request], object]:
    """Each run takes as much longer as its number in the race says."""
    number = itertools.count()

    def outcome(request: Request) -> object:
        time = times[request.config["n"]]
        return Measurement(tuple(time * clock(next(number)) for _ in range(request.num_samples)), 0)

    return outcome


CLOCKS: dict[str, Callable[[int], float]] = {
    "slower and slower": lambda run: 0.95 + min(run / 1000, 0.1),
    "faster and faster": lambda run: 1.05 - min(run / 1000, 0.1),
    "a step in the first round": lambda run: 0.95 if run < 47 else 1.05,
    "a step in the final": lambda run: 1.05 if run < 190 else 0.95,
    "up and down": lambda run: 1.0 + 0.05 * math.sin(run / 20),
}


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("best", [1, 33, 78])
def test_clocks_that_drift_by_more_than_candidates_differ_do_not_decide(clock, best):
    times = [1.02 + 0.002 * (n * 37 % 80) for n in range(80)]
    times[best] = 1.0
    played = list(play(Racing(configs(80), POLICY), drifting(times, CLOCKS[clock])))
    tried, outcomes = outcomes_of(played, 80)
    assert tried[winner(outcomes, POLICY.indifference)] == best
    assert sum(samples_of(played).values()) < 80 * 5


def test_more_samples_are_taken_only_of_those_in_doubt():
    """Noise of 4 %: two are 0.1 % apart, the others 10 %."""
    noise = random.Random(3)
    times, policy = [1.1, 1.0, 1.001, 1.1, 1.1], Policy(warmup=0, repeat=10, max_extra_samples=20)

    def outcome(request):
        return Measurement((times[request.config["n"]] * noise.gauss(1, 0.04),), 0)

    counts = samples_of(play(Racing(configs(5), policy), outcome))
    assert counts[1] == counts[2] == 35
    assert max(counts[n] for n in (0, 3, 4)) < 25


def test_with_runs_that_do_not_count_a_lap_has_more_that_do():
    policy = Policy(warmup=1, repeat=10)
    asked = [r.num_samples for r, _ in play(Racing(configs(2), policy), constant([1.0, 1.0]))]
    assert asked == [1, 1, 1, 1, 3, 3, 3, 3, 3, 3]


def test_the_final_is_run_forward_and_backward():
    asked = [
        (request.config["n"], request.num_samples)
        for request, _ in play(Racing(configs(3), POLICY), constant([1.004, 1.002, 1.0]))
    ]
    assert asked[:3] == [(0, 1), (1, 1), (2, 1)]
    forward, backward = [(2, 1), (1, 1), (0, 1)], [(0, 1), (1, 1), (2, 1)]
    assert asked[-12:] in ([*forward, *backward] * 2, [*backward, *forward] * 2)


def test_few_meet_in_the_final():
    times = [2.5, *(1.0 + 0.0001 * n for n in range(20))]
    counts = samples_of(play(Racing(configs(21), POLICY), constant(times)))
    finalists = {n for n, count in counts.items() if count > ROUNDS[-1]}
    assert finalists == {0, *range(1, MAX_FINALISTS + 1)}


def test_whom_a_failure_put_out_of_the_race_is_called_back():
    times, runs = [3.0, 1.2, 1.0, 9.0], Counter()

    def outcome(request):
        n = request.config["n"]
        runs[n] += 1
        if (n, runs[n]) == (2, 3):
            return Failure("launch", "no", 0)
        return Measurement((times[n],) * request.num_samples, 0)

    played = list(play(Racing(configs(4), POLICY), outcome))
    _, outcomes = outcomes_of(played, 4)
    assert winner(outcomes, POLICY.indifference) == 1
    assert samples_of(played) == {0: 5 + FINAL, 1: 5 + FINAL, 2: 2, 3: 1}


times = st.lists(st.floats(0.001, 1000.0) | st.none(), min_size=1, max_size=40)
close = st.lists(st.floats(1.0, 1.02), min_size=1, max_size=40)


@given(times | close)
@example([])
@example([None] * 3)
def test_without_noise_the_best_is_never_dropped(each):
    played = list(play(Racing(configs(len(each)), POLICY), constant(each)))
    counts = samples_of(played)
    valid = [time for time in each if time is not None]
    if not valid:
        assert [request.config["n"] for request, _ in played] == [*range(len(each))]
        return
    best = each.index(min(valid))
    assert counts[best] == max(counts.values())
    tried, outcomes = outcomes_of(played, len(each))
    chosen = tried[winner(outcomes, POLICY.indifference)]
    assert each[chosen] == min(valid)


@given(st.integers(1, 20), st.integers(1, 12), st.integers(0, 5), st.data())
def test_it_ends_and_the_samples_are_bounded(count, repeat, max_extra_samples, data):
    search = Racing(
        configs(count), Policy(warmup=0, repeat=repeat, max_extra_samples=max_extra_samples)
    )
    played = list(play(search, noisy(data)))
    counts = samples_of(played)
    assert all(taken <= ROUNDS[-1] + repeat + max_extra_samples for taken in counts.values())
    if all(isinstance(outcome, Measurement) for _, outcome in played):
        finalists = [n for n, taken in counts.items() if taken > ROUNDS[-1]]
        assert len(finalists) <= MAX_FINALISTS + 1


@given(st.integers(2, 20), st.data())
def test_default_and_incumbent_are_in_the_final(count, data):
    space = configs(count)
    incumbent = data.draw(st.integers(0, count - 1))
    played = list(play(Racing(space, POLICY, space[incumbent]), noisy(data)))
    failed = {r.config["n"] for r, outcome in played if isinstance(outcome, Failure)}
    counts = samples_of(played)
    for seeded in {0, incumbent} - failed:
        most = max(taken for n, taken in counts.items() if n not in failed)
        assert counts[seeded] >= min(most, ROUNDS[-1] + MIN_FINAL_ROUNDS)


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
    for end in range(1, len(played) + 1, 7):
        tried, outcomes = outcomes_of(played[:end], len(each))
        chosen = tried[winner(outcomes, POLICY.indifference)]
        assert each[chosen] <= min(each[n] for n in tried) * (1 + POLICY.indifference)


@given(times)
def test_the_fastest_so_far_is_asked_for_first(each):
    """So that a tuning whose time is up has measured those that count."""
    played = list(play(Racing(configs(len(each)), POLICY), constant(each)))
    valid = [time for time in each if time is not None]
    later = [request for request, _ in played[len(each) :]]
    if later:
        assert each[later[0].config["n"]] == min(valid)


FAILED = Failure("launch", "no", 0)


def measured(*samples: float) -> Measurement:
    return Measurement(samples, 0)


def with_noise(median: float, noise: float = 0.02) -> Measurement:
    return measured(*(median * (1 + noise * step) for step in (-2, 1, 0, 2, -1, 0, 1, -2)))


def test_of_those_that_noise_does_not_tell_apart_the_earliest_wins():
    """Each has noise of its own in each lap: half a standard error of two is about 0.7 %."""

    def own(median: float, turn: int) -> Measurement:
        samples = with_noise(median).samples
        return measured(*samples[turn:], *samples[:turn])

    times = [own(1.05, 0), own(1.0, 3), own(0.99, 5)]
    assert winner(times, 0.01) == 1
    assert winner(times, 0.001) == winner(times, 0.0) == 2


def test_clocks_that_drift_from_lap_to_lap_hide_no_difference():
    """By 10 % from lap to lap, while the candidates are 0.4 % apart."""
    clocks = (0.95, 1.05, 0.97, 1.02, 1.05, 0.95, 0.96)
    times = [measured(*(each * clock for clock in clocks)) for each in (1.004, 1.0, 1.002)]
    assert winner(times, 0.01) == 1


def test_laps_that_one_was_not_in_do_not_count_for_it():
    """The second left the race after four laps, all in a fast moment; medians would have it win."""
    clocks = (0.95, 0.95, 0.96, 0.95, 1.02, 1.03, 1.02, 1.03)
    stayed, left = (
        measured(*(each * clock for clock in clocks[:rounds]))
        for each, rounds in ((1.0, 8), (1.02, 4))
    )
    assert left.median < stayed.median
    assert winner([stayed, left], 0.01) == winner([left, stayed], 0.01) - 1 == 0


SLOW_CLOCKS = (1.0, 3.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0)
CLOSE = [measured(each, each) for each in (1.011, 1.0099, 1.0, 1.0)]
WINNERS = {
    "of equals the earliest": ([FAILED, measured(2.0), measured(1.0), measured(1.0)], 0.0, 2),
    "a measured difference is not given away, without a zone": (CLOSE, 0.0, 2),
    "nor with one": (CLOSE, 0.01, 2),
    "nor with a wide one": (CLOSE, 0.02, 2),
    "late samples do not count": ([with_noise(1.01, 0.0), measured(*SLOW_CLOCKS)], 0.01, 1),
    "few samples do not count": ([measured(*[1.0] * 5), measured(0.9, 0.9)], 0.01, 0),
    "three do": ([measured(*[1.0] * 5), measured(0.9, 0.9, 0.9)], 0.01, 1),
    "a clock that was set back": ([measured(1.0), measured(-3.0)], 0.01, 1),
    "none without an outcome": ([], 0.01, None),
    "none without a measurement": ([FAILED, FAILED], 0.01, None),
}


@pytest.mark.parametrize("case", WINNERS)
def test_who_wins(case):
    outcomes, zone, expected = WINNERS[case]
    assert winner(outcomes, zone) == expected


@pytest.mark.parametrize("indifference", [-0.01, 1.0, math.nan, math.inf])
def test_indifference_is_a_fraction(indifference):
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        winner([measured(1.0)], indifference)


@pytest.mark.parametrize("sample", [math.nan, math.inf])
def test_a_sample_is_a_time(sample):
    with pytest.raises(ValueError, match="times"):
        measured(1.0, sample)


several = st.lists(milliseconds, min_size=3, max_size=3).map(lambda times: measured(*times))
outcomes = st.lists(several | failures, min_size=1, max_size=8)


same = st.lists(milliseconds | failures, min_size=1, max_size=8).map(
    lambda tried: [each if isinstance(each, Failure) else measured(*[each] * 3) for each in tried]
)


@given(same, st.floats(0, 0.5))
def test_without_noise_the_earliest_of_the_best_wins(tried, zone):
    index = winner(tried, zone)
    medians = [each.median for each in tried if isinstance(each, Measurement)]
    if not medians:
        assert index is None
        return
    first = next(i for i, each in enumerate(tried) if getattr(each, "median", None) == min(medians))
    assert index == first


@given(outcomes, st.floats(0, 0.5))
def test_the_winner_is_among_those_that_the_clocks_may_have_held_up(tried, zone):
    index = winner(tried, zone)
    medians = [each.median for each in tried if isinstance(each, Measurement)]
    assert (index is None) == (not medians)
    assert index is None or tried[index].median <= 1.1 * min(medians)


@given(outcomes, st.floats(0, 0.5), st.data())
def test_what_is_slower_by_far_changes_nothing(tried, zone, data):
    slow = measured(*[max([0.0, *_all_samples(tried)]) * 2 + 1] * 3)
    index = winner(tried, zone)
    place = data.draw(st.integers(0, len(tried)))
    now = winner([*tried[:place], slow, *tried[place:]], zone)
    expected = place if index is None else index + (place <= index)
    assert now == expected


@given(outcomes, st.floats(0, 0.5))
def test_units_and_the_order_of_laps_do_not_matter(tried, zone):
    def changed(outcome):
        if isinstance(outcome, Failure):
            return outcome
        return measured(*(4096 * sample for sample in outcome.samples[::-1]))

    assert winner(list(map(changed, tried)), zone) == winner(tried, zone)


def _all_samples(tried):
    return [s for each in tried if isinstance(each, Measurement) for s in each.samples]
