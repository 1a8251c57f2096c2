"""All-reduce in packets over real processes: the kernel in the interpreter, memory in /dev/shm.

What all ways of the all-reduce have in common is in ``test_collectives.py``."""

from __future__ import annotations

import re

import pytest

from tests.distributed import packet_ranks
from tests.distributed.collective_calls import NO_TAG


def test_no_word_is_left_behind(on_any):
    (count,) = set(on_any(packet_ranks.many_sizes, 12))
    assert count > 12


@pytest.mark.parametrize("before", [2**11 - 3, 2**38 - 3])
def test_tags_may_come_again(on_two, before):
    assert on_two(packet_ranks.tags_come_again, before) == [6] * 2


def test_odd_values_travel_as_they_are(on_any):
    assert set(on_any(packet_ranks.odd_values)) == {3}


@pytest.mark.stress
def test_what_one_launch_cannot_take_goes_in_several(on_few):
    assert set(on_few(packet_ranks.large, 150_000)) == {2}


def test_a_call_that_gives_up_says_whose_word_is_late(on_any):
    for rank, (flag, *tags) in enumerate(on_any(packet_ranks.who_is_late, 1)):
        if rank == 1:
            assert flag == ""
        else:
            assert re.fullmatch(r"all_reduce\.packets\[0, 1, \d+\]", flag)
            assert tags == [0x80000000 + (2 << 20) + 300, NO_TAG * 0x01010101]
