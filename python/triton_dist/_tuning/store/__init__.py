"""Store tuning records, journals and logs: in memory, in folders, and in packs."""

from triton_dist._tuning.store.beside import (
    Interrupted,
    foreign,
    interrupted,
    is_held,
    places,
    removable,
)
from triton_dist._tuning.store.file import FileStore
from triton_dist._tuning.store.journal import FileJournal
from triton_dist._tuning.store.layered import LayeredStore, MemoryStore
from triton_dist._tuning.store.log import FileLog, StepLog, events_of, rank_steps
from triton_dist._tuning.store.packs import PackStore
from triton_dist._tuning.store.readonly import ReadOnlyStore

__all__ = [
    "FileJournal",
    "FileLog",
    "FileStore",
    "Interrupted",
    "LayeredStore",
    "MemoryStore",
    "PackStore",
    "ReadOnlyStore",
    "StepLog",
    "events_of",
    "foreign",
    "interrupted",
    "is_held",
    "places",
    "rank_steps",
    "removable",
]
