"""Expert parallelism: random routings on CPU ranks, compared with a reference in numpy."""

from __future__ import annotations

import pytest

from tests.stress.ep_routings import random_routings


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_ranks", "calls"), [(2, 2000), (3, 1000), (4, 1000), (8, 200)])
def test_no_result_of_random_routings_is_wrong(spawn_ranks, num_ranks, calls):
    results = spawn_ranks(num_ranks, random_routings, calls, 1, timeout=3600.0)
    assert results == [(calls, [])] * num_ranks
    print(f"{num_ranks} ranks: {calls} calls, 0 wrong")  # `make stress` shows it
