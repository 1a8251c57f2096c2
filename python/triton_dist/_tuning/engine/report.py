"""Reports while a tuning goes on: to the leader's logger and terminal, and to all ranks' logs."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from triton_dist._tuning.engine.clock import Clock
from triton_dist._tuning.engine.field import Field
from triton_dist._tuning.engine.parts import Parts
from triton_dist._tuning.engine.summary import one_line, summary, warn_of_failures
from triton_dist._tuning.values import (
    Config,
    Failure,
    Key,
    Measurement,
    Outcome,
    Request,
    TuningRecord,
)
from triton_dist._tuning.values.outcome import outcome_tree
from triton_dist._tuning.values.show import said
from triton_dist._warn import print_line

_logger = logging.getLogger("triton_dist.tuning")
_NOTICEABLE_SECONDS = 0.05
"""Lines show tenths of a second."""


class Report:
    """Prints nothing on ranks that are not the leader, and nothing unless asked to; logs anyway.

    Used as a context manager around the candidates, so that the bar is taken down whatever happens.
    """

    def __init__(self, parts: Parts, key: Key, clock: Clock) -> None:
        self._parts, self._key, self._clock = parts, key, clock
        self._aloud = parts.settings.verbose and parts.ranks.is_leader
        self._title = f"autotune {key.full_name}, key {key}"
        self._log = parts.log(key)
        self._total = 0
        self._medians: dict[str, float] = {}
        self._failed: set[str] = set()
        self._begin, self._clock_before = 0.0, dict(clock.seconds)
        self._default = ""
        self._bar: Any = None
        self._task: Any = None

    def cached(self, record: TuningRecord, where: str, tolerated: str) -> None:
        """A record is used and nothing is tuned."""
        note = f" (although {tolerated})" if tolerated else ""
        best, kind = record.best, "record"
        if record.shipped:
            kind = f"shipped record for {record.fingerprint.hardware['gpu']}"
        self._say(f"{self._title}: using the {kind} from {where}{note}: {_ms(best.outcome)} {best}")

    def begin(self, field: Field, reason: str, default: Config) -> Report:
        ranks, policy, self._default = (
            self._parts.ranks,
            self._parts.settings.policy,
            default.digest,
        )
        self._total = policy.most_tried(len(field.candidates))
        self._begin, self._clock_before = time.monotonic(), dict(self._clock.seconds)
        line = (
            f"{self._title}: {reason}; tuning {field.shown(policy)} "
            f"on {ranks.size} rank{'' if ranks.size == 1 else 's'}"
        )
        self._say(line)
        self._log.line(f"rank {ranks.named(ranks.rank)}: {line}")
        self._event(
            "begin",
            function=self._key.full_name,
            key=str(self._key),
            hardware=self._key.hardware,
            ranks=ranks.size,
            candidates=len(field.candidates),
            pruned=field.pruned,
            reason=reason,
            policy=dict(policy.facts()),
        )
        with suppress(OSError, ValueError):  # standard error is closed
            if self._aloud and sys.stderr is not None and sys.stderr.isatty():
                self._bar = _bar()
                self._task = self._bar.add_task("", total=self._total)
        return self

    def __enter__(self) -> Report:
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.stop()
            self._bar = None
        if error is not None:
            text = said(error)
            self._event("ended", error=text, **self._spent())
            self._log.line(f"ended by {text}")
            self._log.close()

    def trying(self, label: str, request: Request) -> None:
        """The last line of a rank's log says what the rank is at."""
        self._log.line(f"[{label}] {request.samples} samples of {request.config}")

    def tried(self, label: str, request: Request, outcome: Outcome, together: Outcome) -> None:
        """One request is answered; ``together`` is what is known of its config now."""
        config = request.config
        self._log.line(f"[{label}] {_ms(outcome)}")
        self._event(
            "outcome",
            label=label,
            config=config.digest,
            shown=str(config),
            asked=request.samples,
            **outcome_tree(outcome),
        )
        new = config.digest not in self._medians and config.digest not in self._failed
        if isinstance(together, Measurement):
            self._medians[config.digest] = together.median
        else:
            self._medians.pop(config.digest, None)
            self._failed.add(config.digest)
        if new or isinstance(outcome, Failure):
            text = f"  [{label}] {_ms(together)} {config}  ({self._so_far()})"
            self._say(text, logging.DEBUG)
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.update(self._task, advance=int(new), description=self._so_far())

    def tuned(self, record: TuningRecord, where: str) -> None:
        best = record.best
        failed = sum(isinstance(trial.outcome, Failure) for trial in record.trials)
        if self._parts.ranks.is_leader:
            warn_of_failures(self._title, record, "autotune_verbose=True shows each")
        line = (
            f"{self._title}: best of {len(record.trials) - failed} measured ({failed} failed or "
            f"pruned) in {record.seconds:.1f} s: {_ms(best.outcome)} {best}"
            + (f"; kept in {where}" if where else "")
        )
        phases = self._phases(time.monotonic() - self._begin)
        earlier = record.seconds - sum(phases.values())
        if earlier > _NOTICEABLE_SECONDS:
            phases["earlier starts"] = earlier
        for text in [*summary(record, self._default, phases), line]:
            self._say(text)
            self._log.line(text)
        self._event(
            "winner",
            config=best.digest,
            shown=str(best),
            record=where,
            **outcome_tree(best.outcome),
            **self._spent(),
        )
        self._log.close()

    def _so_far(self) -> str:
        best = f"best {min(self._medians.values()):.4f} ms" if self._medians else "none measured"
        failed = f", {len(self._failed)} failed" if self._failed else ""
        done = len(self._medians) + len(self._failed)
        left = (time.monotonic() - self._begin) / max(done, 1) * (self._total - done)
        return f"{best}{failed}, {left:.0f} s left" if done < self._total else f"{best}{failed}"

    def _spent(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._begin
        phases = {name: round(each, 3) for name, each in self._phases(seconds).items()}
        return {"seconds": round(seconds, 3), "phases": phases}

    def _phases(self, total: float) -> dict[str, float]:
        """Seconds by phase since ``begin``, which took ``total``; the rest is ``other``."""
        phases: dict[str, float] = {
            name: seconds - self._clock_before[name]
            for name, seconds in self._clock.seconds.items()
        }
        return {**phases, "other": max(0.0, total - sum(phases.values()))}

    def _event(self, name: str, **facts: Any) -> None:
        if self._parts.ranks.is_leader:
            self._log.event(name, **facts)

    def _say(self, text: str, level: int = logging.INFO) -> None:
        # A handler of the user, or the bar, may write to a standard error that is closed.
        with suppress(OSError, ValueError):
            if self._parts.ranks.is_leader:
                _logger.log(level, "%s", text)
        if self._aloud and self._bar is None:
            print_line(text)
        elif self._aloud:
            with suppress(OSError, ValueError):
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _bar() -> Any:
    # Imported only where a bar is drawn: it takes longer than all else here.
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


def _ms(outcome: Outcome) -> str:
    if isinstance(outcome, Failure):
        return f"failed, {one_line(str(outcome))}:"
    return f"{outcome.median:.4f} ms"
