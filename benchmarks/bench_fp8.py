"""Compare ``matmul`` of fp8 operands with torch's ``scaled_mm`` on one GPU.

    scripts/python benchmarks/bench_fp8.py
    scripts/python benchmarks/bench_fp8.py --shapes 256,14336,8192 --kinds row block
    scripts/python benchmarks/bench_fp8.py --models "Mixtral 8x7B" --tokens 64 8192 --kinds block

Each kind of scales is measured with each tile config. Our GEMM and torch's accumulate with equal
precision. Calls write memory that contains NaN. Their results are compared with the fp64 product of
the dequantised operands. Then the calls are timed in CUDA graphs, interleaved, with a cold L2
cache. A ratio is the library's time divided by ours.

With ``--models``, both grouped GEMMs of MoE layers are measured instead. The time of
``grouped_gemm`` includes sorting the tokens by expert. "library" is ``scaled_grouped_mm`` alone, of
sorted rows; "with copies" includes the sorting. ``scaled_grouped_mm`` does not support block-wise
scales on Hopper, so it uses row-wise scales instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from triton_dist.errors import CandidateFailed
from triton_dist.kernels.common.gemm.scales import Recipe, Scaling, library_matmul
from triton_dist.kernels.common.gemm.spaces import fits_gemm, tile_shapes
from triton_dist.kernels.common.moe.spaces import fits_grouped, grouped_tiles
from triton_dist.kernels.nvidia import grouped_gemm, matmul
from triton_dist.kernels.nvidia.gemm.op import matmul_configs
from triton_dist.kernels.nvidia.grouped_gemm.algorithms import GroupedKey
from triton_dist.runtime.device import current_device
from triton_dist.testing.opinfo.base import uniform
from triton_dist.testing.opinfo.moe import (
    FIRST_GEMMS,
    SECOND_GEMMS,
    GroupedShape,
    uniform_ids,
)
from triton_dist.testing.opinfo.scaled import (
    grouped_mm_call,
    new_scales,
    scales_for_grouped_mm,
    scales_of_expert,
    select_rows,
)
from triton_dist.testing.timing import capture_graph, time_interleaved

TOKENS = (64, 512, 2048, 8192)
_CHECKED_ROUTES = 256
SHAPES = ("8192,14848,8192", "2048,14336,8192", "256,14336,8192")
KINDS = {
    "row": ("row", False),
    "row-fast": ("row", True),
    "tensor": ("tensor", False),
    "block": ("block", False),
}
# Tiles that the prune function drops because they spill a few registers.
_SPILLING = ("128x256x8x3", "256x128x8x3")


def configs(A: torch.Tensor, B: torch.Tensor, scaling: Scaling, spilling: bool) -> dict[str, Any]:
    """Return the tile configs of the persistent kernel to measure, by a short name."""
    options = scaling._asdict()
    space = [each["gemm_config"] for each in matmul_configs() if each["persistent"]]
    found = {}
    for tiles in tile_shapes([each for each in space if each is not None]):
        name = tiles_name(tiles)
        if fits_gemm({"gemm_config": tiles}, A, B, **options) or (spilling and name in _SPILLING):
            found[name] = tiles
    return found


def relative_error(
    call: Callable[[], torch.Tensor],
    expected: torch.Tensor,
    magnitudes: torch.Tensor,
    output: Sequence[int] | None = None,
) -> float:
    """Return the largest error of a result, relative to the sum of its products' magnitudes.

    ``output`` is the shape of the call's output, by default of ``expected``.
    """
    shape = tuple(output or expected.shape)
    poison = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=expected.device)
    del poison  # the allocator reuses this block for the output
    error = (call().double() - expected).abs() / magnitudes
    return float(error.nan_to_num(nan=float("inf")).max())


def tiles_name(tiles: triton.Config) -> str:
    kwargs = tiles.kwargs
    shape = (kwargs["BLOCK_SIZE_M"], kwargs["BLOCK_SIZE_N"], tiles.num_warps, tiles.num_stages)
    name = "ws " * kwargs.get("WARP_SPECIALIZED", False) + "x".join(map(str, shape))
    return name + " sub" * kwargs.get("EPILOGUE_SUBTILE", False)


def measure(
    shape: Sequence[int], kind: str, rounds: int, spilling: bool, only: str = ""
) -> dict[str, Any]:
    M, N, K = shape
    recipe, fast = KINDS[kind]
    device = current_device().torch_device
    generator = torch.Generator(device).manual_seed(M + N + K)
    A, B = (uniform((n, K), torch.float8_e4m3fn, generator) for n in (M, N))
    B = B.t()
    scales = new_scales(A, B, Recipe(recipe), generator)
    scales["A_scale"].uniform_(0.5, 1, generator=generator)
    scaling = Scaling(**scales, use_fast_accum=fast)
    a, b = scaling.dequantised(A, B, torch.float64)
    expected, magnitudes = a @ b, a.abs() @ b.abs()
    del a, b
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "library": functools.partial(library_matmul, A, B, scaling)
    }
    for name, tiles in configs(A, B, scaling, spilling).items():
        if re.search(only, name):
            calls[name] = functools.partial(matmul.fn, A, B, tiles, True, **scaling._asdict())
    result = check_and_time(calls, lambda call: relative_error(call, expected, magnitudes), rounds)
    return {"shape": shape, "kind": kind, **result}


def measure_grouped(shape: GroupedShape, kind: str, rounds: int, only: str = "") -> dict[str, Any]:
    """Measure a grouped GEMM of an MoE layer.

    A has one row per token for the first GEMM (N > K), and one per token and expert for the last.
    """
    M, N, K, E, topk = shape.M, shape.N, shape.K, shape.E, shape.topk
    recipe, fast = KINDS[kind]
    device = current_device().torch_device
    generator = torch.Generator(device).manual_seed(M + N + K)
    rows = M if N > K else M * topk
    A, B = (uniform(sizes, torch.float8_e4m3fn, generator) for sizes in ((rows, K), (E, N, K)))
    B = B.mT
    ids = uniform_ids(M, E, topk, device, generator)
    scales = new_scales(A, B, Recipe(recipe), generator)
    scales["A_scale"].uniform_(0.5, 1, generator=generator)
    options = {**scales, "use_fast_accum": fast}
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=E).cumsum(0).int()
    library_scales = scales_for_grouped_mm(A, B, scales)
    order_of_rows = order // (M * topk // rows)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "library": grouped_mm_call(A, B, ends, order_of_rows, scales),
        "with copies": functools.partial(
            grouped_gemm.fn, A, B, ids, algorithm="library", **library_scales
        ),
    }
    key = GroupedKey.of(A, B, ids, **options)
    for tiles in grouped_tiles():
        if fits_grouped({"gemm_config": tiles}, A.dtype, E, N, M, topk, key):
            name = tiles_name(tiles) + " p{PROGRAMS} g{GROUP_SIZE_M}".format(**tiles.kwargs)
            if re.search(only, name):
                call = functools.partial(grouped_gemm.fn, A, B, ids, **options)
                calls[name] = functools.partial(call, gemm_config=tiles)
    # Check only some rows: the whole fp64 product would take longer than the measurement.
    chosen = torch.randperm(M * topk, generator=generator, device=device)[:_CHECKED_ROUTES]
    expected = torch.empty(len(chosen), N, dtype=torch.float64, device=device)
    magnitudes = torch.empty_like(expected)
    experts = ids.flatten()[chosen]
    for expert in experts.unique().tolist():
        expert_rows = chosen[experts == expert] // (M * topk // rows)
        each = scales_of_expert(scales, expert_rows, expert)
        a = select_rows(A, expert_rows)
        a, b = Scaling(**each).dequantised(a, B[expert], torch.float64)
        expected[experts == expert], magnitudes[experts == expert] = a @ b, a.abs() @ b.abs()

    def error(call: Callable[[], torch.Tensor]) -> float:
        return relative_error(lambda: call()[chosen], expected, magnitudes, (M * topk, N))

    # "library" returns rows in another order. For block scales, "with copies" uses other scales.
    unchecked = ("library", "with copies") if recipe == "block" else ("library",)
    result = check_and_time(calls, error, rounds, unchecked)
    return {"shape": (M, N, K, E), "topk": topk, "kind": kind, **result}


def check_and_time(
    calls: dict[str, Callable[[], torch.Tensor]],
    error: Callable[[Callable[[], torch.Tensor]], float],
    rounds: int,
    unchecked: Sequence[str] = (),
) -> dict[str, Any]:
    """Return median times in ms, errors, and reasons of failures, each by name of the call."""
    errors, failed = {}, {}
    for name, call in list(calls.items()):
        try:
            errors[name] = 0.0 if name in unchecked else error(call)
        except (CandidateFailed, RuntimeError, triton_error()) as failure:
            failed[name] = f"{type(failure).__name__}: {failure}"[:200]
            del calls[name]
            continue
        # Rounding to bf16 alone causes an error of up to 2**-9 of the result.
        if not errors[name] <= max(2 * errors.get("library", 0.0), 2**-8):
            failed[name] = f"wrong: error {errors[name]:.1e} of the sum of magnitudes"
            del calls[name]
    times = time_interleaved(
        {name: capture_graph(call) for name, call in calls.items()}, rounds=rounds
    )
    found = {name: samples.median for name, samples in times.items()}
    return {"ms": found, "errors": errors, "failed": failed}


def triton_error() -> type[Exception]:
    """Return the base class of Triton's errors."""
    from triton.errors import TritonError

    return TritonError


