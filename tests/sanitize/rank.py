"""A rank under compute-sanitizer: some calls of each way of an op, their results checked.

RANK=0 WORLD_SIZE=2 … python tests/sanitize/rank.py gemm_rs
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed import ag_gemm_calls, collective_calls, gemm_ar_calls, gemm_rs_calls
from tests.distributed.collective_calls import way
from tests.distributed.summed_gemm_calls import SummedCalls
from triton_dist.kernels.common.slots.gathered import AllGatherMethod
from triton_dist.utils import finalize_distributed, initialize_distributed

ROWS, COLUMNS, K = 37, 72, 72


def ag_gemm() -> int:
    calls = ag_gemm_calls.Calls(ROWS, COLUMNS, K)
    for method in AllGatherMethod:
        for rows in (ROWS, 5):
            calls(rows, method=method, num_chunks=2, persistent=rows == ROWS)
    return calls.finish()


def _summed(kind: type[SummedCalls]) -> int:
    calls = kind(ROWS, COLUMNS, K, **kind.options)
    for each in kind.ways:
        for rows in (ROWS, 5):
            calls(rows, has_bias=rows == 5, persistent=rows == ROWS, **each)
    return calls.finish()


def _collective(op: str) -> int:
    calls = collective_calls.Calls(op, 1 << 16)
    for name in collective_calls.WAYS[op]:
        for elements in (1000, 7):
            calls(elements, num_ctas=3, block_bytes=1024, **way(op, name))
    return calls.finish()


OPS: dict[str, Callable[[], int]] = {
    "ag_gemm": ag_gemm,
    "gemm_rs": lambda: _summed(gemm_rs_calls.Calls),
    "gemm_ar": lambda: _summed(gemm_ar_calls.Calls),
    "all_reduce": lambda: _collective("all_reduce"),
    "reduce_scatter": lambda: _collective("reduce_scatter"),
    "all_gather": lambda: _collective("all_gather"),
}

if __name__ == "__main__":
    initialize_distributed()
    print(sum(OPS[name]() for name in sys.argv[1:]), "calls are right")
    finalize_distributed()
