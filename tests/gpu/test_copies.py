"""Copies on side streams, on GPUs whose every thread waits for what they bring."""

from __future__ import annotations

import pytest

from tests.distributed.copies_behind_a_grid import overdue_polls
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@few_ranks
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_copy_needs_no_multiprocessor(on_gpus, in_graph):
    assert set(on_gpus(overdue_polls, in_graph)) == {(0, 0)}