def show(result: dict[str, Any]) -> None:
    M, N, K = result["shape"][:3]
    ms = dict(result["ms"])
    library = ms.pop("library", float("nan"))
    flops = 2 * M * N * K * result.get("topk", 1) / 1e9
    name = "x".join(map(str, result["shape"]))
    print(f"{name} {result['kind']}: library {flops / library:.0f} TFLOP/s,"
          f" error {result['errors'].get('library', float('nan')):.1e}")  # fmt: skip
    for name, each in sorted(ms.items(), key=lambda item: item[1]):
        print(f"  {name:24s} {flops / each:6.0f} TFLOP/s  error {result['errors'][name]:.1e}"
              f"  {library / each:.3f}")  # fmt: skip
    for name, reason in result["failed"].items():
        print(f"  {name:24s} {reason}")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="M,N,K")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--models", nargs="+", default=(), choices=FIRST_GEMMS)
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=TOKENS, help="numbers of tokens, for --models"
    )
    parser.add_argument("--only", default="", help="regular expression for names of tile configs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--spilling", action="store_true", help="also measure tiles that spill a few registers"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = []
    grouped_shapes = [
        dataclasses.replace(product[model], M=tokens)
        for model in options.models
        for product in (FIRST_GEMMS, SECOND_GEMMS)
        for tokens in options.tokens
    ]
    for kind in options.kinds:
        for shape in grouped_shapes or options.shapes:
            if isinstance(shape, GroupedShape):
                results.append(measure_grouped(shape, kind, options.rounds, options.only))
            else:
                sizes = [int(each) for each in shape.split(",")]
                results.append(measure(sizes, kind, options.rounds, options.spilling, options.only))
            show(results[-1])
            if options.json:
                options.json.write_text(json.dumps(results))
    print(f"{'shape':22s}{'kind':10s}{'library ms':>12s}{'ours ms':>10s}{'ratio':>8s}  config")
    for result in results:
        ms = dict(result["ms"])
        library = ms.pop("library", float("nan"))
        best = min(ms, key=ms.__getitem__)
        shape = "x".join(map(str, result["shape"]))
        print(f"{shape:22s}{result['kind']:10s}{library:12.4f}{ms[best]:10.4f}"
              f"{library / ms[best]:8.3f}  {best}")  # fmt: skip
    return results


if __name__ == "__main__":
    main()
