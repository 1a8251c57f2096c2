"""Measure the quality of the searches' winners, and the cost of a search, on recorded spaces.

    scripts/python benchmarks/bench_search_quality.py [racing|few|warm-start|prior|matmul] [options]

Without the name of a table, the four tables that need no GPU are printed.

- ``racing``: compares ``search="racing"``, the usual "5 + 10" (every config 5 times untimed and 10
  times timed, lowest mean wins) and an oracle, on a simulated device whose clocks change during the
  tuning.
- ``few``: searches that try 200 of many configs: random, ``search="surrogate"``, and
  ``search="optuna"`` if Optuna is installed.
- ``warm-start``: tunings of a size for which near sizes are tuned, compared with full races.
- ``prior``: races with and without the predicted times of the op (``prior_fn``), races with these
  times in reversed order, and ``search="prior"``.
- ``matmul``: tunings of ``matmul`` with empty caches on one GPU: surrogate (and Optuna, if
  installed) over thousands of configs, and racing over the op's list of configs.

In a recorded space every config was run many times. *Regret* is the slowdown of the winner against
the best config, by the medians of all recorded runs. *Near* is the share of tunings whose regret is
at most 1 %, or at most half of the 95 % interval of the best config's median. *Cost* is the device
time of all runs, relative to 5 + 10 (``racing``) or to the full race (``warm-start``).

Recorded spaces are files in the T4 format of the autotuning community; ``benchmarks/data`` has
excerpts of two. ``--folder`` selects another folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gzip
import importlib.util
import json
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from triton_dist import knobs, tune
from triton_dist._tuning import protocols
from triton_dist._tuning.search import Racing, ShortRace, search_for
from triton_dist._tuning.search.choose import BATCH_SIZE, ProposalSearch
from triton_dist._tuning.search.surrogate import Surrogate
from triton_dist._tuning.search.tpe import Tpe
from triton_dist._tuning.sizes.neighbours import MAX_DISTANCE, Neighbours, nearest_neighbours
from triton_dist._tuning.values import (
    Config,
    Failure,
    Fingerprint,
    Key,
    Measurement,
    Policy,
    Sizes,
    Trial,
    TuningRecord,
    fine_bucket,
    winner,
)
from triton_dist._tuning.values.outcome import merge_outcomes
from triton_dist._tuning.values.sizes import distance
from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.gemm.sharded import (
    kernel_gemm_non_persistent,
    kernel_gemm_persistent,
)
from triton_dist.kernels.nvidia.gemm import matmul
from triton_dist.runtime.device import current_device
from triton_dist.testing.replay import MakeSearch, RecordedSpace, Replay, Score, score
from triton_dist.testing.timing import time_interleaved

HERE = Path(__file__).parent
DATA = HERE / "data"
RACING = Policy.for_device("cuda", timing="events", search="racing")
FloatArray = Any
"""A numpy array of floats."""


def half_interval(runs: Sequence[float]) -> float:
    """Return half of the 95 % interval of the median of ``runs``, relative to the median."""
    ranked, n = sorted(runs), len(runs)
    below = np.cumsum([math.comb(n, k) / 2**n for k in range(n)])
    outside = max(int((below <= 0.025).sum()) - 1, 0)  # runs outside the interval on each side
    return (ranked[n - 1 - outside] - ranked[outside]) / 2 / statistics.median(runs)


# ---- racing: a device whose clocks change

DRIFT, MODE_GAP, SLOW_RUN_SHARE, NUM_RUNS = 0.05, 0.03, 0.05, 16
"""Relative amplitudes of drift and of clock states, share of slow runs, and number of recorded runs
of each config that a simulation uses."""
_NUM_CLOCK_VALUES, _SIMULATED_DURATIONS = 1 << 16, 1.25
"""Number of clock values, over 1.25 times the device time of 5 + 10."""


def _period(rng: np.random.Generator) -> float:
    """Return a random period, 0.03 to 1 of the device time of 5 + 10."""
    return math.exp(rng.uniform(math.log(0.03), 0.0))


def _two_states(rng: np.random.Generator, moments: FloatArray, period: float) -> FloatArray:
    changes = np.cumsum(rng.exponential(period, int(10 + 3 * _SIMULATED_DURATIONS / period)))
    return 2.0 * ((np.searchsorted(changes, moments) + rng.integers(2)) % 2) - 1


def _ramp(rng: np.random.Generator, moments: FloatArray) -> FloatArray:
    return DRIFT * rng.choice((-1.0, 1.0)) * (2 * np.minimum(moments / _period(rng), 1.0) - 1)


def _step(rng: np.random.Generator, moments: FloatArray) -> FloatArray:
    return DRIFT * _two_states(rng, moments, _period(rng))


def _sine(rng: np.random.Generator, moments: FloatArray) -> FloatArray:
    return DRIFT * np.sin(2 * np.pi * (moments / _period(rng) + rng.uniform()))


def _walk(rng: np.random.Generator, moments: FloatArray) -> FloatArray:
    steps = (
        DRIFT
        * math.sqrt(_SIMULATED_DURATIONS / _NUM_CLOCK_VALUES / _period(rng))
        * rng.normal(size=len(moments))
    )
    walk = np.cumsum(steps) + rng.uniform(-DRIFT, DRIFT)
    return np.abs((walk - DRIFT) % (4 * DRIFT) - 2 * DRIFT) - DRIFT  # reflected at the ends


def _modes(rng: np.random.Generator, moments: FloatArray) -> FloatArray:
    return MODE_GAP * _two_states(rng, moments, _period(rng) / 10)


def _two_speeds(rng: np.random.Generator, moments: FloatArray) -> FloatArray:
    return MODE_GAP * rng.choice((-1.0, 1.0), len(moments))


def _tails(rng: np.random.Generator, moments: FloatArray) -> FloatArray:
    return np.where(
        rng.random(len(moments)) < SLOW_RUN_SHARE, rng.uniform(0.2, 2.0, len(moments)), 0.0
    )


SLOWDOWN_OVER_TIME: dict[str, Callable[[np.random.Generator, FloatArray], FloatArray]] = {
    "ramp": _ramp, "step": _step, "sine": _sine, "walk": _walk, "modes": _modes,
}  # fmt: skip
"""Functions that return the slowdown (factor minus 1) of all runs at given moments. Functions in
``SLOWDOWN_OF_RUNS`` return it for each run, independent of the moment."""
SLOWDOWN_OF_RUNS = {"tails": _tails, "coin": _two_speeds}
CLOCKS = {
    "steady": (),
    **{name: (name,) for name in (*SLOWDOWN_OVER_TIME, *SLOWDOWN_OF_RUNS)},
    "all": ("walk", "tails", "modes"),
}


class Space:
    """The configs of a recorded space that do not fail, and their times [configs, runs] in ms."""

    def __init__(self, name: str, configs: Sequence[Config], runs: FloatArray) -> None:
        self.name, self.configs, self.runs = name, tuple(configs), runs
        medians = np.median(runs, axis=1)
        self.regrets = medians / medians.min() - 1
        self.near = max(0.01, half_interval(runs[medians.argmin()].tolist()))

    @classmethod
    def read(cls, path: Path, max_configs: int | None) -> Space:
        """Read at most ``max_configs`` configs, drawn at random, from a file in T4 format."""
        space = RecordedSpace.read(path)
        valid = [c for c in space.configs if not isinstance(space.runs[c.digest], Failure)]
        drawn = np.sort(np.random.default_rng(0).permutation(len(valid))[:max_configs])
        configs = [valid[index] for index in drawn]
        return cls(space.name, configs, np.array([space.runs[c.digest] for c in configs]))


class Device:
    """Simulated device: the time of a run is a recorded time of the config, times a clock factor.

    Attributes:
        cost: time of all runs so far, without clock factors, relative to 15 runs of each config.
    """

    def __init__(self, space: Space, clocks: str, seed: int) -> None:
        rng = np.random.default_rng([seed, *clocks.encode()])
        configs, num_recorded = space.runs.shape
        order = rng.permuted(np.tile(np.arange(num_recorded), (configs, 1)), axis=1)[:, :NUM_RUNS]
        self._runs = np.take_along_axis(space.runs, np.sort(order, axis=1), axis=1)
        self._duration = float(self._runs[:, :15].sum())
        moments = np.arange(_NUM_CLOCK_VALUES) * (_SIMULATED_DURATIONS / _NUM_CLOCK_VALUES)
        self._of_time, self._of_run = np.ones(_NUM_CLOCK_VALUES), np.ones(_NUM_CLOCK_VALUES)
        for name in CLOCKS[clocks]:
            if name in SLOWDOWN_OVER_TIME:
                self._of_time *= 1 + SLOWDOWN_OVER_TIME[name](rng, moments)
            else:
                self._of_run *= 1 + SLOWDOWN_OF_RUNS[name](rng, moments)
        self._num_taken, self._num_runs, self._elapsed_ms = [0] * configs, 0, 0.0

    @property
    def cost(self) -> float:
        return self._elapsed_ms / self._duration

    def run(self, config: int) -> float:
        """Return the milliseconds of one run. Recorded runs are used in order, cyclically."""
        recorded_ms = float(self._runs[config, self._num_taken[config] % NUM_RUNS])
        cell = min(int(self.cost / _SIMULATED_DURATIONS * _NUM_CLOCK_VALUES), _NUM_CLOCK_VALUES - 1)
        factor = float(self._of_time[cell] * self._of_run[self._num_runs % _NUM_CLOCK_VALUES])
        self._num_taken[config] += 1
        self._num_runs += 1
        self._elapsed_ms += recorded_ms
        return recorded_ms * factor


def race(space: Space, device: Device) -> int:
    """Race all configs; return the winner's index."""
    search = Racing(space.configs, RACING)
    indices = {config.digest: index for index, config in enumerate(space.configs)}
    samples: defaultdict[int, tuple[float, ...]] = defaultdict(tuple)
    while (request := search.ask()) is not None:
        index = indices[request.config.digest]
        if index not in samples:
            device.run(index)  # the first run, which compiles
        taken = tuple(device.run(index) for _ in range(RACING.warmup + request.num_samples))
        outcome = Measurement(taken[RACING.warmup :], RACING.warmup)
        samples[index] += outcome.samples
        search.tell(request, outcome)
    tried = sorted(samples)
    outcomes = [Measurement(samples[each], RACING.warmup) for each in tried]
    first = winner(outcomes, RACING.indifference)
    assert first is not None
    return tried[first]


