"""The rule by which an outcome wins."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuning.strategies import failures, milliseconds
from triton_dist._tuning.values import Failure, Measurement, winner
from triton_dist._tuning.values.winner import could_win

FAILED = Failure("launch", "no", 0)


def measured(*samples: float) -> Measurement:
    return Measurement(samples, 0)


def noisy(median: float, noise: float = 0.02) -> Measurement:
    return measured(*(median * (1 + noise * step) for step in (-2, 1, 0, 2, -1, 0, 1, -2)))


def test_of_those_that_noise_does_not_tell_apart_the_earliest_wins():
    """Each has noise of its own in each lap: half a standard error of two is about 0.7 %."""

    def own(median: float, turn: int) -> Measurement:
        samples = noisy(median).samples
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
    "late samples do not count": ([noisy(1.01, 0.0), measured(*SLOW_CLOCKS)], 0.01, 1),
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
    assert could_win(tried, first, zone)


@given(outcomes, st.floats(0, 0.5))
def test_the_winner_is_among_those_that_the_clocks_may_have_held_up(tried, zone):
    index = winner(tried, zone)
    medians = [each.median for each in tried if isinstance(each, Measurement)]
    assert (index is None) == (not medians)
    assert index is None or tried[index].median <= 1.1 * min(medians)


def test_what_an_earlier_rule_chose_could_win():
    times = [measured(1.009), FAILED, measured(1.0), measured(1.011)]
    assert [could_win(times, index, 0.01) for index in range(4)] == [True, False, True, False]


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
