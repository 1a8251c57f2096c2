"""Notices a constant that has another value at each start: its function would be tuned for ever."""

from __future__ import annotations

import datetime

from triton_dist._tuning.values import Fingerprint, TuningRecord

_begin = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
_used: set[str] = set()
"""Digests of the records that functions of this process use."""


class Restless:
    """Warning about a function that is tuned although an earlier start has tuned it."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._seen: list[tuple[TuningRecord, list[str]]] = []

    def is_used(self, record: TuningRecord) -> None:
        _used.add(record.digest)

    def look(self, record: TuningRecord, now: Fingerprint) -> None:
        """At a record that is not valid ``now``."""
        differences = [each for each in record.fingerprint.compare(now) if not each.patch_level]
        if differences and all(each.constant for each in differences):
            self._seen.append((record, [each.sentence for each in differences]))

    @property
    def advice(self) -> str:
        """Empty, unless all that an earlier start knew was different in such values."""
        earlier = [
            (record, sentences)
            for record, sentences in self._seen
            if _is_of_earlier_start(record.timestamp) and record.digest not in _used
        ]
        if not earlier:
            return ""
        sentence = "; ".join(earlier[-1][1])
        return (
            f"{self._function} was tuned again, because of {sentence}. If that is another value at "
            "each start, it is tuned at each start: name it in ignore=(...) of autotune, or do "
            "not bind it"
        )


def _is_of_earlier_start(timestamp: str) -> bool:
    try:
        return datetime.datetime.fromisoformat(timestamp) < _begin
    except (ValueError, TypeError):  # no time, or one without a zone
        return False