def five_and_ten(space: Space, device: Device) -> int:
    times = [[device.run(index) for _ in range(15)][5:] for index in range(len(space.configs))]
    return int(np.mean(times, axis=1).argmin())


def oracle(space: Space, device: Device) -> int:
    """Return the best of the ten configs with the lowest regret, by 16 interleaved samples each."""
    best = np.argsort(space.regrets, kind="stable")[:10]
    rounds = [[device.run(int(index)) for index in best] for _ in range(NUM_RUNS)]
    return int(best[np.median(rounds, axis=0).argmin()])


STRATEGIES = {"racing": race, "5 + 10": five_and_ten, "oracle": oracle}


def racing_table(options: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"{'space':20}{'configs':>8}{'clocks':>8}", end="")
    print("".join(f" |{name:>8}: near, regret p95, cost" for name in STRATEGIES))
    rows = []
    for path in recorded_spaces(options.folder):
        space = Space.read(path, options.configs)
        for clocks in options.clocks or CLOCKS:
            line = f"{space.name:20.20}{len(space.configs):8}{clocks:>8}"
            for name, choose in STRATEGIES.items():
                regrets, costs = [], []
                for seed in range(options.draws):
                    device = Device(space, clocks, seed)
                    regrets.append(float(space.regrets[choose(space, device)]))
                    costs.append(device.cost)
                near = float(np.mean([each <= space.near + 1e-9 for each in regrets]))
                p95, cost = float(np.quantile(regrets, 0.95)), statistics.fmean(costs)
                labels = {"space": space.name, "clocks": clocks, "decision": name}
                rows.append({**labels, "near": near, "regret p95": p95, "cost": cost})
                line += f" |{near:14.0%}{p95:12.2%}{cost:6.3f}"
            print(line, flush=True)
    return rows


