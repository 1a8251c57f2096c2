"""Grouped GEMM, top-k sum and ReduceScatter on all ranks:
``bash scripts/launch.sh test_moe_reduce_rs.py 8192 2048 1536 32 2 --check``.

The numbers are tokens, hidden size, intermediate size over all ranks, experts, experts per token.
``check``: compare three calls with products and sums in torch: a tuned call, a call in chunks, and
a call without overlap. ``perf``: time the op, its parts and its baselines. On CPU ranks, shapes are
reduced for the interpreter.
"""

from __future__ import annotations

import argparse

from triton_dist.kernels.nvidia import run_moe_reduce_rs_triton_non_overlap
from triton_dist.test import moe_reduce
from triton_dist.testing.opinfo.moe_reduce import MOE_REDUCE_RS


def get_args() -> argparse.Namespace:
    return moe_reduce.make_parser(__doc__).parse_args()


def main() -> None:
    moe_reduce.main(MOE_REDUCE_RS, run_moe_reduce_rs_triton_non_overlap, get_args())


if __name__ == "__main__":
    main()
