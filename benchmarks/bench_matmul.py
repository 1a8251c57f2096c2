"""Compare ``matmul`` with ``torch.matmul`` and a plain Triton kernel under ``triton.autotune``.

    scripts/python benchmarks/bench_matmul.py --json matmul.json
    scripts/python benchmarks/bench_matmul.py --shapes 4096,4096,4096 8192,7168,4096 --first 1

For each shape, all results are checked, then all candidates are timed interleaved, with a cold
cache. The kernel under ``triton.autotune`` is the kernel of Triton's tutorial: pointers, grouped
tiles, eight configs, one tuning per shape.

With ``--first N``, the time from the first call to its result is also measured, for the first N
shapes. Each measurement is in a separate process, which has imported everything and initialised the
GPU. ``cold``: all caches are empty. ``warm``: the caches contain the results of the cold process.
Triton's autotuner tunes in both cases, because by default it does not cache results on disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from triton_dist import jit, knobs
from triton_dist.kernels.nvidia import matmul
from triton_dist.runtime.device import current_device
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.base import tolerance
from triton_dist.testing.timing import time_interleaved

SHAPES = ["4096,4096,4096", "8192,8192,8192", "128,8192,8192", "1000,3000,2000", "16,4096,14336"]
OURS, LIBRARY, TUTORIAL = "matmul", "torch.matmul", "triton.autotune"
_TILES = [  # BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps
    (128, 256, 64, 3, 8), (64, 256, 32, 4, 4), (128, 128, 32, 4, 4), (128, 64, 32, 4, 4),
    (64, 128, 32, 4, 4), (128, 32, 32, 4, 4), (64, 32, 32, 5, 2), (32, 64, 32, 5, 2),
]  # fmt: skip


@triton.autotune(
    configs=[
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_stages=stages, num_warps=warps
        )
        for m, n, k, stages, warps in _TILES
    ],
    key=["M", "N", "K"],
)
@jit
def kernel_of_tutorial(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C = A @ B, all row-major; neighbouring programs share rows of A."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group, within = tl.program_id(0) // (GROUP * tiles_n), tl.program_id(0) % (GROUP * tiles_n)
    in_group = min(tiles_m - group * GROUP, GROUP)
    m, n = group * GROUP + within % in_group, within // in_group
    rows, columns = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (rows % M)[:, None] * K + ks[None, :]
    b_ptrs = b_ptr + ks[:, None] * N + (columns % N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        num_left = K - k * BLOCK_K
        a = tl.load(a_ptrs, mask=ks[None, :] < num_left, other=0.0)
        b = tl.load(b_ptrs, mask=ks[:, None] < num_left, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * N
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    c_ptrs = c_ptr + rows[:, None] * N + columns[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=inside)


def matmul_of_tutorial(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Return A [M, K] @ B [K, N], both contiguous."""
    (M, K), N = A.shape, B.shape[1]
    C = torch.empty(M, N, dtype=A.dtype, device=A.device)

    def grid(tile: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"]),)

    kernel_of_tutorial[grid](A, B, C, M, N, K, GROUP=8)
    return C


CANDIDATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    OURS: matmul,
    LIBRARY: torch.matmul,
    TUTORIAL: matmul_of_tutorial,
}


def operands(shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    M, N, K = shape
    device = current_device()
    dtype = torch.bfloat16 if device.name == "cuda" else torch.float16
    return tuple(
        (torch.randn(size, device=device.torch_device) / K**0.25).to(dtype)
        for size in ((M, K), (K, N))
    )  # type: ignore[return-value]


def compare(shape: Sequence[int], rounds: int) -> dict[str, float]:
    """Check the results of all candidates; return their times in microseconds."""
    A, B = operands(shape)
    expected = (A.float() @ B.float()).to(A.dtype)
    limit = tolerance(A.dtype, 1)
    for call in CANDIDATES.values():
        assert_allclose(call(A, B), expected, rtol=limit, atol=limit)
    calls = {n: (lambda call=call: call(A, B)) for n, call in CANDIDATES.items()}
    return {n: s.median * 1e3 for n, s in time_interleaved(calls, rounds=rounds).items()}


def first_result(name: str, shape: Sequence[int]) -> float:
    """Return the seconds from the first call of a candidate to its result, in this process."""
    A, B = operands(shape)
    device = current_device()
    device.synchronize()
    begin = time.perf_counter()
    CANDIDATES[name](A, B)
    device.synchronize()
    return time.perf_counter() - begin


def first_results(shape: str, seconds: float) -> dict[str, dict[str, float | str]]:
    """Return the seconds of ``first_result`` by candidate, with cold and with warm caches.

    ``seconds`` is the time limit of each process. An error text replaces the time of a failure.
    """
    found: dict[str, dict[str, float | str]] = {}
    for name in CANDIDATES:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TRITON_DIST_CACHE_DIR": folder}
            command = [sys.executable, __file__, "--only", name, "--shapes", shape]
            found[name] = {
                state: _seconds(command, knobs.environment() | caches, seconds)
                for state in ("cold", "warm")
            }
    return found


def _seconds(command: list[str], environment: dict[str, str], max_seconds: float) -> float | str:
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True,
                              timeout=max_seconds, check=True)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"more than {max_seconds:.0f} s"
    except subprocess.CalledProcessError as error:
        return f"failed: {error.stderr.strip().splitlines()[-1:]}"
    return float(done.stdout.split()[-1])


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description="Compare matmul, torch.matmul and a kernel under triton.autotune."
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="M,N,K")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="also time first calls of N shapes"
    )
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a first call")
    parser.add_argument(
        "--only", choices=list(CANDIDATES), help="print only its first result, in seconds"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    shapes = [tuple(map(int, shape.split(","))) for shape in options.shapes]
    if options.only:
        print(first_result(options.only, shapes[0]))
        return {}
    report: dict[str, Any] = {"hardware": dict(current_device().facts()), "shapes": {}}
    print(f"{report['hardware']['gpu']}, triton {triton.__version__}, torch {torch.__version__}")
    for shape in shapes:
        M, N, K = shape
        times = compare(shape, options.rounds)
        report["shapes"][f"{M},{N},{K}"] = {"microseconds": times}
        rates = "  ".join(
            f"{name} {t:.1f} us, {2 * M * N * K / t / 1e6:.0f} TFLOP/s" for name, t in times.items()
        )
        best = min(times[LIBRARY], times[TUTORIAL]) / times[OURS]
        print(f"{M} x {N} x {K}: {rates}  x best other {best:.2f}", flush=True)
    for shape in options.shapes[: options.first]:
        found = first_results(shape, options.seconds)
        report["shapes"][shape]["first result, seconds"] = found
        for name, each in found.items():
            print(f"first result of {shape}, {name}: {each}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    main()
