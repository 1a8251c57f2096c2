"""Compare the predicted times of configs (``prior_fn``) with measured times; needs no GPU.

    scripts/python benchmarks/bench_prior.py [--folder FOLDER] [--json FILE]

The first table has one line per key of the spaces in ``FOLDER`` that ``record_spaces.py`` recorded.
*Choice* is the regret of the config that is predicted to be the fastest, that is by how much it is
slower than the best config. *First* is the regret of the first config of the space, and *top 8* the
smallest regret among the 8 configs that are predicted to be the fastest. The second table has the
rank of the winner of each shipped record among the predictions for the candidates of its key.

These commands record further spaces, on one GPU and on two:
    bash scripts/launch.sh --nproc_per_node=1 benchmarks/record_spaces.py --op grouped_gemm --out F
    bash scripts/launch.sh --nproc_per_node=2 benchmarks/record_spaces.py --op ag_gemm --out F

The second command also takes ``gemm_rs`` and ``gemm_ar``. The names of the files must end with
``_sizes.json.gz``. The constants of the predictions were fitted to the layers in ``FITTED`` and to
every other record of ``ag_gemm``, ``gemm_rs`` and ``gemm_ar``, beginning with the first of each
file. Totals of other keys and records are printed separately.
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
from triton_dist._tuning.values import unpack
from triton_dist.kernels.common.gemm import prior, spaces
from triton_dist.kernels.nvidia.gemm import matmul
from triton_dist.runtime import peaks
from triton_dist.runtime.device import detect
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.testing.opinfo import OPINFOS

DATA = Path(__file__).parent / "data"
FITTED = ("matmul_10240_8192", "matmul_8192_28672")
K = 8


class NoGpu(CpuDevice):
    """A Hopper GPU on which nothing runs, for config spaces and predictions."""

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
    """Context manager in which config spaces and predictions are as on ``gpu``."""
    device, replaced = NoGpu(gpu), (detect._cpu, spaces.compiles_for_hopper)
    detect._cpu, spaces.compiles_for_hopper = lambda: device, lambda: True
    try:
        _forget()
        yield
    finally:
        detect._cpu, spaces.compiles_for_hopper = replaced
        _forget()


def _forget() -> None:
    """Drop everything that depends on the device."""
    peaks.device_peak.cache_clear()
    prior.gemm_ms.cache_clear()
    for info in OPINFOS.values():
        space = info.op.config_space
        for name in list(vars(space)):
            if isinstance(getattr(type(space), name, None), functools.cached_property):
                del vars(space)[name]


class KeyScore(NamedTuple):
    """Regrets at one key."""

    file: str
    M: int
    choice: float
    first: float
    top: float


def predictions(tree: Mapping[str, Any]) -> Iterator[tuple[str, dict[int, float]]]:
    """Yield each M of a recorded space, with the predicted times of its configs by index."""
    configs = [eval(text, {"triton": triton}) for text in tree["configs"]]
    with on_gpu(tree["hardware"]["gpu"]):
        for M, runs in tree["sizes"].items():
            op, args, kwargs = _call(tree, M)
            measured = [int(i) for i, times in runs.items() if isinstance(times, list)]
            yield M, {i: op.prior_fn(configs[i], *args, **kwargs) for i in measured}


def key_scores(path: Path) -> Iterator[KeyScore]:
    """Yield the regrets at each key of a file of ``record_spaces.py``."""
    tree = json.loads(gzip.decompress(path.read_bytes()))
    for M, predicted in predictions(tree):
        times = {i: statistics.median(tree["sizes"][M][str(i)]) for i in predicted}
        ranked, best = sorted(times, key=predicted.__getitem__), min(times.values())
        top = min(times[i] for i in ranked[:K])
        regrets = (ms / best - 1 for ms in (times[ranked[0]], times[min(times)], top))
        yield KeyScore(path.name.removesuffix("_sizes.json.gz"), int(M), *regrets)


def _call(tree: Mapping[str, Any], M: str) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Return the op of a recorded space, and the arguments of its call with ``M`` rows."""
    if tree["op"] != "matmul":
        info = OPINFOS[tree["op"]]
        return info.op, *info.inputs_for(key_value(tree["keys"][M]))
    _, N, depth = map(int, tree["largest"].split("x"))
    A = torch.empty(int(M), depth, dtype=torch.bfloat16, device="meta")
    return matmul, (A, torch.empty(N, depth, dtype=torch.bfloat16, device="meta").T), {}


