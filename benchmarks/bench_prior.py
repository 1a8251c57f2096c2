"""Compare predicted times of configs (``prior_fn``) with recorded measurements. Needs no GPU.

    scripts/python benchmarks/bench_prior.py [--folder FOLDER] [--json FILE]

First it prints a line for each file of ``record_spaces.py`` in ``FOLDER`` and each M (rows). The
regret of a config is its measured time / the time of the fastest config - 1. *Choice* is the regret
of the config that ``TRITON_DIST_AUTOTUNE=prior`` uses: the first whose predicted time is at most
1 % above the smallest. *First* is the regret of the first config of the space. *Top 8* is the
smallest regret of the 8 configs with the smallest predicted times. Then, for each file of shipped
records, it prints the winners' positions in the order of predicted times.

These commands record further files, on one GPU and on two:
    bash scripts/launch.sh --nproc_per_node=1 benchmarks/record_spaces.py --op grouped_gemm --out F
    bash scripts/launch.sh --nproc_per_node=2 benchmarks/record_spaces.py --op ag_gemm --out F

The second command also accepts ``gemm_rs`` and ``gemm_ar``. File names must end with
``_sizes.json.gz``. The constants of the predictions were fitted to the files in ``FITTED``, and to
records 1, 3, 5, ... of each file of ``ag_gemm``, ``gemm_rs`` and ``gemm_ar``. Results for fitted
and for other data are summarised separately.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import importlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from triton_dist._archive import PACKAGE_RECORDS
from triton_dist._tuning.values import Policy, unpack
from triton_dist.kernels.common.gemm import spaces
from triton_dist.kernels.nvidia.gemm import matmul
from triton_dist.runtime import device as devices
from triton_dist.runtime import peaks
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.testing.opinfo import OPINFOS

DATA = Path(__file__).parent / "data"
FITTED = (
    "matmul_10240_8192", "matmul_8192_28672",
    "ag_gemm_70b", "gemm_ar_70b", "gemm_rs_70b", "grouped_gemm_mixtral-8x7b",
)  # fmt: skip
TOP = 8
"""Number of configs in the columns *top 8*."""


class AbsentGpu(CpuDevice):
    """A Hopper GPU that is not present: only config spaces and predictions can use it."""

    name, interprets = "cuda", False
    has_nccl = has_async_tp = True
    num_sms = 132
    torch_device = torch.device("meta")

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu

    def facts(self) -> Mapping[str, str]:
        return {"gpu": self.gpu, "capability": "9.0", "driver": "0", "sms": "132"}


@contextlib.contextmanager
def on_gpu(gpu: str) -> Iterator[None]:
    """Context manager in which config spaces and predictions are computed for ``gpu``."""
    device, original = AbsentGpu(gpu), (devices._cpu, spaces.compiles_for_hopper)
    devices._cpu, spaces.compiles_for_hopper = lambda: device, lambda: True
    try:
        _clear_caches()
        yield
    finally:
        devices._cpu, spaces.compiles_for_hopper = original
        _clear_caches()


def _clear_caches() -> None:
    """Drop cached values that depend on the device."""
    peaks.device_peak.cache_clear()
    spaces.predict_gemm_ms.cache_clear()
    for info in OPINFOS.values():
        space = info.op.config_space
        for name in list(vars(space)):
            if isinstance(getattr(type(space), name, None), functools.cached_property):
                del vars(space)[name]


class Regrets(NamedTuple):
    """Regrets at one M of a file, as in the module docstring."""

    file: str
    M: int
    choice: float
    first: float
    top: float


def predictions(tree: Mapping[str, Any]) -> Iterator[tuple[str, dict[int, float]]]:
    """Yield each M of a recorded space, with predicted times in ms by index of the config."""
    configs = [eval(text, {"triton": triton}) for text in tree["configs"]]
    with on_gpu(tree["hardware"]["gpu"]):
        for M, samples in sorted(tree["sizes"].items(), key=lambda each: int(each[0])):
            op, args, kwargs = _call(tree, M)
            measured = sorted(int(i) for i, ms in samples.items() if isinstance(ms, list))
            yield M, {i: op.prior_fn(configs[i], *args, **kwargs) for i in measured}


def regrets(path: Path) -> Iterator[Regrets]:
    """Yield the regrets at each M of a file of ``record_spaces.py``."""
    tree = json.loads(gzip.decompress(path.read_bytes()))
    for M, predicted in predictions(tree):
        times = {i: statistics.median(tree["sizes"][M][str(i)]) for i in predicted}
        ranked, best = sorted(times, key=predicted.__getitem__), min(times.values())
        top = min(times[i] for i in ranked[:TOP])
        chosen, first = Policy().most_promising(predicted), min(times)
        values = (ms / best - 1 for ms in (times[chosen], times[first], top))
        yield Regrets(path.name.removesuffix("_sizes.json.gz"), int(M), *values)


def _call(tree: Mapping[str, Any], M: str) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Return the op of a recorded space, and the arguments of its call with ``M`` rows."""
    if tree["op"] != "matmul":
        info = OPINFOS[tree["op"]]
        return info.op, *info.inputs_for(decode_key(tree["keys"][M]))
    _, N, depth = map(int, tree["largest"].split("x"))
    A = torch.empty(int(M), depth, dtype=torch.bfloat16, device="meta")
    return matmul, (A, torch.empty(N, depth, dtype=torch.bfloat16, device="meta").T), {}


