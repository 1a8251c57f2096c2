"""Candidates to time for an op with an OpInfo: the tuner's winner, other configs, baselines."""

from __future__ import annotations

import bisect
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from triton_dist._tuning.search.short_race import ROUNDS
from triton_dist._tuning.values import Measurement, Policy, Trial, TuningRecord
from triton_dist.runtime.device import current_device
from triton_dist.testing.opinfo.base import Baseline, OpInfo

from .workload import TUNED, TUNED_AGAIN, CandidateSelection

_MAX_TUNING_MEDIANS = 12


class TunedOp:
    """The op of ``info`` at ``shape``; ``__init__`` tunes it unless it has a record. Collective.

    Attributes:
        origin: sizes from which the tuning was warm-started, or that it was a full tuning.
        first_call_ms: time in ms of the tuning; see ``tuning_cost``. ``None``: there was a record.
        tuning_medians: medians in ms of the fastest configs of the tuning. ``None``: as above.
    """

    def __init__(
        self,
        info: OpInfo[Any],
        shape: Hashable,
        dtype: torch.dtype,
        ctx: Any,
        selection: CandidateSelection,
    ) -> None:
        size = dist.get_world_size()
        self.info, self.serial = info, info.serial_name
        self.tolerance = info.tolerance(dtype, size)
        self.cost = info.cost(shape, dtype, size)
        self._ctx, self._selection = ctx, selection
        self._operands = info.operands(shape, dtype, size)
        self._args, self._kwargs = info.arguments(self._operands, ctx)
        before, begin = info.op.num_tunings, time.perf_counter()
        self._record = info.op.tune(*self._args, **self._kwargs)
        seconds = time.perf_counter() - begin
        self._winner = info.op.best_config(*self._args, **self._kwargs)
        tuned_now = info.op.num_tunings > before
        self.origin = self._record.warm_started_from or "tuned in full at a size of this range"
        self.first_call_ms = tuning_cost(self._record, seconds) if tuned_now else None
        fastest = _measured(self._record)[:_MAX_TUNING_MEDIANS]
        self.tuning_medians = {str(t.config): _median(t) for t in fastest} if tuned_now else None
        self.note = f"tuned now, {self._record.seconds:.1f} s" if tuned_now else "from the cache"

    def run(self) -> Any:
        """Call the op with its winner; return the result."""
        return self.info.op(*self._args, **self._kwargs)

    def tune_again(self, number: int = 3) -> list[Baseline]:
        """Tune again without keeping the record; return the winner and the next fastest configs."""
        op = self.info.op
        op.clear()
        record = op.tune(*self._args, **self._kwargs)
        op.clear()
        fastest = sorted(_measured(record), key=lambda trial: trial.digest != record.best.digest)
        configs = (op.config_space.find(trial.digest) for trial in fastest[:number])
        return [self._candidate(config) for config in configs if config is not None]

    def candidates(self) -> Mapping[str, Baseline]:
        winner = self._candidate(self._winner)
        others = {name: self._candidate(config) for name, config in self._other_configs().items()}
        baselines = self.info.baselines(self._operands, self._ctx)
        if self._selection.concurrent:
            baselines |= _concurrent(baselines)
        return {**baselines, TUNED: winner, **others, TUNED_AGAIN: winner}

    def refresh(self) -> None:
        self.info.refill(self._operands, dist.get_world_size())

    def recover(self) -> None:
        self.info.recover(self._ctx)

    def _candidate(self, config: Mapping[str, Any]) -> Baseline:
        return Baseline(
            self._kind(config),
            functools.partial(self.info.op.fn, *self._args, **self._kwargs, **config),
            lambda: self.info.reference(self._operands),
            str(config),
        )

    def _kind(self, config: Mapping[str, Any]) -> Any:
        return "own" if self.info.is_our_algorithm(config) else "library"

    def _other_configs(self) -> dict[str, Any]:
        """Return recorded configs to measure in addition to the winner, by name, fastest first."""
        space, record = self.info.op.config_space, self._record
        configs = (space.find(trial.digest) for trial in _measured(record))
        ranked = [config for config in configs if config is not None]
        if self._selection.per_algorithm:
            return self._best_of_each_algorithm(ranked)
        others = self._best_of_all([each for each in ranked if each != self._winner])
        return {f"{self._kind(config)} {n}": config for n, config in enumerate(others, start=1)}

    def _best_of_all(self, ranked: list[Any]) -> list[Any]:
        """Return all configs, or the fastest; then add our fastest config if ours are missing."""
        if self._selection.all_measured:
            return ranked
        chosen = ranked[: self._selection.best]
        if not any(map(self.info.is_our_algorithm, [self._winner, *chosen])):
            chosen += [each for each in ranked if self.info.is_our_algorithm(each)][:1]
        return chosen

    def _best_of_each_algorithm(self, ranked: list[Any]) -> dict[str, Any]:
        """Return the fastest configs of each algorithm, by name; the winner may be one of them."""
        counts: dict[Hashable, int] = {}
        best = {}
        for config in ranked:
            algorithm = self.info.algorithm_and_tunables(config)
            counts[algorithm] = counts.get(algorithm, 0) + 1
            if counts[algorithm] <= self._selection.best:
                best[f"{config['algorithm']} {counts[algorithm]}"] = config
        return best


