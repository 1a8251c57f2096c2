"""What is tested of GEMM-ReduceScatter alone, on GPUs: compiled kernels, NVLink.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

import pytest

from tests.distributed import gemm_rs_ranks

pytestmark = pytest.mark.timeout(600)


def test_vendor_methods_take_turns_with_ours(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.vendor_in_turn, 6)) == {24}
