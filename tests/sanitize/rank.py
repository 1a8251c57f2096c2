"""A rank under compute-sanitizer: a call or two of each way of an op, their results checked.

RANK=0 WORLD_SIZE=2 … python tests/sanitize/rank.py gemm_rs --compile

Ranks line up after each call. So memory is freed, for which CUDA waits until the rank's kernels are
done, while no kernel waits for a peer. A wait gives up in the end, and says which flag is late.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.collective_calls import COLLECTIVES
from tests.distributed.compiled_ahead import compiled_ahead, is_rehearsal
from tests.distributed.gemm_calls import (
    AllGatherGEMM,
    GEMMAllReduce,
    GEMMReduceScatter,
    SummedGEMM,
)
from triton_dist.kernels.common.slots.gathered import AllGatherMethod
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.waits import bounded_waits
from triton_dist.utils import finalize_distributed, initialize_distributed

ROWS, COLUMNS, K = 37, 72, 72
_WAIT_SECONDS = 30.0  # as counted without a tool, which makes each look at a flag take longer


def lined_up(calls: Any, *args: Any, **options: Any) -> None:
    """One call, which all ranks have done when this returns; a line in the output says so."""
    calls(*args, **options)
    current_device().synchronize()
    group_for().barrier("a call under a sanitizer is done")
    if not is_rehearsal():
        print("done:", *args, options, flush=True)


def ag_gemm(own: bool) -> int:
    calls = AllGatherGEMM(ROWS, COLUMNS, K)
    for method in AllGatherMethod:
        if own and method is AllGatherMethod.SERIAL:
            continue
        for rows in (ROWS, 5):
            lined_up(calls, rows, method=method, num_chunks=2, persistent=rows == ROWS)
    return calls.finish()


def _summed(kind: type[SummedGEMM], own: bool) -> int:
    calls = kind(ROWS, COLUMNS, K, **kind.context_options)
    for each in kind.algorithms:
        if each["algorithm"] == "copy_engine" and current_device().launches_block:
            continue  # it would never end, and says so
        if own and each["algorithm"] == "serial":
            continue
        for rows in (ROWS, 5):
            lined_up(calls, rows, has_bias=rows == 5, persistent=rows == ROWS, **each)
    return calls.finish()


def _collective(op: str) -> int:
    calls = COLLECTIVES[op]()
    for algorithm in calls.algorithms:
        for elements in (1000, 7):
            lined_up(calls, elements, num_ctas=3, block_bytes=1024, **algorithm)
    return calls.finish()


OPS: dict[str, Callable[[bool], int]] = {
    "ag_gemm": ag_gemm,
    "gemm_rs": lambda own: _summed(GEMMReduceScatter, own),
    "gemm_ar": lambda own: _summed(GEMMAllReduce, own),
    "all_reduce": lambda own: _collective("all_reduce"),
    "reduce_scatter": lambda own: _collective("reduce_scatter"),
    "all_gather": lambda own: _collective("all_gather"),
}
"""Calls of each op; given True, without those that have a product of cuBLAS's."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("op", choices=list(OPS))
    parser.add_argument("--compile", action="store_true", help="first, on all processors")
    parser.add_argument("--own", action="store_true", help="no kernels of libraries")
    parser.add_argument("--seconds", type=float, help="then print the stacks")
    options = parser.parse_args()
    if options.seconds:
        faulthandler.dump_traceback_later(options.seconds)
    initialize_distributed()
    print("ranks have met", flush=True)
    with bounded_waits(_WAIT_SECONDS):
        calls = functools.partial(OPS[options.op], options.own)
        count = (compiled_ahead(calls) if options.compile else calls)()
    print(count, "calls are right", flush=True)
    finalize_distributed()


if __name__ == "__main__":
    main()
