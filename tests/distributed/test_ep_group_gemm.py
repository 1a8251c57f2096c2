"""Dispatch + grouped GEMM over real processes: kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import ep_group_gemm_ranks


@pytest.mark.parametrize(("world_size", "seed"), [(2, 1), (3, 2)])
def test_random_routings_with_late_ranks(on_ranks, world_size, seed):
    calls = on_ranks(world_size)(ep_group_gemm_ranks.random_calls, seed, 3)
    assert calls == [9] * world_size
