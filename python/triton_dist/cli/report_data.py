"""Collect the data of one record for a report: analysis, default config, and logged events."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from triton_dist._tuning.store import finished_tunings_in_log
from triton_dist._tuning.values import StoredRecord, codec
from triton_dist._tuning.values.analysis import Analysis, Changes, MeasuredTrial


class LoggedMeasurement(NamedTuple):
    """One measurement of a tuning."""

    seconds: float
    """Time since the start of the tuning."""
    ms: float
    config: str
    """Digest of the config."""


class PastTuning(NamedTuple):
    """One finished tuning of a key."""

    time: str
    """End of the tuning, UTC, ISO 8601."""
    ms: float
    seconds: float
    reason: str
    """Why the key was tuned."""
    winner: str


@dataclass(frozen=True)
class ReportedRecord:
    """A record in a report, and an older record to compare with."""

    stored: StoredRecord
    older: StoredRecord | None = None

    @cached_property
    def analysis(self) -> Analysis:
        return Analysis(self.stored.record)

    @cached_property
    def changes(self) -> Changes | None:
        return self.older and Changes.of(self.older.record, self.stored.record)

    @property
    def page_name(self) -> str:
        """File name of the record's page. It stays the same when the key is tuned again."""
        key = self.stored.record.key
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", key.function_name)[:80]
        return f"{name}-{codec.digest(key.digest, self.stored.location)[:12]}.html"

    @cached_property
    def default(self) -> MeasuredTrial | None:
        """The default config (the first of the space); ``None`` if unknown or not measured."""
        record, events = self.stored.record, self._events
        digest = events[0].get("default") if events else None
        limited = {"max_seconds", "max_trials", "tries"} & record.fingerprint.policy.keys()
        is_partial = (
            limited
            or record.warm_started_from
            or record.num_pruned_by_reason
            or self.analysis.pruned
        )
        if digest is None and not record.is_shipped and not is_partial:
            digest = record.trials[0].digest  # every config was tried, in the order of the space
        return next((each for each in self.analysis.timed if each.trial.digest == digest), None)

    @property
    def speed_up(self) -> float | None:
        """Time of the default config divided by the time of the winner."""
        return self.default and self.analysis.ratio(self.default.ms)

    @cached_property
    def measurements(self) -> Sequence[LoggedMeasurement]:
        """The measurements in order; empty if the log is missing or the record is shipped."""
        found: list[LoggedMeasurement] = []
        for event in self._events:
            with suppress(KeyError, TypeError, ValueError):
                if event["event"] == "outcome" and "samples" in event:
                    passed = (_time(event) - _time(self._events[0])).total_seconds()
                    found.append(
                        LoggedMeasurement(passed, float(event["ms"]), str(event.get("config")))
                    )
        return found

    @property
    def phases(self) -> dict[str, float]:
        """Seconds spent in each phase; empty if the log has no phases."""
        phases = self._events[-1].get("phases") if self._events else None
        return phases if isinstance(phases, dict) else {}

    @cached_property
    def history(self) -> Sequence[PastTuning]:
        """The finished tunings of the key, oldest first; at least the tuning of the record."""
        found: list[PastTuning] = []
        for first, *_, last in self._tunings:
            with suppress(KeyError, TypeError, ValueError):
                reason = str(first["reason"]).replace(f" in {self.stored.location}", "")
                times = _time(last).isoformat(), float(last["ms"]), float(last["seconds"])
                found.append(PastTuning(*times, reason, str(last["shown"])))
        record, ms = self.stored.record, self.analysis.winner.ms
        return found or [PastTuning(record.timestamp, ms, record.seconds, "", str(record.best))]

    @cached_property
    def _tunings(self) -> Sequence[Sequence[Mapping[str, Any]]]:
        record, location = self.stored
        return [] if record.is_shipped else finished_tunings_in_log(Path(location))

    @cached_property
    def _events(self) -> Sequence[Mapping[str, Any]]:
        """The logged events of the tuning that made the record. The log may also contain other
        tunings of the key."""
        best = self.stored.record.best.digest
        matching = (each for each in reversed(self._tunings) if each[-1].get("config") == best)
        return next(matching, [])


def _time(event: Mapping[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(event["time"])
