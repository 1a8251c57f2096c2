"""Report a tuning: log lines and a progress bar while it runs, and a table at the end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from triton_dist._tuning.engine.candidates import CandidateSet
from triton_dist._tuning.engine.channel import Clock
from triton_dist._tuning.engine.components import Components
from triton_dist._tuning.values import (
    Config,
    Failure,
    Key,
    Measurement,
    Outcome,
    Request,
    TuningRecord,
)
from triton_dist._tuning.values.analysis import Analysis
from triton_dist._tuning.values.outcome import outcome_tree
from triton_dist._tuning.values.show import error_text, spread
from triton_dist._warn import print_line, printable, warn
from triton_dist.errors import TuningWarning

_logger = logging.getLogger("triton_dist.tuning")
_NOTICEABLE_SECONDS = 0.05
"""Shorter times are not reported, because reports have tenths of a second."""


class Report:
    """Output of one tuning: a log file on every rank; events, printed lines and a progress bar on
    rank 0, the leader."""

    def __init__(self, components: Components, key: Key, clock: Clock) -> None:
        self._components, self._key, self._clock = components, key, clock
        self._is_printing = components.settings.verbose and components.ranks.is_leader
        self._title = f"autotune {key.full_name}, key {key}"
        self._log = components.log(key)
        self._max_configs = 0
        self._medians: dict[str, float] = {}
        self._failed: set[str] = set()
        self._start_seconds, self._seconds_by_phase_before = 0.0, dict(clock.seconds)
        self._default_digest = ""
        self._bar: Any = None
        self._task: Any = None

    def cached(self, record: TuningRecord, location: str, accepted: str) -> None:
        """Report that a record is used, with ``accepted`` differences, and nothing is tuned."""
        note = f" (differences that are accepted: {accepted})" if accepted else ""
        best, origin = record.best, "record"
        if record.is_shipped:
            origin = f"shipped record for {record.fingerprint.hardware['gpu']}"
        self._show(
            f"{self._title}: using the {origin} from {location}{note}: "
            f"{_outcome_text(best.outcome)} {best}"
        )

    def predicted(self, config: Config) -> None:
        """Report a config that was chosen without a measurement."""
        self._show(f"{self._title}: using {config}, which was predicted and not measured")

    @contextmanager
    def begin(self, candidate_set: CandidateSet, reason: str, default: Config) -> Iterator[None]:
        """Context manager around the tuning. It always removes the progress bar."""
        ranks, policy = self._components.ranks, self._components.settings.policy
        self._default_digest = default.digest
        self._max_configs = policy.max_tried(len(candidate_set.candidates))
        self._start_seconds, self._seconds_by_phase_before = (
            time.monotonic(),
            dict(self._clock.seconds),
        )
        line = (
            f"{self._title}: {reason}; tuning {candidate_set.count_text(policy)} "
            f"on {ranks.size} rank{'' if ranks.size == 1 else 's'}"
        )
        self._show(line)
        self._log.line(f"rank {ranks.global_rank(ranks.rank)}: {line}")
        self._event(
            "begin",
            function=self._key.full_name,
            key=str(self._key),
            hardware=self._key.hardware,
            ranks=ranks.size,
            candidates=len(candidate_set.candidates),
            default=self._default_digest,
            pruned=len(candidate_set.pruned),
            reason=reason,
            policy=dict(policy.fingerprint_fields()),
        )
        with suppress(OSError, ValueError):  # standard error is closed
            if self._is_printing and sys.stderr is not None and sys.stderr.isatty():
                self._bar = _bar()
                self._task = self._bar.add_task("", total=self._max_configs)
                self._bar.start()
        try:
            yield
        except BaseException as error:
            text = error_text(error)
            self._event("ended", error=text, **self._durations())
            self._log.line(f"ended by {text}")
            self._log.close()
            raise
        finally:
            if self._bar is not None:
                with suppress(OSError, ValueError):
                    self._bar.stop()
                self._bar = None

    def trying(self, label: str, request: Request) -> None:
        """Write the config to the log before it runs. If the rank hangs, the last line shows it."""
        self._log.line(f"[{label}] {request.num_samples} samples of {request.config}")

    def tried(
        self, label: str, request: Request, outcome: Outcome, config_outcome: Outcome
    ) -> None:
        """Report the outcome of a request, and the combined outcome of the config."""
        config = request.config
        self._log.line(f"[{label}] {_outcome_text(outcome)}")
        self._event(
            "outcome",
            label=label,
            config=config.digest,
            shown=str(config),
            asked=request.num_samples,
            **outcome_tree(outcome),
        )
        new = config.digest not in self._medians and config.digest not in self._failed
        if isinstance(config_outcome, Measurement):
            self._medians[config.digest] = config_outcome.median
        else:
            self._medians.pop(config.digest, None)
            self._failed.add(config.digest)
        # A race requests samples of a config in several rounds. Show the first, and any failure.
        if new or isinstance(outcome, Failure):
            text = (
                f"  [{label}] {_outcome_text(config_outcome)} {config}  ({self._progress_text()})"
            )
            self._show(text, logging.DEBUG)
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.update(self._task, advance=int(new), description=self._progress_text())

    def tuned(self, record: TuningRecord, location: str) -> None:
        """Report the winner and a summary. ``location`` is the location of the record."""
        best = record.best
        failed = sum(isinstance(trial.outcome, Failure) for trial in record.trials)
        if self._components.ranks.is_leader:
            warn_of_failures(self._title, record, "autotune_verbose=True shows each")
        line = (
            f"{self._title}: best of {len(record.trials) - failed} measured ({failed} failed or "
            f"pruned) in {record.seconds:.1f} s: {_outcome_text(best.outcome)} {best}"
            + (f"; kept in {location}" if location else "")
        )
        phases = self._phases(time.monotonic() - self._start_seconds)
        earlier = record.seconds - sum(phases.values())
        if earlier > _NOTICEABLE_SECONDS:
            phases["earlier starts"] = earlier
        for text in [*summary(record, self._default_digest, phases), line]:
            self._show(text)
            self._log.line(text)
        self._event(
            "winner",
            config=best.digest,
            shown=str(best),
            record=location,
            **outcome_tree(best.outcome),
            **self._durations(),
        )
        self._log.close()

    def _progress_text(self) -> str:
        best = f"best {min(self._medians.values()):.4f} ms" if self._medians else "none measured"
        failed = f", {len(self._failed)} failed" if self._failed else ""
        done = len(self._medians) + len(self._failed)
        remaining = (
            (time.monotonic() - self._start_seconds) / max(done, 1) * (self._max_configs - done)
        )
        left = f", {remaining:.0f} s left" if done < self._max_configs else ""
        return f"{best}{failed}{left}"

    def _durations(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._start_seconds
        phases = {name: round(each, 3) for name, each in self._phases(seconds).items()}
        return {"seconds": round(seconds, 3), "phases": phases}

    def _phases(self, total: float) -> dict[str, float]:
        """Return the seconds by phase since ``begin``. ``other`` is the rest of ``total``."""
        phases: dict[str, float] = {
            name: seconds - self._seconds_by_phase_before[name]
            for name, seconds in self._clock.seconds.items()
        }
        return {**phases, "other": max(0.0, total - sum(phases.values()))}

    def _event(self, name: str, **fields: Any) -> None:
        if self._components.ranks.is_leader:
            self._log.event(name, **fields)

    def _show(self, text: str, level: int = logging.INFO) -> None:
        # A handler of the user or the progress bar may write to a closed standard error.
        with suppress(OSError, ValueError):
            if self._components.ranks.is_leader:
                _logger.log(level, "%s", text)
        if self._is_printing and self._bar is None:
            print_line(text)
        elif self._is_printing:
            with suppress(OSError, ValueError):
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _bar() -> Any:
    # The import is slow, so import only to draw a bar.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
    )


def _outcome_text(outcome: Outcome) -> str:
    if isinstance(outcome, Failure):
        return f"failed, {one_line(str(outcome))}:"
    return f"{outcome.median:.4f} ms"


_NUM_LISTED_CONFIGS = 5
_NUM_LISTED_PRUNED = 20
"""Maximum number of pruned configs that a summary lists."""
_LEGEND = (
    "  to best, to default: time relative to the fastest config and to the first config of the "
    "space; spread: interquartile range relative to the median"
)


def summary(record: TuningRecord, default: str, phases: Mapping[str, float]) -> list[str]:
    """Return the lines of a table with the fastest configs, the winner, the default, and failures.

    ``default`` is the digest of the first config of the space. ``phases`` has seconds by phase.
    """
    analysis, best = Analysis(record), record.best.digest
    fastest = analysis.timed[0].ms
    default_ms = next((each.ms for each in analysis.timed if each.trial.digest == default), None)
    lines = [f"  {'ms':>10} {'spread':>7} {'to best':>8} {'to default':>10} {'samples':>7}  config"]
    for index, (trial, _, ms, samples) in enumerate(analysis.timed):
        marks = [name for name, d in (("winner", best), ("default", default)) if d == trial.digest]
        if index < _NUM_LISTED_CONFIGS or marks:
            note = f"  <- {', '.join(marks)}" if marks else ""
            lines.append(
                f"  {ms:10.4f} {spread(samples):>7} {_ratio(ms, fastest):>8} "
                f"{_ratio(ms, default_ms):>10} {len(samples):>7}  {trial}{note}"
            )
    if len(analysis.timed) > len(lines) - 1:
        lines.append(f"  and {len(analysis.timed) - len(lines) + 1} more")
    by_rank = record.times_by_rank.get(best)
    lines += [] if by_rank is None else [f"  the winner by rank: {by_rank}"]
    pruned = [f"  pruned: {config}, {one_line(reason)}" for config, reason in analysis.pruned]
    lines += [_LEGEND, *pruned[:_NUM_LISTED_PRUNED]]
    if len(pruned) > _NUM_LISTED_PRUNED:
        lines.append(f"  and {len(pruned) - _NUM_LISTED_PRUNED} more were pruned")
    for each in analysis.failed:
        lines.append(f"  {each.count} x {each.kind}, the first: {one_line(each.first)}")
    lines += [
        f"  {number} x pruned: {reason}" for reason, number in record.num_pruned_by_reason.items()
    ]
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
    return [*lines, f"  of {record.seconds:.1f} s: {spent}"]


def warn_of_failures(title: str, record: TuningRecord, remedy: str) -> None:
    """Warn, beginning with ``title`` and ending with ``remedy``, if most tried configs failed."""
    outcomes = [(trial, trial.outcome) for trial in record.trials]
    failures = [(trial, each) for trial, each in outcomes if isinstance(each, Failure)]
    failures = [(trial, each) for trial, each in failures if each.kind != "pruned"]
    tried = len(failures) + sum(isinstance(each, Measurement) for _, each in outcomes)
    if 2 * len(failures) > tried:
        trial, failure = failures[0]
        warn(
            f"{title}: {len(failures)} of {tried} configs failed, the first, {trial}: "
            f"{one_line(str(failure))}. The best of the others is used; {remedy}",
            TuningWarning,
        )


def _ratio(time: float, other: float | None) -> str:
    return f"{time / other:.3f}x" if other else "-"


def one_line(text: str) -> str:
    """Return ``text`` as one line, cut off after 160 characters."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= 160 else f"{text[:160]} ..."
