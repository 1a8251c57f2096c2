"""Several stores as one, from near to far: memory, the user's files, read-only folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from triton_dist._tuning.protocols import Store
from triton_dist._tuning.values import Key, StoredRecord, TuningRecord


class LayeredStore:
    """Several stores as one: records are put into all layers, and found in the nearest first.

    A record that cannot be used hides none that can: a stale one of the user's does not stand
    before a valid one that was shipped.
    """

    def __init__(self, layers: Sequence[Store]) -> None:
        self._layers = tuple(layers)

    def find(self, key: Key) -> Iterator[StoredRecord]:
        return chain.from_iterable(layer.find(key) for layer in self._layers)

    def put(self, record: TuningRecord) -> str:
        places = [layer.put(record) for layer in self._layers]
        return next(filter(None, reversed(places)), "")

    def records_of(self, key: Key) -> Iterator[StoredRecord]:
        return chain.from_iterable(layer.records_of(key) for layer in self._layers)

    def records(self) -> Iterator[StoredRecord]:
        return chain.from_iterable(layer.records() for layer in self._layers)


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
