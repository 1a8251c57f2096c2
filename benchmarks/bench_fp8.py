"""Compare ``matmul`` of fp8 operands with torch's ``scaled_mm`` on one GPU, at equal accumulation.

    scripts/python benchmarks/bench_fp8.py
    scripts/python benchmarks/bench_fp8.py --shapes 256,14336,8192 --kinds row block

Each kind of scales is measured with each tile config. Calls write memory that holds NaN, and are
checked against the fp64 product of the dequantised operands. Then they are timed in CUDA graphs,
interleaved, with a cold L2 cache. A ratio is the library's time divided by ours.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from triton_dist.errors import CandidateFailed
from triton_dist.kernels.common.gemm.scales import Recipe, Scaling, library_matmul
from triton_dist.kernels.common.gemm.spaces import fits_gemm, tile_shapes
from triton_dist.kernels.nvidia import matmul
from triton_dist.kernels.nvidia.gemm.op import matmul_configs
from triton_dist.runtime.device import current_device
from triton_dist.testing.opinfo.base import uniform
from triton_dist.testing.opinfo.scaled import new_scales
from triton_dist.testing.timing import captured, interleaved

SHAPES = ("8192,14848,8192", "2048,14336,8192", "256,14336,8192")
KINDS = {
    "row": ("row", False),
    "row-fast": ("row", True),
    "tensor": ("tensor", False),
    "block": ("block", False),
}
# Tiles that the prune function drops because they spill a few registers.
_SPILLING = ((128, 256, 8, 3), (256, 128, 8, 3))


def configs(A: torch.Tensor, B: torch.Tensor, scaling: Scaling, spilling: bool) -> dict[str, Any]:
    """Return the persistent tile configs to measure, by a short name."""
    options = scaling._asdict()
    space = [each["gemm_config"] for each in matmul_configs() if each["persistent"]]
    found = {}
    for tiles in tile_shapes([each for each in space if each is not None]):
        kwargs = tiles.kwargs
        shape = (kwargs["BLOCK_SIZE_M"], kwargs["BLOCK_SIZE_N"], tiles.num_warps, tiles.num_stages)
        specialized = kwargs.get("WARP_SPECIALIZED", False)
        fits = fits_gemm({"gemm_config": tiles}, A, B, **options)
        if fits or (spilling and shape in _SPILLING and not specialized):
            name = "ws " * bool(specialized) + "x".join(map(str, shape))
            found[name + " sub" * bool(kwargs.get("EPILOGUE_SUBTILE"))] = tiles
    return found


def checked(
    call: Callable[[], torch.Tensor], expected: torch.Tensor, magnitudes: torch.Tensor
) -> float:
    """Return the largest error of a call relative to the sum of magnitudes of its products."""
    poison = torch.full_like(expected, float("nan"), dtype=torch.bfloat16)
    del poison  # the allocator reuses this block for the output
    error = (call().double() - expected).abs() / magnitudes
    return float(error.nan_to_num(nan=float("inf")).max())


def measure(shape: Sequence[int], kind: str, rounds: int, spilling: bool) -> dict[str, Any]:
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
        calls[name] = functools.partial(matmul.fn, A, B, tiles, True, **scaling._asdict())
    errors, failed = {}, {}
    for name, call in list(calls.items()):
        try:
            errors[name] = checked(call, expected, magnitudes)
        except (CandidateFailed, RuntimeError, triton_error()) as failure:
            failed[name] = f"{type(failure).__name__}: {failure}"[:200]
            del calls[name]
            continue
        # A bf16 output alone errs by 2**-9 of the result.
        if not errors[name] <= max(2 * errors.get("library", 0.0), 2**-8):
            failed[name] = f"wrong: error {errors[name]:.1e} of the sum of magnitudes"
            del calls[name]
    del expected, magnitudes
    times = interleaved({name: captured(call) for name, call in calls.items()}, rounds=rounds)
    found = {name: samples.median for name, samples in times.items()}
    return {"shape": shape, "kind": kind, "ms": found, "errors": errors, "failed": failed}


def triton_error() -> type[Exception]:
    """Return the base class of Triton's errors."""
    from triton.errors import TritonError

    return TritonError


def show(result: dict[str, Any]) -> None:
    M, N, K = result["shape"]
    ms = dict(result["ms"])
    library = ms.pop("library", float("nan"))
    flops = 2 * M * N * K / 1e9
    print(f"{M}x{N}x{K} {result['kind']}: library {flops / library:.0f} TFLOP/s,"
          f" error {result['errors'].get('library', float('nan')):.1e}")  # fmt: skip
    for name, each in sorted(ms.items(), key=lambda item: item[1]):
        print(f"  {name:24s} {flops / each:6.0f} TFLOP/s  error {result['errors'][name]:.1e}"
              f"  {library / each:.3f}")  # fmt: skip
    for name, reason in result["failed"].items():
        print(f"  {name:24s} {reason}")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description="fp8 matmul and torch's scaled_mm.")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="M,N,K")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--spilling", action="store_true", help="also tiles that spill a little")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = []
    for kind in options.kinds:
        for text in options.shapes:
            shape = [int(each) for each in text.split(",")]
            results.append(measure(shape, kind, options.rounds, options.spilling))
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
