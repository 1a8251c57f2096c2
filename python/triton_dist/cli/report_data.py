"""Data that ``triton-dist report`` shows of a record."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from triton_dist._tuning.store import events_of
from triton_dist._tuning.values import StoredRecord
from triton_dist._tuning.values.analysis import Analysis, Changes


class Answer(NamedTuple):
    """One measurement in the course of a tuning."""

    seconds: float
    """Since the tuning began."""
    ms: float


@dataclass(frozen=True)
class Subject:
    """A record to be drawn, and an older one to compare it with."""

    stored: StoredRecord
    older: StoredRecord | None

    @cached_property
    def found(self) -> Analysis:
        return Analysis(self.stored.record)

    @cached_property
    def changes(self) -> Changes | None:
        return self.older and Changes.of(self.older.record, self.stored.record)

    @cached_property
    def answers(self) -> Sequence[Answer]:
        """In their order; empty if the log is gone, or the record shipped."""
        found: list[Answer] = []
        for event in self._events:
            with suppress(KeyError, TypeError, ValueError):
                if event["event"] == "outcome" and "samples" in event:
                    passed = _time(event) - _time(self._events[0])
                    found.append(Answer(passed.total_seconds(), float(event["ms"])))
        return found

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by what they were spent on, as far as the log says."""
        phases = self._events[-1].get("phases") if self._events else None
        return phases if isinstance(phases, dict) else {}

    @cached_property
    def _events(self) -> list[dict[str, Any]]:
        record, where = self.stored
        return [] if record.shipped else events_of(Path(where), record.best.digest)


def _time(event: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(event["time"])