def key_value(tree: Any) -> Any:
    """Return the key of an op from the tree in its record."""
    match tree:
        case {"tuple": items}:
            return tuple(map(key_value, items))
        case {"namedtuple": name, "items": items}:
            module, _, kind = name.partition(":")
            return getattr(importlib.import_module(module), kind)(*map(key_value, items))
        case {"dtype": name}:
            return getattr(torch, name.removeprefix("torch."))
    return tree


def winner_ranks(path: Path, step: int = 1) -> Iterator[tuple[str, int, int]]:
    """Yield key, rank of the winner from 0, and number of candidates, of every ``step``-th record.

    Records whose op has no ``prior_fn`` or whose winner is no longer a candidate are left out.
    """
    records = list(unpack(json.loads(path.read_text())))
    info = OPINFOS[records[0].key.function]
    if info.op.prior_fn is None:
        return
    with on_gpu(records[0].fingerprint.hardware["gpu"]):
        for record in records[::step]:
            args, kwargs = info.inputs_for(key_value(json.loads(record.key.text)))
            kept, _ = info.op.config_space.prune(info.op.prune_fn, args, kwargs)
            predicted = {c.digest: info.op.prior_fn(c, *args, **kwargs) for c in kept}
            ranked = sorted(predicted, key=predicted.__getitem__)
            if record.best.digest in predicted:
                yield record.key.text, ranked.index(record.best.digest), len(ranked)


def _share(hits: Sequence[bool]) -> str:
    return f"{sum(hits) / len(hits):.1%}"


def _total(name: str, scores: Sequence[KeyScore]) -> None:
    regrets = sorted(each.choice for each in scores)
    faster = _share([each.choice < each.first for each in scores])
    print(
        f"{name}: {len(scores)} keys, top {K} within 2 %: {_share([s.top <= 0.02 for s in scores])}"
        f", choice within 10 %: {_share([r <= 0.1 for r in regrets])}, faster than the first: "
        f"{faster}, mean regret {statistics.fmean(regrets):.2%}, largest {regrets[-1]:.1%} (first: "
        f"{statistics.fmean(each.first for each in scores):.1%} on average)"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=DATA, help="of recorded spaces")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    totals = defaultdict[str, list[KeyScore]](list)
    for path in sorted(options.folder.glob("*_sizes.json.gz")):
        for each in key_scores(path):
            totals["fitted" if each.file in FITTED else "not fitted"].append(each)
            print(f"{each.file:<24} M {each.M:>5}: choice {each.choice:6.1%}, ", end="")
            print(f"first {each.first:6.1%}, top {K} {each.top:6.1%}")
    for name, scores in totals.items():
        _total(name, scores)
    ranks = {}
    for path in sorted(PACKAGE_RECORDS.glob("*.json")):
        ranks[path.stem] = found = list(winner_ranks(path))
        for name, part in (("fitted", found[::2]), ("not fitted", found[1::2])):
            if part:
                places = sorted(rank for _, rank, _ in part)
                print(
                    f"{path.stem}, {name}: {len(part)} records, of "
                    f"{statistics.fmean(number for *_, number in part):.0f} candidates the winner "
                    f"has rank {statistics.fmean(places) + 1:.1f} on average, 95 % at most "
                    f"{places[math.ceil(0.95 * len(places)) - 1] + 1}, top {K}: "
                    f"{_share([place < K for place in places])}"
                )
    if options.json is not None:
        tree = {"keys": [each._asdict() for scores in totals.values() for each in scores]}
        options.json.write_text(json.dumps({**tree, "records": ranks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
