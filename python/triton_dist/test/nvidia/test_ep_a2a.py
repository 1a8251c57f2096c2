"""Expert-parallel dispatch and combine of many tokens on all ranks:
``bash scripts/launch.sh test_ep_a2a.py -M 8192 -N 7168 --topk 8 --check``.

``check``: compare both ops with PyTorch's all-to-all. ``perf``: time them next to all-gather and
reduce-scatter. On CPU ranks, sizes are reduced for the interpreter.
"""

from __future__ import annotations

import argparse

from triton_dist.test import expert_routes


def get_args() -> argparse.Namespace:
    parser = expert_routes.make_parser(__doc__, M=4096)
    for option in ("--has_weight", "--with-scatter-indices", "--enable-local-combine"):
        parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--weight_dtype", help=argparse.SUPPRESS)
    parser.add_argument("--use_aot", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.use_aot:
        parser.error("--use_aot: kernels are compiled at the first call, or come from a pack")
    return args


if __name__ == "__main__":
    expert_routes.main(get_args(), quantise=False, cpu_scale=256)
