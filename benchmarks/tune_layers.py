"""Tune an op for the layers of known models, so that its records can be packed and shipped.

    bash scripts/launch.sh --nproc_per_node=4 benchmarks/tune_layers.py --op ag_gemm
    scripts/triton-dist pack ag_gemm --out tuned/ag_gemm.tdpack
    scripts/python benchmarks/gpu_pages.py tuned

All M (rows) of a range share a tuning. Ranges that end at a power of two are tuned in full. Other
ranges are warm-started: only the best configs of neighbouring ranges are measured. Records are
stored in ``TRITON_DIST_CACHE_DIR``. Keys with a stored or shipped record are not tuned again, so
delete the op's file in python/triton_dist/records/ first. Run the command for each number of ranks,
on an idle machine. On CPU ranks, sizes are reduced.

--run calls each winner once, which loads its kernels. A pack with kernels, for hosts without a
compiler, needs this:

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
from overlap.workload import CandidateSelection

from triton_dist import tune
from triton_dist.test.utils import LAYER_CONFIGS, dtype_named
from triton_dist.testing.opinfo import GEMM_OPINFOS
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda

_LARGEST_M = 16384
_LONG_WARM_START_MS = "400"
"""Device time in ms of a warm-started tuning. In programs the default is shorter, to save time."""
_WARM_START_MS = "TRITON_DIST_AUTOTUNE_WARM_START_MS"
_CPU_SCALE = 512


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=list(GEMM_OPINFOS), default="ag_gemm")
    parser.add_argument(
        "--M", type=parse_numbers, help="rows over all ranks; default: one M of each range"
    )
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


def every_range(largest: int = _LARGEST_M) -> list[int]:
    """Return one M of each range up to ``largest``: first powers of two, then the others.

    Both parts are in descending order, because smaller M reuse kernels that larger M compiled. M is
    the end of the range if the end is at most 16 or a multiple of 32. Otherwise M is the middle,
    which is near all sizes of the range. M is two less if the middle is a multiple of 16, because
    libraries may have special kernels for these.
    """
    ends = sorted({tune.fine_bucket(n) for n in range(1, largest + 1)})
    middles = [(below + 1 + end) // 2 for below, end in itertools.pairwise([0, *ends])]
    sizes = [
        end if end <= 16 or end % 32 == 0 else middle - 2 * (middle % 16 == 0)
        for middle, end in zip(middles, ends, strict=True)
    ]
    return sorted(sizes, key=lambda M: (not is_tuned_in_full(M), -M))


def is_tuned_in_full(M: int) -> bool:
    """Return True for powers of two."""
    return M & (M - 1) == 0


def shapes(options: argparse.Namespace, num_ranks: int) -> list[list[Shape]]:
    """Return the distinct shapes of each layer; shapes that are tuned in full are first."""
    scale = 1 if is_cuda() else _CPU_SCALE
    layers = {
        (each["N"], each["K"]) for name, each in LAYER_CONFIGS.items() if name in options.layers
    }
    info = GEMM_OPINFOS[options.op]
    # Round down to a multiple of the number of ranks.
    rows = options.M or [max(M // num_ranks, 1) * num_ranks for M in every_range()]
    return [
        list(dict.fromkeys(info.smaller(info.layer_shape(M, N, K), scale, num_ranks) for M in rows))
        for N, K in sorted(layers)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    warm_start_ms = os.environ.get(_WARM_START_MS, _LONG_WARM_START_MS)
    initialize_distributed()
    begin, dtype = time.perf_counter(), dtype_named(options.dtype)
    info, layers = GEMM_OPINFOS[options.op], shapes(options, dist.get_world_size())
    total, number = sum(map(len, layers)), 0
    for layer in layers:
        largest = max(layer, key=lambda shape: shape.M)
        with info.context(largest, dtype) as ctx:
            for shape in layer:
                number += 1
                os.environ[_WARM_START_MS] = "0" if is_tuned_in_full(shape.M) else warm_start_ms
                op = TunedOp(info, shape, dtype, ctx, CandidateSelection(0))
                if options.run:
                    op.run()
                seconds = time.perf_counter() - begin
                dist_print(f"[{number}/{total}, {seconds:.0f} s] {shape}: {op.note}")
    finalize_distributed()


if __name__ == "__main__":
    main()