# ---- few: searches of more candidates than can be tried


class RandomSearch:
    """Random configs; implements :class:`triton_dist.tune.Search`."""

    def __init__(self, values: Mapping[str, Sequence[Any]], seed: int) -> None:
        self._values, self._rng = values, random.Random(seed)

    def ask(self) -> dict[str, Any]:
        return {name: self._rng.choice(own) for name, own in self._values.items()}

    def tell(self, config: Mapping[str, Any], milliseconds: float | None) -> None:
        """Ignore the result."""


def _make_user_search(kind: Callable[..., Any]) -> MakeSearch:
    def make(candidates: Sequence[Config], policy: Policy, seed: int) -> protocols.Search:
        return search_for(candidates, policy, user_search=functools.partial(kind, seed=seed))

    return make


def _make_proposal_search(proposer: Callable[..., Any], batch_size: int) -> MakeSearch:
    def make(candidates: Sequence[Config], policy: Policy, seed: int) -> protocols.Search:
        return ProposalSearch(proposer(candidates, batch_size, seed), candidates, policy)

    return make


def has_optuna() -> bool:
    return importlib.util.find_spec("optuna") is not None


def few_table(options: argparse.Namespace) -> list[dict[str, Any]]:
    # A tuner that compiles candidates ahead makes the model propose a batch at a time.
    batch_sizes = {"": 1, ", batches": BATCH_SIZE}
    proposers: dict[str, Callable[..., Any]] = {"surrogate": Surrogate}
    if has_optuna():
        proposers["optuna"] = Tpe
    searches = {"random": _make_user_search(RandomSearch)} | {
        name + text: _make_proposal_search(proposer, batch_size)
        for name, proposer in proposers.items()
        for text, batch_size in batch_sizes.items()
    }
    policy = Policy.for_device(
        "cuda", timing="events", search="surrogate", max_trials=options.tries
    )
    scores: list[Score] = []
    for path in recorded_spaces(options.folder):
        space = RecordedSpace.read(path)
        print(f"{space.name}: {len(space.configs)} configs, {options.tries} tries")
        for name, make in searches.items():
            scores.append(score(space, name, make, policy, range(options.draws)))
            print(f"  {scores[-1]}", flush=True)
    return [dataclasses.asdict(each) for each in scores]


