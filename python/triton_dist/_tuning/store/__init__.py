"""Stores of tuning records."""

from triton_dist._tuning.store.beside import (
    Interrupted,
    interrupted,
    is_held,
    places,
    remove_tuning,
)
from triton_dist._tuning.store.file import FileStore
from triton_dist._tuning.store.journal import FileJournal
from triton_dist._tuning.store.layered import LayeredStore
from triton_dist._tuning.store.log import FileLog, StepLog
from triton_dist._tuning.store.memory import MemoryStore
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
    "interrupted",
    "is_held",
    "places",
    "remove_tuning",
]