def _concurrent(baselines: Mapping[str, Baseline]) -> dict[str, Baseline]:
    """Return calls that run the library's GEMM and a transfer at the same time on two streams."""
    gemm = next(each.call for each in baselines.values() if each.kind == "gemm")
    side_stream = torch.cuda.Stream()

    def gemm_and_transfer(transfer: Callable[[], torch.Tensor]) -> torch.Tensor:
        current = torch.cuda.current_stream()
        side_stream.wait_stream(current)
        with torch.cuda.stream(side_stream):
            transferred = transfer()
        gemm()
        current.wait_stream(side_stream)
        return transferred

    # No call takes less time than the GEMM alone, so kind "gemm" leaves the limit unchanged.
    return {
        f"GEMM during {name.removesuffix(' alone')}": Baseline(
            "gemm", functools.partial(gemm_and_transfer, each.call)
        )
        for name, each in baselines.items()
        if each.kind == "transfer"
    }


def _measured(record: TuningRecord) -> list[Trial]:
    """Return the trials that have times, fastest first."""
    measured = [trial for trial in record.trials if isinstance(trial.outcome, Measurement)]
    return sorted(measured, key=_median)


def _median(trial: Trial) -> float:
    assert isinstance(trial.outcome, Measurement)
    return trial.outcome.median


def tuning_cost(record: TuningRecord, seconds: float) -> dict[str, float]:
    """Return the time of a tuning in ms: ``host`` (``seconds``), and ``device`` for all its runs.

    The device time is estimated: a config runs once, then each round has untimed runs and samples.
    Untimed runs of the final are not counted, because a record does not contain its rounds.
    """
    # The policy of the ops.
    policy = Policy.for_device(current_device().name, timing="graph", search="racing")
    total_samples = tuple(
        itertools.accumulate(ROUNDS if record.warm_started_from else policy.rounds)
    )
    device = 0.0
    for trial in _measured(record):
        num_samples = len(trial.outcome.samples)
        num_rounds = min(bisect.bisect_left(total_samples, num_samples) + 1, len(total_samples))
        device += (1 + num_rounds * policy.untimed_runs + num_samples) * _median(trial)
    return {"host": round(1e3 * seconds, 1), "device": round(device, 2)}


@contextmanager
def open_op(
    info: OpInfo[Any], shape: Hashable, dtype: torch.dtype, selection: CandidateSelection
) -> Iterator[TunedOp]:
    """Context manager that yields one op at one shape, with its own context. Collective."""
    with info.context(shape, dtype) as ctx:
        yield TunedOp(info, shape, dtype, ctx, selection)