# ---- warm-start: sizes next to tuned sizes

_SIZES = Sizes("recorded", {"M": fine_bucket})
_FINGERPRINT = Fingerprint({}, {}, {}, RACING.fingerprint_fields(), {}, "")


class SizeKey(NamedTuple):
    """Tuning key of a recorded size."""

    M: int


class SizedSpace:
    """A file of ``record_spaces.py``: run times of an op's configs at many sizes."""

    def __init__(self, path: Path) -> None:
        self.tree = tree = json.loads(gzip.decompress(path.read_bytes()))
        self.configs = configs = [Config({"config": i}) for i in range(len(tree["configs"]))]
        self.name = f"{tree['op']} {tree['largest']}, {tree['ranks']} GPU"
        self.runs: dict[int, dict[Config, list[float]]] = {
            int(M): {configs[int(i)]: each for i, each in runs.items() if isinstance(each, list)}
            for M, runs in tree["sizes"].items()
        }
        self.fallback = frozenset(configs[index] for index in tree["fallback"])
        self.waves: dict[int, dict[Config, float | None]] = {
            int(M): dict(zip(configs, each, strict=True))
            for M, each in tree.get("waves", {}).items()
        }

    def replay_tuning(
        self, M: int, search: protocols.Search, rng: random.Random
    ) -> tuple[TuningRecord, float]:
        """Replay ``search`` at ``M``; return its record, and the milliseconds of all runs."""
        shuffled = {c.digest: rng.sample(list(r), len(r)) for c, r in self.runs[M].items()}
        replay, outcomes = Replay(shuffled), {}
        while (request := search.ask()) is not None:
            outcome = replay.attempt(request, RACING)
            search.tell(request, outcome)
            outcomes[request.config] = merge_outcomes(outcomes.get(request.config), outcome)
        trials = tuple(Trial.of(c, outcomes[c]) for c in self.runs[M] if c in outcomes)
        key = Key.of("recorded", SizeKey(M), "recorded")
        return TuningRecord(key, _FINGERPRINT, trials, "", 0.0), replay.milliseconds

    def make_warm_start(
        self, M: int, tuned_records: Mapping[int, TuningRecord], waves: bool, milliseconds: float
    ) -> protocols.Search:
        """Return a warm-started search at ``M``.

        Args:
            M: the size.
            tuned_records: records of tuned sizes.
            waves: extrapolate latencies by the number of waves of the grid.
            milliseconds: device time of the search.
        """
        far = {size: distance((size,), (M,)) for size in tuned_records}
        near = nearest_neighbours(
            (far[size], (size,), tuned_records[size])
            for size in tuned_records
            if far[size] <= MAX_DISTANCE
        )
        found = Neighbours(_SIZES.family(SizeKey(M)), near, self.fallback.__contains__)
        if waves:
            lookup = lambda config, sizes: self.waves.get(sizes[0], {}).get(config)  # noqa: E731
            found = dataclasses.replace(found, waves=lookup)
        few = found.candidates(list(self.runs[M]), milliseconds)
        return ShortRace(few, RACING, milliseconds)

    def regret(self, M: int, record: TuningRecord) -> tuple[float, bool]:
        """Return the regret of the record's winner at ``M``, and whether it counts as near."""
        medians = {config.digest: statistics.median(r) for config, r in self.runs[M].items()}
        best = min(self.runs[M], key=lambda config: medians[config.digest])
        regret = medians[record.best.digest] / medians[best.digest] - 1
        return regret, regret <= max(0.01, half_interval(self.runs[M][best]))


