"""Combine several stores into one: memory, the user's files, read-only folders, packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from triton_dist._tuning.protocols import Store
from triton_dist._tuning.values import Key, StoredRecord, TuningRecord


class LayeredStore:
    """Several stores as one. Each store is a layer.

    ``put`` passes a record to all layers. ``find`` yields the records of all layers, in the order
    of the layers. A stale record in the user's files therefore does not hide a valid record in a
    pack.
    """

    def __init__(self, layers: Sequence[Store]) -> None:
        self._layers = tuple(layers)

    def find(self, key: Key) -> Iterator[StoredRecord]:
        return chain.from_iterable(layer.find(key) for layer in self._layers)

    def put(self, record: TuningRecord) -> str:
        locations = [layer.put(record) for layer in self._layers]
        return next(filter(None, reversed(locations)), "")

    def records(self, function: str | None = None) -> Iterator[StoredRecord]:
        return chain.from_iterable(layer.records(function) for layer in self._layers)


_LOCATION = "memory"


class MemoryStore:
    """Records in a dictionary. Its operations are atomic in CPython, so threads need no lock."""

    def __init__(self) -> None:
        self._records: dict[Key, TuningRecord] = {}

    def find(self, key: Key) -> Iterator[StoredRecord]:
        record = self._records.get(key)
        if record is not None:
            yield StoredRecord(record, _LOCATION)

    def put(self, record: TuningRecord) -> str:
        self._records[record.key] = record
        return _LOCATION

    def records(self, function: str | None = None) -> Iterator[StoredRecord]:
        for record in list(self._records.values()):
            if function in (None, record.key.function_name):
                yield StoredRecord(record, _LOCATION)

    def clear(self) -> None:
        self._records.clear()
