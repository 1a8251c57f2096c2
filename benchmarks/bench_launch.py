"""Compare the host time of one launch by Triton, its autotuner, this package and its runner.

    scripts/python benchmarks/bench_launch.py --json launch.json

The kernel is shorter than a launch, so launches do not queue up. 50 consecutive calls are timed
together. The candidates alternate, so that a slow moment of the machine affects all of them. The
command prints medians, and their difference to plain ``triton.jit``. Then it prints the time of the
first launch of a kernel from each compilation level, in a process that has launched other kernels.

Without a GPU, launches are recorded and not run, so the times are of the Python code only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from triton_dist import runner, tune
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, Launcher
from triton_dist.testing.compile_only import compile_only

PLAIN = "triton.jit"
_SIZES = (64, 64, 64)


def add(a_ptr, b_ptr, c_ptr, M, N, K, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offsets = rows[:, None] * stride + columns[None, :]
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    total = tl.load(a_ptr + offsets, mask=inside) + tl.load(b_ptr + offsets, mask=inside) + K
    tl.store(c_ptr + offsets, total, mask=inside)


TILES = [{"BLOCK_M": m, "BLOCK_N": n} for m, n in ((64, 64), (64, 128))]


def candidates(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return calls that add two matrices, by name; export their kernels to ``folder``."""
    device = current_device()
    a, b, c = (torch.ones(64, 64, dtype=torch.float16, device=device.torch_device) for _ in "abc")
    values = (a, b, c, *_SIZES, 64)
    plain, ours = triton.jit(add), runner.jit(add)
    cubins = []
    for tile in TILES:
        cubins.append(folder / f"{tile['BLOCK_N']}")
        runner.export(plain[(1,)](*values, **tile), cubins[-1], ["cubin"])
    first, tile = str(cubins[0]), TILES[0]
    by_triton = _autotuned([triton.Config(tile) for tile in TILES])
    by_triton_cubins = _autotuned(
        [triton.Config({"autotune_cubin_dir": str(each)}) for each in cubins], runner.jit(add)
    )

    @tune.autotune(TILES, lambda *_: 0, scope="rank")
    def add_by_autotune(a: Any, b: Any, c: Any, BLOCK_M: int, BLOCK_N: int) -> None:
        plain[(1,)](a, b, c, *_SIZES, 64, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)

    @tune.autotune(runner.tuning.cubin_space(folder, add), lambda *_: 0, scope="rank")
    def add_by_autotune_of_cubins(a: Any, b: Any, c: Any, artefact: runner.Artefact) -> None:
        ours[(1,)](a, b, c, *_SIZES, 64, artefact=artefact)

    calls: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: plain[(1,)](*values, **tile),
        "triton.autotune": lambda: by_triton[(1,)](*values),
        "tune.autotune": lambda: add_by_autotune(a, b, c),
        "runner.jit": lambda: ours[(1,)](*values, **tile),
        "runner, cubin_dir": lambda: ours[(1,)](*values, **tile, cubin_dir=first),
        "runner, autotune_cubin_dir": lambda: ours[(1,)](*values, autotune_cubin_dir=first),
        "triton.autotune of cubins": lambda: by_triton_cubins[(1,)](*values),
        "tune.autotune of cubins": lambda: add_by_autotune_of_cubins(a, b, c),
        "torch.mm": lambda: torch.mm(a, b, out=c),
    }
    if device.name == "cuda":
        launcher, tensors = Launcher(), {"a_ptr": a, "b_ptr": b, "c_ptr": c}
        launch = Launch(plain, (1,), values, tile)
        calls["pre-built launch"] = lambda: launcher.run(0, lambda: launch, tensors)
    for call in calls.values():  # compile, tune, build launches
        call()
        call()
    _check(calls, a, b, c)
    return calls


def _autotuned(configs: list[triton.Config], kernel: Any = None) -> Any:
    return triton.autotune(configs, key=["M", "N", "K"])(kernel or triton.jit(add))


def _check(calls: dict[str, Callable[[], Any]], a: Any, b: Any, c: Any) -> None:
    """Raise if a kernel's result is wrong; skip the check if launches are only recorded."""
    if a.device.type != "cuda":
        return
    for name, call in calls.items():
        c.fill_(float("nan"))
        call()
        expected = a @ b if name == "torch.mm" else a + b + _SIZES[2]
        torch.testing.assert_close(c, expected, msg=name)


def microseconds(
    calls: dict[str, Callable[[], Any]], rounds: int, calls_per_sample: int = 50
) -> dict[str, float]:
    """Return the median host time of each call in us. A sample times ``calls_per_sample`` calls."""
    device = current_device()
    took: dict[str, list[float]] = {name: [] for name in calls}
    ordered_calls = list(calls.items())
    for _ in range(rounds):
        ordered_calls.append(ordered_calls.pop(0))  # vary the order from round to round
        for name, call in ordered_calls:
            device.synchronize()
            begin = time.perf_counter()
            for _ in range(calls_per_sample):
                call()
            took[name].append((time.perf_counter() - begin) / calls_per_sample * 1e6)
    device.synchronize()
    return {name: statistics.median(times) for name, times in took.items()}


def first_uses(folder: Path) -> dict[str, float]:
    """Return milliseconds of the first launch from each level, including reading the files."""
    device = current_device()
    values = [torch.ones(64, 64, dtype=torch.float16, device=device.torch_device)] * 3
    exported = triton.jit(add)[(1,)](*values, *_SIZES, 64, **TILES[0], num_warps=8)
    runner.export(exported, folder / "levels")
    took = {}
    for level in runner.LEVELS:
        kernel = runner.jit(add)
        device.synchronize()
        begin = time.perf_counter()
        kernel[(1,)](*values, *_SIZES, 64, **{f"{level}_dir": folder / "levels"})
        device.synchronize()
        took[level] = (time.perf_counter() - begin) * 1e3
    return took


@contextmanager
def _gpu_or_recorder() -> Iterator[None]:
    """Context manager in which kernels run on the GPU or, without a GPU, launches are recorded."""
    if current_device().name == "cuda":
        yield
    else:
        with compile_only(90):
            yield


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return microseconds of a launch by candidate, and milliseconds of a first use by level."""
    with tempfile.TemporaryDirectory() as folder, _gpu_or_recorder():
        calls = candidates(Path(folder, "cubins"))
        return {
            "microseconds": microseconds(calls, rounds),
            "first use, milliseconds": first_uses(Path(folder)),
        }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Compare the host time of a launch.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    found = measure(options.rounds)
    times = found["microseconds"]
    print(f"{current_device().facts()['gpu']}, triton {triton.__version__}: host us of a launch")
    for name, value in times.items():
        print(f"{name:28}{value:8.2f}{value - times[PLAIN]:+9.2f}")
    print("first use of a level, ms:  ", end="")
    print("  ".join(f"{k} {v:.1f}" for k, v in found["first use, milliseconds"].items()))
    report = {"hardware": dict(current_device().facts()), "triton": triton.__version__, **found}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_DIST_CACHE_DIR"] = cache
        main()
