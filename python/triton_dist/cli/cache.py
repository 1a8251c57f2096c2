"""Contents of the cache."""

from __future__ import annotations

from collections.abc import Iterator

from triton_dist import knobs
from triton_dist._archive import pack_places
from triton_dist._tuning.protocols import Store
from triton_dist._tuning.store import (
    FileStore,
    Interrupted,
    LayeredStore,
    PackStore,
    ReadOnlyStore,
    interrupted,
)
from triton_dist._tuning.values import Key, StoredRecord


def user_store() -> FileStore:
    """The user's own records, ``TRITON_DIST_CACHE_DIR``."""
    return FileStore(knobs.cache_dir.get())


def all_stores() -> LayeredStore:
    """The folders of records in which a tuner looks, in its order."""
    return LayeredStore([user_store(), *map(ReadOnlyStore, knobs.autotune_readonly_dirs.get())])


def with_packs() -> LayeredStore:
    """The same, and then what is shipped."""
    return LayeredStore([all_stores(), *map(PackStore, pack_places())])


def records_of(store: Store, function: str | None) -> Iterator[StoredRecord]:
    """Records of every function of that name: its last part, its qualified name, or with its
    module; ``None``: all."""
    for stored in store.records():
        if function is None or names(stored.record.key, function):
            yield stored


def interrupted_of(store: FileStore, function: str | None) -> list[Interrupted]:
    """Tunings that were begun and have no record yet, found by the same names."""
    return [
        each
        for each in interrupted(store.root)
        if function is None or (each.key is not None and names(each.key, function))
    ]


def names(key: Key, function: str) -> bool:
    module_and_function = f"{key.module}:{key.function}"
    return function in (key.function_name, key.function, key.full_name, module_and_function)


def folders() -> str:
    """Folders that were searched, for a message that nothing was found."""
    return ", ".join(map(str, [knobs.cache_dir.get(), *knobs.autotune_readonly_dirs.get()]))