def decode_key(tree: Any) -> Any:
    """Return the key of an op from its JSON form in a record."""
    match tree:
        case {"tuple": items}:
            return tuple(map(decode_key, items))
        case {"namedtuple": name, "items": items}:
            module, _, kind = name.partition(":")
            return getattr(importlib.import_module(module), kind)(*map(decode_key, items))
        case {"dtype": name}:
            return getattr(torch, name.removeprefix("torch."))
    return tree


def winner_positions(path: Path, step: int = 1) -> Iterator[tuple[str, int, int]]:
    """Yield the key, the winner's position from 0, and the number of candidates, by record.

    Use every ``step``-th record. Skip those whose winner is not a candidate of today's op.
    """
    records = list(unpack(json.loads(path.read_text())))
    info = OPINFOS[records[0].key.function]
    if info.op.prior_fn is None:
        return
    with on_gpu(records[0].fingerprint.hardware["gpu"]):
        for record in records[::step]:
            args, kwargs = info.inputs_for(decode_key(json.loads(record.key.text)))
            kept, _ = info.op.config_space.prune(info.op.prune_fn, args, kwargs)
            predicted = {c.digest: info.op.prior_fn(c, *args, **kwargs) for c in kept}
            ranked = sorted(predicted, key=predicted.__getitem__)
            if record.best.digest in predicted:
                yield record.key.text, ranked.index(record.best.digest), len(ranked)


def _percent(hits: Sequence[bool]) -> str:
    return f"{sum(hits) / len(hits):.1%}"


def _print_summary(name: str, scores: Sequence[Regrets]) -> None:
    choices = sorted(each.choice for each in scores)
    top = _percent([each.top <= 0.02 for each in scores])
    near = _percent([regret <= 0.1 for regret in choices])
    faster = _percent([each.choice < each.first for each in scores])
    same = _percent([each.choice == each.first for each in scores])
    print(
        f"{name}: {len(scores)} keys, top {TOP} within 2 %: {top}, choice within 10 %: {near}, "
        f"choice faster than first: {faster}, is first: {same}, "
        f"mean regret: choice {statistics.fmean(choices):.2%}, "
        f"first {statistics.fmean(s.first for s in scores):.1%}, largest: choice {choices[-1]:.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=DATA, help="folder of recorded spaces")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    totals = defaultdict[str, list[Regrets]](list)
    for path in sorted(options.folder.glob("*_sizes.json.gz")):
        for each in regrets(path):
            totals["fitted" if each.file in FITTED else "not fitted"].append(each)
            print(f"{each.file:<24} M {each.M:>5}: choice {each.choice:6.1%}, ", end="")
            print(f"first {each.first:6.1%}, top {TOP} {each.top:6.1%}")
    for name, scores in totals.items():
        _print_summary(name, scores)
    positions = {}
    for path in sorted(PACKAGE_RECORDS.glob("*.json")):
        positions[path.stem] = all_records = list(winner_positions(path))
        for name, part in (("fitted", all_records[::2]), ("not fitted", all_records[1::2])):
            if part:
                ordered = sorted(position for _, position, _ in part)
                print(
                    f"{path.stem}, {name}: {len(part)} records with "
                    f"{statistics.fmean(number for *_, number in part):.0f} candidates on average; "
                    f"winner's position: mean {statistics.fmean(ordered) + 1:.1f}, 95 % at most "
                    f"{ordered[math.ceil(0.95 * len(ordered)) - 1] + 1}, in the top {TOP}: "
                    f"{_percent([position < TOP for position in ordered])}"
                )
    if options.json is not None:
        tree = {"keys": [each._asdict() for scores in totals.values() for each in scores]}
        options.json.write_text(json.dumps({**tree, "records": positions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
