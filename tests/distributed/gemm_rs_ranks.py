"""What every rank does in tests of GEMM-ReduceScatter alone, on CPU ranks and on GPUs; what it does
in those of GEMM-AllReduce too is in ``summed_gemm_ranks``."""

from __future__ import annotations

from tests.distributed.gemm_rs_calls import Calls
from triton_dist.kernels.nvidia import vendor_reduce_scatter as vendor


def vendor_in_turn(rounds: int) -> int:
    """What torch brings, between calls of our own, the number of rows changing."""
    calls = Calls(max_rows=32, columns=64, K=64)
    for number in range(rounds):
        for method in vendor.methods_here():
            calls(16 + 8 * (number % 3), method=method, gemm_config=None, has_bias=number % 2 == 0)
            calls(32 - 8 * (number % 2), fuse_scatter=number % 2 == 0)
    return calls.finish()
