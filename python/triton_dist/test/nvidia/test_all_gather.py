"""All-gather on all ranks: ``bash scripts/launch.sh test_all_gather.py``.

Every way of it, at sizes that fit vectors and such that do not, exact; then each beside the
library's. On CPU ranks sizes are scaled down to what the interpreter can do.
"""

from __future__ import annotations

import argparse

import torch.distributed as dist

from triton_dist.kernels.nvidia import (
    AllGatherContext,
    GatherMethod,
    all_gather,
    create_all_gather_ctx,
)
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import assert_bitwise_equal, dtype_named
from triton_dist.testing.collective_peers import LIBRARY, collective_peers, expected_of
from triton_dist.testing.timing import captured, interleaved
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    init_seed,
    initialize_distributed,
    is_cuda,
    rand_tensor,
)

_CPU_SCALE = 512


def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max_nbytes", type=int, default=16 << 20, help="of the largest result")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--iters", type=int, default=15, help="rounds that count; 0: only check")
    parser.add_argument("--warmup_iters", type=int, default=3, help="rounds before those")
    parser.add_argument("--autotune", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=42, help="of the data")
    args = parser.parse_args()
    if not is_cuda():
        args.max_nbytes = max(1024, args.max_nbytes // _CPU_SCALE)
    return args


def check(args: argparse.Namespace, ctx: AllGatherContext, elements: int) -> None:
    for number in range(elements - 1, elements + 1):
        x = rand_tensor([number], dtype_named(args.dtype), current_device().torch_device)
        expected = expected_of("all_gather", x)
        for method in GatherMethod:
            assert_bitwise_equal(all_gather.fn(x, ctx, method=method), expected)
        assert_bitwise_equal(all_gather(x, ctx, autotune=args.autotune), expected)


def perf(args: argparse.Namespace, ctx: AllGatherContext, elements: int) -> None:
    x = rand_tensor([elements], dtype_named(args.dtype), current_device().torch_device)
    calls = {
        LIBRARY: captured(collective_peers("all_gather", x)[LIBRARY].call),
        "ours": captured(lambda: all_gather(x, ctx, autotune=args.autotune)),
    }
    samples = interleaved(calls, max(2, args.iters), args.warmup_iters)
    library, own = (samples[name].median * 1e3 for name in calls)
    nbytes = x.nbytes * ctx.num_ranks
    dist_print(
        f"{nbytes:12} bytes: {own:9.1f} us, {nbytes / own / 1e3:7.1f} GB/s; "
        f"library {library:9.1f} us, x {library / own:.2f}"
    )


def main() -> None:
    args = get_args()
    initialize_distributed(args.seed)
    init_seed(args.seed + dist.get_rank())
    rank, size = dist.get_rank(), dist.get_world_size()
    with create_all_gather_ctx(args.max_nbytes, rank, size, size) as ctx:
        elements = args.max_nbytes // size // dtype_named(args.dtype).itemsize
        while elements > 16:
            check(args, ctx, elements)
            if args.iters:
                perf(args, ctx, elements)
            elements //= 4
    dist_print(f"✅ check passed: {size} ranks, {current_device().name}, {args.dtype}")
    finalize_distributed()


if __name__ == "__main__":
    main()
