"""A cold tuning of ``matmul`` over thousands of configs by a model, beside racing over the list
that was made by hand; on one GPU.

    scripts/python benchmarks/bench_big_space.py [--shape M N K]... [--tries 200] [--json F.json]

Each begins with empty caches, Triton's and the tuner's. In the end both winners and torch are
timed interleaved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from triton_dist import knobs, tune
from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.gemm.sharded import (
    kernel_gemm_non_persistent,
    kernel_gemm_persistent,
)
from triton_dist.kernels.nvidia.gemm import matmul
from triton_dist.runtime.device import current_device
from triton_dist.testing.timing import interleaved

SHAPES = [(4096, 4096, 4096), (128, 8192, 8192)]
_SHARED = 227 * 1024


def space() -> tune.Product:
    if current_device().interprets:
        return tune.Product({**dict.fromkeys("MNK", (32, 64)), **_axes(1), "persistent": (True,)})
    tiles = {"M": (128, 16, 32, 64, 256), "N": (128, 32, 64, 256), "K": (64, 32, 128)}
    return tune.Product({**tiles, **_axes(5), "persistent": (True, False)}, where=_fits)


def _axes(several: int) -> dict[str, Sequence[Any]]:
    return {
        "group": (8, 1, 2, 4, 16)[:several],
        "warps": (8, 4)[:several],
        "stages": (3, 2, 4, 5, 6)[:several],
        "subtile": (False, True)[:several],
    }


def _fits(config: Mapping[str, Any]) -> bool:
    """Tiles in flight fit a block's shared memory, and the output its registers."""
    M, N, K = (config[name] for name in "MNK")
    in_flight = (M + N) * K * 2 * config["stages"]
    return (
        in_flight <= _SHARED
        and 128 * 64 * config["warps"] >= M * N
        and (config["persistent"] or not config["subtile"])
    )


def _config(M: int, N: int, K: int, group: int, warps: int, stages: int, subtile: bool) -> Any:
    tile = {"BLOCK_SIZE_M": M, "BLOCK_SIZE_N": N, "BLOCK_SIZE_K": K, "GROUP_SIZE_M": group}
    if subtile:
        tile["EPILOGUE_SUBTILE"] = True
    return triton.Config(tile, num_warps=warps, num_stages=stages)


def _prepare(A: torch.Tensor, B: torch.Tensor, persistent: bool, **config: Any) -> None:
    C = torch.empty(A.shape[0], B.shape[1], dtype=A.dtype, device=A.device)
    sms = current_device().num_sms
    sharded_gemm(A, B, C, _config(**config), num_sms=sms, persistent=persistent).compile()


def by_model(tries: int) -> tune.AutoTuner:
    """``matmul`` over the whole space."""

    @tune.autotune(
        space(),
        key_fn=lambda A, B: (tune.to_hashable(A), tune.to_hashable(B)),
        prepare_fn=_prepare,
        scope="rank",
        search="surrogate",
        max_trials=tries,
    )
    def matmul_of_any_tile(
        A: torch.Tensor, B: torch.Tensor, persistent: bool, **config: Any
    ) -> torch.Tensor:
        product: torch.Tensor = matmul.fn(
            A, B, gemm_config=_config(**config), persistent=persistent
        )
        return product

    tuner: tune.AutoTuner = matmul_of_any_tile
    return tuner


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="big-space-") as folder:
        knobs.put("TRITON_CACHE_DIR", f"{folder}/triton")
        knobs.put("TRITON_DIST_CACHE_DIR", f"{folder}/tuner")
        knobs.put("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "1")  # whatever records are shipped
        for kernel in (kernel_gemm_persistent, kernel_gemm_non_persistent):
            if hasattr(kernel, "device_caches"):  # it is not interpreted
                kernel.device_caches.clear()
        yield


def measured(shape: tuple[int, int, int], tries: int) -> dict[str, Any]:
    M, N, K = shape
    device = current_device().torch_device
    A = torch.randn(M, K, device=device, dtype=torch.float16)
    B = torch.randn(K, N, device=device, dtype=torch.float16)
    modelled = by_model(tries)
    found: dict[str, Any] = {"shape": shape, "configs": sum(1 for _ in modelled.config_space)}
    # The model first: what racing leaves compiled in memory would be a gift to it.
    for name, tuner in (("surrogate", modelled), ("racing", matmul)):
        with empty_caches():
            begin = time.perf_counter()
            record = tuner.tune(A, B)
            seconds = time.perf_counter() - begin
        failed = sum(not hasattr(trial.outcome, "samples") for trial in record.trials)
        tried = {"tried": len(record.trials), "failed_or_pruned": failed}
        found[name] = {"seconds": seconds, "winner": str(record.best), **tried}
        torch.testing.assert_close(tuner(A, B), A @ B, atol=0.5, rtol=2e-2)
    calls = {
        "surrogate": lambda: modelled(A, B),
        "racing": lambda: matmul(A, B),
        "torch.matmul": lambda: A @ B,
    }
    times = interleaved(calls)
    for name, samples in times.items():
        found.setdefault(name, {})["ms"] = samples.median
    return found


def _shown(found: Mapping[str, Any]) -> str:
    ms = f"{found['ms']:.4f} ms"
    if "winner" not in found:
        return ms
    tried = f"{found['tried']} tried ({found['failed_or_pruned']} failed or pruned)"
    return f"{ms}, tuned in {found['seconds']:.1f} s, {tried}: {found['winner']}"


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("M", "N", "K"))
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = []
    for shape in options.shape or SHAPES:
        found = measured(tuple(shape), options.tries)
        results.append(found)
        print(f"{'x'.join(map(str, shape))}, a space of {found['configs']} configs")
        for name in ("surrogate", "racing", "torch.matmul"):
            print(f"  {name:12s} {_shown(found[name])}", flush=True)
    if options.json:
        device = {"device": current_device().facts().get("gpu", "no gpu")}
        options.json.write_text(json.dumps({**device, "results": results}, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
