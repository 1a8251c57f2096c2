"""Memory of contexts that are dropped without ``finalize()``, on GPUs."""

from __future__ import annotations

import pytest

from tests.distributed import dropped_contexts
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@few_ranks
@pytest.mark.parametrize("name", dropped_contexts.CALL)
def test_contexts_that_are_dropped_return_the_memory_of_the_gpu(on_gpus, name, num_ranks):
    """More than there is in all, with the cyclic collector off."""
    for garbage, _, allocated, _ in on_gpus(dropped_contexts.large_ones, name):
        assert garbage == []
        # torch keeps two tables of 512 bytes for each rendezvous of symmetric memory.
        assert allocated <= 10 * 2 * 1024
