"""What every rank does in tests of GEMM-ReduceScatter alone, on CPU ranks and on GPUs; what it does
in those of GEMM-AllReduce too is in ``summed_gemm_ranks``."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

from tests import garbage
from tests.distributed.gemm_rs_calls import ROW_BLOCKS, Calls
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.launch import Launch
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.cpu import CpuTransfer


def library_alternating(rounds: int) -> int:
    """What torch brings, between calls of our own, the number of rows changing."""
    calls = Calls(max_rows=32, columns=64, K=64)
    for number in range(rounds):
        for method in libraries.supported_library_algorithms(libraries.MATMUL_REDUCE_SCATTER):
            calls(16 + 8 * (number % 3), method=method, gemm_config=None, has_bias=number % 2 == 0)
            calls(32 - 8 * (number % 2), algorithm=("copy_engine", "fused")[number % 2 == 0])
    return calls.finish()


def order_of_row_blocks() -> list[str]:
    """What a call loads, launches and queues whose row blocks are pushed by copy engine, in
    order, and where no garbage is collected."""
    order: list[str] = []

    def noted(owner: Any, name: str) -> Any:
        method = getattr(owner, name)

        def noting(self: Any, *args: Any) -> Any:
            what = f"{name} {self.kernel.__name__}" if owner is Launch else name
            order.append(what if gc.isenabled() else f"{what}, uncollected")
            return method(self, *args)

        return mock.patch.object(owner, name, noting)

    calls = Calls(max_rows=20, columns=72, K=72)
    calls(20, **ROW_BLOCKS)
    calls(20, **ROW_BLOCKS)
    with noted(Launch, "compile"), noted(Launch, "run"), noted(CpuTransfer, "queue"):
        calls(20, **ROW_BLOCKS)
    calls.finish()
    return order


def garbage_between_launches(rounds: int) -> int:
    """Row blocks that are pushed while, after each new GEMM's launch, garbage lies about whose end
    waits for the GPU."""
    kind = type(current_device())
    lay_out = kind.repeated_launch

    def leaving(self: Any, *args: Any) -> Any:
        garbage.leave()
        return lay_out(self, *args)

    calls = Calls(max_rows=150, columns=72, K=40)
    with mock.patch.object(kind, "repeated_launch", leaving):
        for number in range(rounds):
            calls(150 - 16 * number, **ROW_BLOCKS, num_chunks=1 + number % 2)
    return calls.finish()
