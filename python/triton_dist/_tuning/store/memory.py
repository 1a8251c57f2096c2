"""Records of this process."""

from __future__ import annotations

from collections.abc import Iterator

from triton_dist._tuning.values import Key, TuningRecord


class MemoryStore:
    """A dictionary. Each operation is one step of the interpreter, so threads need no lock."""

    def __init__(self) -> None:
        self._records: dict[Key, TuningRecord] = {}

    def get(self, key: Key) -> TuningRecord | None:
        return self._records.get(key)

    def put(self, record: TuningRecord) -> None:
        self._records[record.key] = record

    def records(self) -> Iterator[TuningRecord]:
        return iter(list(self._records.values()))

    def describe(self, key: Key) -> str:
        return "memory"

    def clear(self) -> None:
        self._records.clear()
