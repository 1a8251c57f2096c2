"""Older keywords that name a way are heeded where nothing is tuned."""

from __future__ import annotations

from tests.distributed import named_algorithm_ranks


def test_the_way_that_is_asked_for_runs(on_two):
    assert on_two(named_algorithm_ranks.run_what_is_asked_for) == [([], 22)] * 2


def test_what_names_no_way_is_refused(on_two):
    for messages in on_two(named_algorithm_ranks.refused_untuned):
        assert len(messages) == 3 * 7
        assert sum(": method is " in each for each in messages) == 3 * 7 - 3
        assert sum("algorithm is 'async_tp', expected another" in each for each in messages) == 3
