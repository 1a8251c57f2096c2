"""Records of this process."""

from __future__ import annotations

from collections.abc import Iterator

from triton_dist._tuning.values import Key, StoredRecord, TuningRecord

_WHERE = "memory"


class MemoryStore:
    """A dictionary. Each operation is one step of the interpreter, so threads need no lock."""

    def __init__(self) -> None:
        self._records: dict[Key, TuningRecord] = {}

    def find(self, key: Key) -> Iterator[StoredRecord]:
        record = self._records.get(key)
        if record is not None:
            yield StoredRecord(record, _WHERE)

    def put(self, record: TuningRecord) -> str:
        self._records[record.key] = record
        return _WHERE

    def records(self) -> Iterator[StoredRecord]:
        return iter([StoredRecord(record, _WHERE) for record in list(self._records.values())])

    def records_of(self, key: Key) -> Iterator[StoredRecord]:
        return (each for each in self.records() if each.record.key.function == key.function)

    def clear(self) -> None:
        self._records.clear()
