"""Grouped GEMM, top-k sum and AllReduce on all ranks:
``bash scripts/launch.sh test_moe_reduce_ar.py 8192 2048 1536 32 2 --check``.

The sizes are tokens, hidden size, intermediate size of all ranks, experts, and experts of a token.
``check``: a call, one in chunks and one without overlap are compared with products and sums in
torch. ``perf``: the op beside its parts alone and others' code. On CPU ranks shapes are scaled
down to what the interpreter can do.
"""

from __future__ import annotations

import argparse

from triton_dist.kernels.nvidia import run_moe_reduce_ar_triton_non_overlap
from triton_dist.test import summed_routes
from triton_dist.testing.opinfo.moe_reduce import MOE_REDUCE_AR


def get_args() -> argparse.Namespace:
    return summed_routes.make_parser(__doc__).parse_args()


def main() -> None:
    summed_routes.main(MOE_REDUCE_AR, run_moe_reduce_ar_triton_non_overlap, get_args())


if __name__ == "__main__":
    main()
