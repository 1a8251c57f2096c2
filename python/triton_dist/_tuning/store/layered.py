"""Several stores as one: the first that has a record answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from triton_dist._tuning.protocols import Store
from triton_dist._tuning.values import Key, TuningRecord


class LayeredStore:
    """Stores from near to far, such as memory over files. What is put goes into all of them."""

    def __init__(self, layers: Sequence[Store]) -> None:
        self._layers = tuple(layers)

    def get(self, key: Key) -> TuningRecord | None:
        found = (layer.get(key) for layer in self._layers)
        return next((record for record in found if record is not None), None)

    def put(self, record: TuningRecord) -> None:
        for layer in self._layers:
            layer.put(record)

    def records(self) -> Iterator[TuningRecord]:
        """Each key once, from the nearest store that has it."""
        seen: set[Key] = set()
        for layer in self._layers:
            for record in layer.records():
                if record.key not in seen:
                    seen.add(record.key)
                    yield record

    def describe(self, key: Key) -> str:
        """The farthest store that has ``key``: where the record lasts longest."""
        holders = (layer for layer in reversed(self._layers) if layer.get(key) is not None)
        return next(holders, self._layers[-1]).describe(key)
