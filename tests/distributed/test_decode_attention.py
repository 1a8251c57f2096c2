"""Decode attention over real processes: kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import decode_ranks
from tests.distributed.calls import under_checks
from tests.stress.decode_attn import random_calls
from triton_dist import knobs
from triton_dist.debugging.modes import interpreter_checks


def test_kinds_of_caches(on_two):
    names = ("masked", "mla, cyclic", "fp8", "shards")
    assert on_two(decode_ranks.every_kind, names, ("packets",), 1, 40) == [[], []]
    assert on_two(decode_ranks.every_kind, ("sinks",), ("all_to_all",), 1, 40) == [[], []]


def test_libraries_through_their_interfaces(on_two):
    """The libraries are substituted: no test machine has them."""
    assert on_two(decode_ranks.libraries) == [[], []]


@pytest.mark.parametrize(
    ("num_ranks", "calls"),
    [
        (3, 6),
        *(
            pytest.param(*each, marks=[pytest.mark.stress, pytest.mark.timeout(7200)])
            for each in ((2, 2000), (3, 1500), (4, 1500))
        ),
    ],
)
def test_no_result_of_random_calls_is_wrong(on_ranks, num_ranks, calls):
    assert on_ranks(num_ranks)(random_calls, calls, 1) == [(calls, [])] * num_ranks
    print(f"{num_ranks} ranks: {calls} calls, 0 wrong")  # `make stress` shows it


def test_any_rank_may_be_late(on_two):
    assert on_two(decode_ranks.replayed, 2) == [2] * 2


def test_a_call_that_gave_up_leaves_nothing_behind(on_two):
    assert on_two(decode_ranks.give_up_and_start_again) == [["sp_decode_attn.packets"], []]


def test_tuned_over_the_ranks(on_two):
    assert on_two(decode_ranks.tuned) == [1] * 2


@pytest.mark.skipif(
    "race" in interpreter_checks(knobs.debug.get()),
    reason="ranks that disagree about sizes write to the same places, which interp:race reports",
)
def test_different_arguments_are_an_error_on_every_rank(on_two):
    on_two(decode_ranks.different_arguments)


def test_no_race_and_no_access_out_of_bounds(on_two):
    assert on_two(under_checks, decode_ranks.checked) == [3] * 2


def test_layer_for_scripts(on_two):
    on_two(decode_ranks.layer)
