"""What all tunings of a process have in common, whichever decorator they are of."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from triton_dist._tuning.protocols import Device, RankGroup
from triton_dist._tuning.store import FileJournal, FileStore, PackStore, ReadOnlyStore
from triton_dist._tuning.values import Key

_gates: dict[RankGroup | None, AbstractContextManager[object]] = {}


def gate_of(ranks: RankGroup) -> AbstractContextManager[object]:
    """What one thread at a time holds for a group; re-entrant. Ranks that are alone share one:
    they share a device too."""
    return _gates.setdefault(ranks if ranks.size > 1 else None, threading.RLock())


def hardware_of(device: Device, ranks: RankGroup) -> str:
    """The part of the hardware that results of other hardware are kept beside, not replaced by."""
    group = [f"{name} {value}" for name, value in sorted(ranks.facts().items())]
    return ", ".join([device.name, device.facts().get("gpu", "no gpu"), *group])


# A thread of the parent may hold one, and there is none in the child of a fork to release it.
os.register_at_fork(after_in_child=_gates.clear)


@functools.cache
def file_store(root: Path) -> FileStore:
    return FileStore(root)


@functools.cache
def read_only_store(root: Path) -> ReadOnlyStore:
    return ReadOnlyStore(root)


@functools.cache
def pack_store(root: Path) -> PackStore:
    return PackStore(root)


def journal_of(files: FileStore, key: Key) -> FileJournal:
    """Beside the record of ``key``."""
    return FileJournal(files.path(key).with_suffix(".journal"), key.module)


def judging(constants: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Constants of functions that decide which configs can win, besides those that are ``known`` of
    the function that is tuned; under names apart from these."""
    return {
        f"{name} (pruning)": text for name, text in constants.items() if known.get(name) != text
    }
