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

_MAX_RACED = 12


class TunedOp:
    """The op of ``info`` at ``shape``; ``__init__`` tunes it unless it has a record. Collective.

    Attributes:
        how: sizes from which the tuning was warm-started, or that it was a full tuning.
        first_call: time in ms of the tuning; see ``cost_of``. ``None``: there was a record.
        raced: medians in ms by config of the fastest configs of the tuning. ``None``: as above.
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
        self.how = self._record.warm_started_from or "tuned in full at a size of this range"
        self.first_call = cost_of(self._record, seconds) if tuned_now else None
        fastest = _measured(self._record)[:_MAX_RACED]
        self.raced = {str(t.config): _median(t) for t in fastest} if tuned_now else None
        self.note = f"tuned now, {self._record.seconds:.1f} s" if tuned_now else "from the cache"

    def run(self) -> Any:
        """Call the op with its winner; return the result."""
        return self.info.op(*self._args, **self._kwargs)

    def race_again(self, number: int = 3) -> list[Baseline]:
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
        others = {name: self._candidate(config) for name, config in self._others().items()}
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

    def _others(self) -> dict[str, Any]:
        """Return recorded configs to measure in addition to the winner, by name, fastest first."""
        space, record = self.info.op.config_space, self._record
        configs = (space.find(trial.digest) for trial in _measured(record))
        ranked = [config for config in configs if config is not None]
        if self._selection.per_algorithm:
            return self._best_of_each_algorithm(ranked)
        chosen = self._best_of_all([each for each in ranked if each != self._winner])
        return {f"{self._kind(config)} {n}": config for n, config in enumerate(chosen, start=1)}

    def _best_of_all(self, ranked: list[Any]) -> list[Any]:
        """Return all configs, or the fastest; then add our fastest config if ours are missing."""
        if self._selection.all_measured:
            return ranked
        few = ranked[: self._selection.best]
        if not any(map(self.info.is_our_algorithm, [self._winner, *few])):
            few += [each for each in ranked if self.info.is_our_algorithm(each)][:1]
        return few

    def _best_of_each_algorithm(self, ranked: list[Any]) -> dict[str, Any]:
        """Return the fastest configs of each algorithm, by name; the winner may be one of them."""
        seen: dict[Hashable, int] = {}
        best = {}
        for config in ranked:
            algorithm = self.info.algorithm_and_tunables(config)
            seen[algorithm] = seen.get(algorithm, 0) + 1
            if seen[algorithm] <= self._selection.best:
                best[f"{config['algorithm']} {seen[algorithm]}"] = config
        return best


def _concurrent(baselines: Mapping[str, Baseline]) -> dict[str, Baseline]:
    """Return calls that run the library's GEMM and a transfer at the same time on two streams."""
    gemm = next(each.call for each in baselines.values() if each.kind == "gemm")
    side = torch.cuda.Stream()

    def both(transfer: Callable[[], torch.Tensor]) -> torch.Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            moved = transfer()
        gemm()
        current.wait_stream(side)
        return moved

    # No call takes less time than the GEMM alone, so kind "gemm" leaves the limit unchanged.
    return {
        f"GEMM during {name.removesuffix(' alone')}": Baseline(
            "gemm", functools.partial(both, each.call)
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


def cost_of(record: TuningRecord, seconds: float) -> dict[str, float]:
    """Return the time of a tuning in ms: ``host`` (``seconds``), and ``device`` for all its runs.

    The device time is estimated: a config runs once, then each round has untimed runs and samples.
    Untimed runs of the final are not counted, because a record does not contain its rounds.
    """
    # The policy of the ops.
    policy = Policy.for_device(current_device().name, timing="graph", search="racing")
    totals = tuple(itertools.accumulate(ROUNDS if record.warm_started_from else policy.rounds))
    device = 0.0
    for trial in _measured(record):
        num_samples = len(trial.outcome.samples)
        num_rounds = min(bisect.bisect_left(totals, num_samples) + 1, len(totals))
        device += (1 + num_rounds * policy.untimed_runs + num_samples) * _median(trial)
    return {"host": round(1e3 * seconds, 1), "device": round(device, 2)}


@contextmanager
def open_op(
    info: OpInfo[Any], shape: Hashable, dtype: torch.dtype, selection: CandidateSelection
) -> Iterator[TunedOp]:
    """Context manager that yields one op at one shape, with its own context. Collective."""
    with info.context(shape, dtype) as ctx:
        yield TunedOp(info, shape, dtype, ctx, selection)