def warm_start_table(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Race the powers of two in full, then tune the other sizes in random order."""
    rows = []
    for path in sorted(options.folder.glob("*_sizes.json.gz")):
        space = SizedSpace(path)
        powers = [M for M in space.runs if M & (M - 1) == 0]
        if len(powers) == len(space.runs):
            continue
        found: dict[str, list[tuple[float, bool, float]]] = defaultdict(list)
        for number in range(options.draws):
            rng = random.Random(number)
            anchors = {
                M: space.replay_tuning(M, Racing(list(space.runs[M]), RACING), rng)[0]
                for M in powers
            }
            others = rng.sample(
                sorted(space.runs.keys() - anchors.keys()), len(space.runs) - len(anchors)
            )
            for name in ("full race", "warm start", "without waves_fn"):
                tuned_records = dict(anchors)
                for M in others:
                    search: protocols.Search = Racing(list(space.runs[M]), RACING)
                    if name != "full race":
                        waves = name == "warm start"
                        search = space.make_warm_start(
                            M, tuned_records, waves, options.milliseconds
                        )
                    record, device_ms = space.replay_tuning(M, search, rng)
                    tuned_records[M] = dataclasses.replace(record, warm_started_from="warm-started")
                    found[name].append((*space.regret(M, record), device_ms))
        print(f"{space.name}, {len(found['full race'])} tunings")
        full = [device_ms for _, _, device_ms in found["full race"]]
        for name, each in found.items():
            rows.append(_sized_row(space.name, name, each, full))
    return rows


def _sized_row(
    space: str, name: str, each: Sequence[tuple[float, bool, float]], full: Sequence[float]
) -> dict[str, Any]:
    """Print and return a row: ``each`` tuning has a regret, whether it is near, and a time."""
    regrets = sorted(regret for regret, _, _ in each)
    row = {
        "space": space,
        "tuned by": name,
        "near": statistics.fmean(near for _, near, _ in each),
        "regret p95": regrets[int(0.95 * (len(regrets) - 1))],
        "cost": statistics.fmean(e[2] / f for e, f in zip(each, full, strict=True)),
    }
    print(
        f"  {name:>16}: near {row['near']:.0%}, regret p95 {row['regret p95']:.1%}, "
        f"cost {row['cost']:.2f}",
        flush=True,
    )
    return row


# ---- prior: predicted times

PRIOR = Policy.for_device("cuda", timing="events", search="prior")


def prior_table(options: argparse.Namespace) -> list[dict[str, Any]]:
    import bench_prior  # next to this file

    rows = []
    for path in sorted(options.folder.glob("*_sizes.json.gz")):
        space = SizedSpace(path)
        found: dict[str, list[tuple[float, bool, float]]] = defaultdict(list)
        for M, by_index in bench_prior.predictions(space.tree):
            configs = list(space.runs[int(M)])
            ms = {space.configs[i]: predicted for i, predicted in by_index.items()}
            reverse = {config: 1 / predicted for config, predicted in ms.items()}
            searches: dict[str, tuple[Policy, Mapping[Config, float]]] = {
                "race": (RACING, {}), "with predictions": (RACING, ms),
                "reversed": (RACING, reverse), 'search="prior"': (PRIOR, ms),
            }  # fmt: skip
            for number in range(options.draws):
                for name, (policy, predicted) in searches.items():
                    search = search_for(configs, policy, None, predicted)
                    record, device_ms = space.replay_tuning(int(M), search, random.Random(number))
                    found[name].append((*space.regret(int(M), record), device_ms))
        print(f"{space.name}, {len(found['race'])} tunings")
        full = [device_ms for _, _, device_ms in found["race"]]
        for name, each in found.items():
            rows.append(_sized_row(space.name, name, each, full))
    return rows


# ---- matmul: on one GPU

SHAPES = [(4096, 4096, 4096), (128, 8192, 8192)]
_SHARED = 227 * 1024


def matmul_space() -> tune.Product:
    if current_device().interprets:
        return tune.Product({**dict.fromkeys("MNK", (32, 64)), **_axes(1), "persistent": (True,)})
    tiles = {"M": (128, 16, 32, 64, 256), "N": (128, 32, 64, 256), "K": (64, 32, 128)}
    return tune.Product({**tiles, **_axes(5), "persistent": (True, False)}, where=_fits)


def _axes(max_values: int) -> dict[str, Sequence[Any]]:
    return {
        "group": (8, 1, 2, 4, 16)[:max_values],
        "warps": (8, 4)[:max_values],
        "stages": (3, 2, 4, 5, 6)[:max_values],
        "subtile": (False, True)[:max_values],
    }


def _fits(config: Mapping[str, Any]) -> bool:
    """Return whether the loaded tiles fit in shared memory, and the output tile in registers."""
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


def _tuned_by_model(search: str, tries: int) -> Any:
    @tune.autotune(
        matmul_space(),
        key_fn=lambda A, B: (tune.to_hashable(A), tune.to_hashable(B)),
        prepare_fn=_prepare,
        scope="rank",
        search=search,
        max_trials=tries,
    )
    def any_matmul(A: torch.Tensor, B: torch.Tensor, persistent: bool, **config: Any) -> Any:
        return matmul.fn(A, B, gemm_config=_config(**config), persistent=persistent)

    return any_matmul


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Context manager with empty caches of Triton and of the tuner."""
    with tempfile.TemporaryDirectory(prefix="search-quality-") as folder:
        knobs.put("TRITON_CACHE_DIR", f"{folder}/triton")
        knobs.put("TRITON_DIST_CACHE_DIR", f"{folder}/tuner")
        knobs.put("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "1")  # whatever records are shipped
        for kernel in (kernel_gemm_persistent, kernel_gemm_non_persistent):
            if hasattr(kernel, "device_caches"):  # compiled, not interpreted
                kernel.device_caches.clear()
        yield


def matmul_table(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    device = current_device().torch_device
    for M, N, K in options.shape or SHAPES:
        A = torch.randn(M, K, device=device, dtype=torch.float16)
        B = torch.randn(K, N, device=device, dtype=torch.float16)
        # Racing is last: the models would profit from kernels that racing leaves in memory.
        models = ["surrogate", *(["optuna"] if has_optuna() else [])]
        tuners = {
            **{each: _tuned_by_model(each, options.tries) for each in models},
            "racing": matmul,
        }
        found: dict[str, dict[str, Any]] = {"torch.matmul": {}}
        for name, tuner in tuners.items():
            with empty_caches():
                begin = time.perf_counter()
                record = tuner.tune(A, B)
                seconds = time.perf_counter() - begin
            tried = {"seconds": seconds, "tried": len(record.trials)}
            found[name] = {**tried, "winner": str(record.best)}
            torch.testing.assert_close(tuner(A, B), A @ B, atol=0.5, rtol=2e-2)
        calls: dict[str, Callable[[], Any]] = {
            name: functools.partial(tuner, A, B) for name, tuner in tuners.items()
        }
        times = time_interleaved({**calls, "torch.matmul": functools.partial(torch.matmul, A, B)})
        for name, row in found.items():
            row |= {"shape": [M, N, K], "by": name, "ms": times[name].median}
            rows.append(row)
            tuning_text = (
                f", {row['tried']} tried in {row['seconds']:.1f} s" if "tried" in row else ""
            )
            print(f"{M} x {N} x {K} {name:>12}: {row['ms']:.4f} ms{tuning_text}", flush=True)
    return rows


TABLES = {
    "racing": racing_table,
    "few": few_table,
    "warm-start": warm_start_table,
    "prior": prior_table,
    "matmul": matmul_table,
}


def recorded_spaces(folder: Path) -> list[Path]:
    """Return the recorded spaces of ``folder``.

    Raises:
        SystemExit: if there is no recorded space.
    """
    files = sorted(folder.glob("*_T4.json.gz"))
    if not files:
        raise SystemExit(f"no *_T4.json.gz in {folder}")
    return files


def main(arguments: Sequence[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", choices=TABLES, help="default: all but matmul")
    parser.add_argument("--folder", type=Path, default=DATA, help="folder with recorded spaces")
    parser.add_argument("--draws", type=int, default=30, help="number of tunings for each row")
    parser.add_argument(
        "--configs", type=int, help="racing: number of configs of each space, drawn at random"
    )
    parser.add_argument(
        "--clocks", nargs="+", choices=CLOCKS, help="racing: changes of the clocks; default: all"
    )
    parser.add_argument(
        "--tries", type=int, default=200, help="few, matmul: number of configs that are tried"
    )
    parser.add_argument(
        "--milliseconds", type=float, default=30.0, help="warm-start: device time of a tuning"
    )
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("M", "N", "K"))
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    names = [options.table] if options.table else [name for name in TABLES if name != "matmul"]
    results = {name: TABLES[name](options) for name in names}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__" and knobs.rank.get() == 0:
    main()
