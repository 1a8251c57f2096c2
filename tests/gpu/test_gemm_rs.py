"""What is tested of GEMM-ReduceScatter alone, on GPUs: compiled kernels, NVLink.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

import pytest

from tests.distributed import gemm_rs_ranks
from triton_dist.kernels.nvidia.allgather_gemm_tiles import WARP_SPECIALIZED_SPLIT_K_TILES
from triton_dist.kernels.nvidia.gemm import WARP_SPECIALIZED_TILES

pytestmark = pytest.mark.timeout(600)


def test_vendor_methods_take_turns_with_ours(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.vendor_in_turn, 6)) == {24}


def test_specialised_warps(on_gpus):
    tiles = len(WARP_SPECIALIZED_TILES) + len(WARP_SPECIALIZED_SPLIT_K_TILES)
    assert all(counts == [5 * tiles] * 3 for counts in on_gpus(gemm_rs_ranks.specialized_warps))


def test_specialised_warps_that_give_up_leave_nothing_behind(on_gpus):
    first, *others = on_gpus(gemm_rs_ranks.specialized_warps_give_up)
    assert [flag[:-1] for flag in first] == ["gemm_rs.arrivals"] * 2
    assert others == [[]] * len(others)
