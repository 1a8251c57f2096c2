"""Expert-parallel dispatch in fp8 and combine of few tokens on all ranks:
``bash scripts/launch.sh test_ep_ll_a2a.py -M 128 --check``.

See test_ep_a2a.py for ``check`` and ``perf``.
"""

from __future__ import annotations

import argparse

from triton_dist.test.nvidia import test_ep_a2a


def get_args() -> argparse.Namespace:
    parser = test_ep_a2a.make_parser(__doc__, M=8)
    parser.add_argument(
        "--quant_group_size", choices=["128"], default="128", help=argparse.SUPPRESS
    )
    parser.add_argument("--intra_kernel_profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--no_online_quant_fp8", action="store_true", help="send tokens without quantisation"
    )
    return parser.parse_args()


def main() -> None:
    args = get_args()
    test_ep_a2a.main(args, quantise=not args.no_online_quant_fp8, cpu_scale=16)


if __name__ == "__main__":
    main()
