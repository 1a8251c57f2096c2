"""What is tested of GEMM-ReduceScatter alone, over real processes: the kernels in the interpreter,
memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import gemm_rs_ranks

WORLD_SIZES = [2, 4]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_vendor_methods_take_turns_with_ours(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_rs_ranks.vendor_in_turn, 4) == [8] * world_size
