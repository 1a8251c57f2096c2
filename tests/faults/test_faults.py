"""Faults of an exchange that CPU ranks notice, and one that they cannot."""

from __future__ import annotations

import pytest

from tests.faults.exchange import FAULTS, RIGHT, table
from triton_dist.testing import spawn_ranks


@pytest.mark.stress
def test_what_is_broken_is_noticed_and_what_is_right_is_not():
    runs = 4
    first, second = spawn_ranks(2, table, runs, (20.0,), timeout=200)
    assert first == second
    counts = {fault: count for fault, (count,) in first.items()}
    assert counts.keys() == set(FAULTS)
    assert counts.pop(RIGHT) == 0
    # The interpreter does one thing after the other: stores never come behind a flag.
    assert counts.pop("missing fence") == 0
    assert min(counts.values()) > 0, counts
