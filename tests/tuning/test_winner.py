"""The rule by which an outcome wins."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuning.strategies import failures, milliseconds
from triton_dist._tuning.values import Failure, Measurement, winner

FAILED = Failure("launch", "no", 0)


def measured(*samples: float) -> Measurement:
    return Measurement(samples, 0)


def test_lowest_median_wins():
    assert winner([measured(3.0, 9.0, 1.0), measured(2.0, 2.0, 2.5), FAILED], 0.0) == 1


def test_of_equals_the_earliest_wins():
    assert winner([FAILED, measured(2.0), measured(1.0), measured(1.0)], 0.0) == 2


def test_without_noise_the_earliest_within_the_zone_wins():
    times = [measured(each, each) for each in (1.011, 1.0099, 1.0, 1.005)]
    assert winner(times, 0.01) == 1
    assert winner(times, 0.0) == 2
    assert winner(times, 0.02) == 0


def test_noise_narrows_the_zone_to_no_less_than_a_quarter():
    def noisy(median: float) -> Measurement:
        return measured(*(median * (1 + 0.02 * step) for step in (-2, -1, 0, 1, 2)))

    assert winner([noisy(1.008), noisy(1.003), noisy(1.002), noisy(1.0)], 0.01) == 2


def test_who_was_dropped_after_few_samples_does_not_count():
    lucky, finalist = measured(0.9, 0.9), measured(*[1.0] * 5)
    assert winner([finalist, lucky], 0.01) == 0
    assert winner([finalist, measured(0.9, 0.9, 0.9)], 0.01) == 1


def test_a_clock_that_was_set_back_still_has_a_winner():
    assert winner([Measurement((1.0,), 0), Measurement((-3.0,), 0)], 0.01) == 1


def test_no_winner_without_a_measurement():
    assert winner([], 0.01) is None
    assert winner([FAILED, FAILED], 0.01) is None


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


@given(outcomes, st.floats(0, 0.5))
def test_the_winner_is_as_good_as_the_zone_says_and_nothing_better_comes_earlier(tried, zone):
    index = winner(tried, zone)
    medians = [each.median for each in tried if isinstance(each, Measurement)]
    if not medians:
        assert index is None
        return
    assert tried[index].median <= min(medians) * (1 + zone)
    earlier = [each for each in tried[:index] if isinstance(each, Measurement)]
    assert all(each.median > tried[index].median for each in earlier if each.median)


@given(outcomes, st.floats(0, 0.5), st.data())
def test_what_is_slower_by_far_changes_nothing(tried, zone, data):
    slow = measured(*[max([0.0, *_all_samples(tried)]) * 2 + 1] * 3)
    index = winner(tried, zone)
    place = data.draw(st.integers(0, len(tried)))
    now = winner([*tried[:place], slow, *tried[place:]], zone)
    expected = place if index is None else index + (place <= index)
    assert now == expected


@given(outcomes, st.floats(0, 0.5))
def test_units_and_the_order_of_samples_do_not_matter(tried, zone):
    def changed(outcome):
        if isinstance(outcome, Failure):
            return outcome
        return measured(*(4096 * sample for sample in sorted(outcome.samples)))

    assert winner(list(map(changed, tried)), zone) == winner(tried, zone)


def _all_samples(tried):
    return [s for each in tried if isinstance(each, Measurement) for s in each.samples]


def test_a_clock_that_runs_backwards_still_has_a_winner():
    outcomes = [Measurement((value,) * 3, 0, "none") for value in (-1.0, -5.0, 2.0)]
    assert winner(outcomes, 0.01) == 1
