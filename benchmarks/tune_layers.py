"""Tune an op for the layers of known models, so that its records can be packed and shipped.

    bash scripts/launch.sh --nproc_per_node=4 benchmarks/tune_layers.py --op ag_gemm
    scripts/triton-dist pack ag_gemm --out tuned/ag_gemm.tdpack
    scripts/python benchmarks/gpu_pages.py tuned

Ranges of M (rows) share a tuning. Ranges that end at a power of two are tuned in full. The other
ranges are warm-started: only the best configs of near ranges are measured. Records are stored in
``TRITON_DIST_CACHE_DIR``. Keys that have a local or shipped record are not tuned again, so delete
the op's file in records/ first. Run the command for each number of ranks, on an idle machine. On
CPU ranks, sizes are reduced.

With --run, each winner is called once, which loads its kernels. This makes a pack for hosts without
a compiler:

    scripts/triton-dist pack --kernels --out ag_gemm.NVIDIA_H200.tdpack -- \
        bash scripts/launch.sh --nproc_per_node=4 benchmarks/tune_layers.py --op ag_gemm --run
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist
from overlap.shapes import parse_numbers
from overlap.tuned_op import TunedOp
from overlap.workload import Choice

from triton_dist import tune
from triton_dist.test.utils import LAYER_CONFIGS, dtype_named
from triton_dist.testing.opinfo import GEMM_OPINFOS
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda

_MOST = 16384
_WARM_START_MS = "400"
"""Device time in ms of the measurement for each M that is not tuned in full. It is longer than the
default, which limits the delay of a program's first call."""
_WARM_START = "TRITON_DIST_AUTOTUNE_WARM_START_MS"
_CPU_SCALE = 512


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=list(GEMM_OPINFOS), default="ag_gemm")
    parser.add_argument("--M", type=parse_numbers, help="global rows; default: one M of each range")
    parser.add_argument("--layers", help="names of models, separated by commas; default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--run", action="store_true", help="call the op once at each size")
    options = parser.parse_args(arguments)
    names = options.layers.split(",") if options.layers else list(LAYER_CONFIGS)
    unknown = [name for name in names if name not in LAYER_CONFIGS]
    if unknown:
        parser.error(f"--layers {unknown[0]!r}, expected some of {', '.join(LAYER_CONFIGS)}")
    options.layers = names
    return options


def every_range(most: int = _MOST) -> list[int]:
    """Return one M of each range up to ``most``: first powers of two, then others.

    In both parts, the largest M is first, because smaller M reuse its compiled kernels. A range
    that ends at 16 or less, or at a multiple of 32, is represented by its end. Another range is
    represented by its middle, which is near all sizes of the range. If the middle is a multiple of
    16, the M two below represents the range, because libraries may have special kernels for
    multiples of 16.
    """
    ends = sorted({tune.fine_bucket(n) for n in range(1, most + 1)})
    middles = [(below + 1 + end) // 2 for below, end in itertools.pairwise([0, *ends])]
    sizes = [
        end if end <= 16 or end % 32 == 0 else middle - 2 * (middle % 16 == 0)
        for middle, end in zip(middles, ends, strict=True)
    ]
    return sorted(sizes, key=lambda size: (not is_in_full(size), -size))


def is_in_full(M: int) -> bool:
    """Return True for powers of two, which are tuned in full."""
    return M & (M - 1) == 0


def shapes(options: argparse.Namespace, num_ranks: int) -> list[list[Shape]]:
    """Return the different shapes of each layer, first shapes with an M that is tuned in full."""
    scale = 1 if is_cuda() else _CPU_SCALE
    layers = {
        (each["N"], each["K"]) for name, each in LAYER_CONFIGS.items() if name in options.layers
    }
    info = GEMM_OPINFOS[options.op]
    # Round down to a multiple of the number of ranks.
    rows = options.M or [max(M // num_ranks, 1) * num_ranks for M in every_range()]
    return [
        list(dict.fromkeys(info.smaller(info.layer(M, N, K), scale, num_ranks) for M in rows))
        for N, K in sorted(layers)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    warm_start_ms = os.environ.get(_WARM_START, _WARM_START_MS)
    initialize_distributed()
    begin, dtype = time.perf_counter(), dtype_named(options.dtype)
    info, layers = GEMM_OPINFOS[options.op], shapes(options, dist.get_world_size())
    total, number = sum(map(len, layers)), 0
    for asked in layers:
        largest = max(asked, key=lambda shape: shape.M)
        with info.context(largest, dtype) as ctx:
            for shape in asked:
                number += 1
                os.environ[_WARM_START] = "0" if is_in_full(shape.M) else warm_start_ms
                op = TunedOp(info, shape, dtype, ctx, Choice(0))
                if options.run:
                    op.run()
                took = time.perf_counter() - begin
                dist_print(f"[{number}/{total}, {took:.0f} s] {shape}: {op.note}")
    finalize_distributed()


if __name__ == "__main__":
    main()
