"""Expert-parallel dispatch in fp8 and combine of few tokens on all ranks:
``bash scripts/launch.sh test_ep_ll_a2a.py -M 128 --check``.

``check``: compare both ops with PyTorch's all-to-all. ``perf``: time them next to all-gather and
reduce-scatter. On CPU ranks, sizes are reduced for the interpreter.
"""

from __future__ import annotations

import argparse

from triton_dist.test import expert_routes


def get_args() -> argparse.Namespace:
    parser = expert_routes.make_parser(__doc__, M=8)
    parser.add_argument(
        "--quant_group_size", type=int, choices=[128], default=128, help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--no_online_quant_fp8", action="store_false", dest="online_quant_fp8",
        help="send tokens without quantisation",
    )  # fmt: skip
    parser.add_argument("--intra_kernel_profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--weight_dtype", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = get_args()
    expert_routes.main(args, quantise=args.online_quant_fp8, cpu_scale=16)


if __name__ == "__main__":
    main()
