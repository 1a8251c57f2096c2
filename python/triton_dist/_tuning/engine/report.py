"""What the leader says while it tunes: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from triton_dist._tuning.values import Config, Failure, Key, Outcome, TuningRecord


class Report:
    """Says nothing unless ``enabled``.

    Used as a context manager around the candidates, so that the bar is taken down whatever happens.
    """

    def __init__(self, enabled: bool, key: Key) -> None:
        self._enabled = enabled
        self._title = f"autotune {key.function}, key {key}"
        self._best = float("inf")
        self._bar: Any = None
        self._task: Any = None

    def cached(self, record: TuningRecord, where: str, tolerated: str) -> None:
        """A record is used and nothing is tuned."""
        note = f" (although {tolerated})" if tolerated else ""
        best = record.best
        self._line(
            f"{self._title}: using the cached result from {where}{note}: {_ms(best.outcome)} {best}"
        )

    def begin(self, candidates: int, pruned: int, ranks: int, reason: str) -> Report:
        self._line(
            f"{self._title}: {reason}; tuning {candidates} configs ({pruned} pruned) "
            f"on {ranks} rank{'' if ranks == 1 else 's'}"
        )
        if self._enabled and sys.stdout.isatty():
            # Imported only where a bar is drawn: it takes longer than all else here.
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._task = self._bar.add_task("", total=candidates)
        return self

    def __enter__(self) -> Report:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tried(self, label: str, config: Config, outcome: Outcome) -> None:
        """One candidate is done."""
        if not isinstance(outcome, Failure):
            self._best = min(self._best, outcome.median)
        self._line(f"  [{label}] {_ms(outcome)} {config}")
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=f"best {self._best:.4f} ms")

    def tuned(self, record: TuningRecord, where: str) -> None:
        failed = sum(isinstance(trial.outcome, Failure) for trial in record.trials)
        best = record.best
        self._line(
            f"{self._title}: best of {len(record.trials) - failed} measured ({failed} failed or "
            f"pruned) in {record.seconds:.1f} s: {_ms(best.outcome)} {best}; kept in {where}"
        )

    def _line(self, text: str) -> None:
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)


def _ms(outcome: Outcome) -> str:
    return f"failed, {outcome}:" if isinstance(outcome, Failure) else f"{outcome.median:.4f} ms"
