"""Measure all configs of an op at many sizes, to replay searches without the hardware.

    bash scripts/launch.sh benchmarks/record_spaces.py --op ag_gemm --out ag_gemm_sizes.json.gz
    bash scripts/launch.sh benchmarks/record_spaces.py --op matmul --random 24 --out sizes.json.gz

For each M (number of rows), every config that is not pruned runs ``--runs`` times: interleaved,
with a cold L2 cache, with all ranks starting together. A sample is the time of the slowest rank.
The M are measured in random order, and the file is written after each M. After ``--minutes``, no
further M starts. For each M, the file has each config's samples in ms or error (by index in
``configs``), the waves of its grid, and the key of the call. ``bench_search_quality.py`` replays
the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap.results import software
from overlap.shapes import LAYERS, layers_of, parse_numbers

from triton_dist._tuning.values import codec
from triton_dist.kernels.nvidia.gemm import matmul
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.opinfo import OPINFOS, OVERLAPPED_OPINFOS
from triton_dist.testing.opinfo.base import Call, OpInfo
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.testing.timing import time_interleaved
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda

INFOS = OVERLAPPED_OPINFOS | {"grouped_gemm": OPINFOS["grouped_gemm"]}
_DEFAULT_M = [64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]
_DEFAULT_M += [2560, 3072, 3584, 4096]
_CPU_SCALE = 256
_TIMEOUT_SECONDS = 30.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=["matmul", *INFOS], default="matmul")
    parser.add_argument("--layer", help="name of a layer, or N:K; default: the first layer")
    parser.add_argument("--M", type=parse_numbers, default=_DEFAULT_M, help="rows")
    parser.add_argument("--random", type=int, default=0, help="number of further random M")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random M and their order")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no M after it")
    parser.add_argument("--runs", type=int, default=16, help="samples of each config")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .json.gz")
    options = parser.parse_args(arguments)
    try:
        options.shape = _layer(options.layer, INFOS.get(options.op))
    except (KeyError, ValueError):
        parser.error(f"argument --layer: {options.op} has no {options.layer!r}")
    # Log-uniform between the smallest and the largest M.
    generator = random.Random(options.seed)
    log_bounds = [math.log(f(options.M)) for f in (min, max)]
    random_M = [round(math.exp(generator.uniform(*log_bounds))) for _ in range(options.random)]
    options.M = sorted({*options.M, *random_M})
    generator.shuffle(options.M)
    return options


def _layer(name: str | None, info: OpInfo[Any] | None) -> Callable[[int], Any]:
    """Return a function of M that returns the shape of the layer ``name``.

    Raises:
        KeyError, ValueError: the layer does not exist.
    """
    if name is not None and ":" in name:
        N, K = map(int, name.split(":"))
    elif info is None:
        N, K = LAYERS[name or next(iter(LAYERS))]
    else:
        layers = layers_of(info)
        return layers[name or next(iter(layers))]
    return lambda M: Shape(M, N, K)


class Recorder:
    """Measures the config space of one op at several M. Collective."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.info = OPINFOS.get(options.op)
        self.op = matmul if self.info is None else self.info.op
        self.configs = list(self.op.config_space)

    def record(self) -> None:
        """Measure each M; rank 0 writes all results to ``--out`` after each M."""
        samples: dict[str, Any] = {}
        waves: dict[str, Any] = {}
        keys: dict[str, Any] = {}
        fallback = [index for index, each in enumerate(self.configs) if self.op.fallback_fn(each)]
        document = {
            "op": self.options.op, "largest": str(self.shape(max(self.options.M))),
            "ranks": dist.get_world_size(), "hardware": dict(current_device().facts()),
            "software": software(), "configs": [str(each) for each in self.configs],
            "fallback": fallback, "waves": waves, "keys": keys, "sizes": samples,
        }  # fmt: skip
        end = time.monotonic() + self.options.minutes * 60
        for M, (args, kwargs) in self._calls():
            if any(group_for().all_gather("end of time", time.monotonic() > end)):
                break
            keys[str(M)] = codec.encode(self.op.key_fn(*args, **kwargs))
            samples[str(M)] = self.samples(M, args, kwargs)
            waves[str(M)] = self._waves(args, kwargs)
            if dist.get_rank() == 0:
                partial = self.options.out.with_suffix(".partial")
                partial.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
                partial.replace(self.options.out)

    def shape(self, M: int) -> Any:
        """Return the shape with M rows. On CPU ranks, N and K are reduced."""
        shape = self.options.shape(M)
        if is_cuda():
            return shape
        N, K = (max(1, size // _CPU_SCALE) for size in (shape.N, shape.K))
        return dataclasses.replace(shape, N=N, K=K)

    def _calls(self) -> Iterator[tuple[int, Call]]:
        """Yield each M and the arguments of a call. They are valid until the next M is yielded."""
        if self.info is None:
            for M in self.options.M:
                yield M, self._matrices(self.shape(M))
            return
        dtype, ranks = torch.bfloat16, dist.get_world_size()
        with self.info.context(self.shape(max(self.options.M)), dtype) as ctx:
            for M in self.options.M:
                operands = self.info.operands(self.shape(M), dtype, ranks)
                yield M, self.info.arguments(operands, ctx)

    def _waves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float | None]:
        """Return the number of waves of each config's grid; ``None``: unknown."""
        key, sizes = self.op.key_fn(*args, **kwargs), self.op.sizes
        assert sizes is not None, "each op of this benchmark declares the sizes in its key"
        key_sizes = sizes.values(key)
        return [sizes.waves(key, config, key_sizes) for config in self.configs]

    def _matrices(self, shape: Shape) -> Call:
        device = current_device().torch_device
        A = torch.randn(shape.M, shape.K, dtype=torch.bfloat16, device=device)
        B = torch.randn(shape.N, shape.K, dtype=torch.bfloat16, device=device).T
        return (A, B), {}

    def samples(self, M: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the samples in ms, or the error, of each config that is not pruned, by index."""
        candidates, _ = self.op.config_space.prune(self.op.prune_fn, args, kwargs)
        calls: dict[str, Callable[[], Any]] = {}
        results: dict[str, Any] = {}
        for config in candidates:
            name = str(self.configs.index(config))
            call = functools.partial(self.op.fn, *args, **kwargs, **config)
            error = self._error_of_first_run(call)
            if error:
                results[name] = error
            else:
                calls[name] = call
        samples = time_interleaved(calls, self.options.runs, warmup_rounds=1)
        results |= {name: [round(ms, 5) for ms in s.milliseconds] for name, s in samples.items()}
        dist_print(f"M = {M}: {len(calls)} configs, {len(candidates) - len(calls)} failed")
        return results

    def _error_of_first_run(self, call: Callable[[], Any]) -> str:
        """Run ``call`` on all ranks; return an error of one of them, or an empty string."""
        reason = ""
        try:
            call()
            current_device().synchronize(_TIMEOUT_SECONDS)
        except Exception as error:  # continue with the other configs, whatever the error
            reason = f"{type(error).__name__}: {error}"[:200]
        return next(filter(None, group_for().all_gather("first run", reason)), "")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    initialize_distributed()
    Recorder(options).record()
    finalize_distributed()


if __name__ == "__main__":
    main()
