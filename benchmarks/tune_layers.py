"""Tune an op for the layers of known models, so that its records can be packed and shipped.

    bash scripts/launch.sh --nproc_per_node=4 benchmarks/tune_layers.py --op ag_gemm
    scripts/triton-dist pack ag_gemm --out ag_gemm.NVIDIA_H200.json

Records go to ``TRITON_DIST_CACHE_DIR``, as of any call; layers that are there are not tuned again.
One run for each number of ranks; tune on an idle machine. On CPU ranks sizes are scaled down.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist
from overlap.shapes import parse_numbers
from overlap.tuned_op import open_op
from overlap.workload import Choice

from triton_dist.kernels.common.gemm_case import Shape
from triton_dist.test.utils import LAYER_CONFIGS, dtype_named
from triton_dist.testing.cases import gemm_cases
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda

_ROWS = [
    *(16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
]
_CPU_SCALE = 512
CASES = gemm_cases()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=list(CASES), default="ag_gemm")
    parser.add_argument("--M", type=parse_numbers, default=_ROWS, help="global rows")
    parser.add_argument("--layers", help="names of models, separated by commas; default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    options = parser.parse_args(arguments)
    names = options.layers.split(",") if options.layers else list(LAYER_CONFIGS)
    unknown = [name for name in names if name not in LAYER_CONFIGS]
    if unknown:
        parser.error(f"--layers {unknown[0]!r}, expected some of {', '.join(LAYER_CONFIGS)}")
    options.layers = names
    return options


def shapes(options: argparse.Namespace, num_ranks: int) -> list[Shape]:
    """Each once, the largest first: those compile what the others need too."""
    scale = 1 if is_cuda() else _CPU_SCALE
    layers = [(each["N"], each["K"]) for each in map(LAYER_CONFIGS.get, options.layers) if each]
    case, rows = CASES[options.op], sorted(options.M, reverse=True)
    asked = (case.scaled(case.layer(M, N, K), scale, num_ranks) for N, K in layers for M in rows)
    return list(dict.fromkeys(asked))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    initialize_distributed()
    begin, dtype = time.perf_counter(), dtype_named(options.dtype)
    asked = shapes(options, dist.get_world_size())
    for number, shape in enumerate(asked, start=1):
        with open_op(CASES[options.op], shape, dtype, Choice(0)) as workload:
            took = time.perf_counter() - begin
            dist_print(f"[{number}/{len(asked)}, {took:.0f} s] {shape}: {workload.note}")
    finalize_distributed()


if __name__ == "__main__":
    main()
