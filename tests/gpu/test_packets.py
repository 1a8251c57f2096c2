"""All-reduce in packets on GPUs: what CPU ranks check, compiled. ``test_collectives.py`` has what
all ways have in common."""

from __future__ import annotations

import re

import pytest

from tests.distributed import packet_ranks
from tests.distributed.test_packets import (  # noqa: F401
    test_odd_values_travel_as_they_are,
)
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


def test_what_one_launch_cannot_take_goes_in_several(on_few):
    assert set(on_few(packet_ranks.large, 150_000)) == {2}


def test_no_word_is_left_behind(on_gpus, alternate):
    number = 200 if alternate else 3000
    (count,) = set(on_gpus(packet_ranks.many_sizes, number))
    assert count > number


@few_ranks
@pytest.mark.parametrize("before", [2**31 - 3, 2**32 - 3, 2**40 - 3])
def test_tags_may_come_again(on_gpus, before):
    assert set(on_gpus(packet_ranks.tags_come_again, before)) == {6}


def test_a_call_that_gives_up_says_whose_word_is_late(on_gpus):
    for rank, (flag, *tags) in enumerate(on_gpus(packet_ranks.who_is_late, 1)):
        if rank == 1:
            assert flag == ""
        else:
            assert re.fullmatch(r"all_reduce\.packets\[0, 1, \d+\]", flag)
            # What it waited for in vain, a compiled kernel clears like what has come.
            assert tags == [0x80000000 | 2 << 20 | 300, 0]  # call 2, of 300 elements
