"""Contents of the cache."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from triton_dist import knobs
from triton_dist._archive import pack_places
from triton_dist._tuning.protocols import Store
from triton_dist._tuning.store import (
    Interrupted,
    LayeredStore,
    PackStore,
    ReadOnlyStore,
    interrupted,
)
from triton_dist._tuning.store.readonly import read
from triton_dist._tuning.values import Key, StoredRecord, TuningRecord
from triton_dist.errors import NewerSchema, NoSuchRecord


def user_store() -> ReadOnlyStore:
    """The user's own records. A command renames no damaged file: it shows what is there.

    Raises:
        InvalidKnob: ``TRITON_DIST_CACHE_DIR`` is a file. (A tuner does without the folder.)
    """
    store, folder = ReadOnlyStore(knobs.cache_dir.get()), knobs.cache_dir
    if os.path.isfile(store.root.parent):
        raise knobs.InvalidKnob(folder.variable, str(folder.get()), "a folder, and it is a file")
    return store


def all_stores() -> LayeredStore:
    """The folders of records in which a tuner looks, in its order."""
    return LayeredStore([user_store(), *map(ReadOnlyStore, knobs.autotune_readonly_dirs.get())])


def with_packs() -> LayeredStore:
    """The same, and then what is shipped."""
    return LayeredStore([*layers()])


def layers() -> list[Store]:
    """The stores of :func:`with_packs`, in the order in which a tuner looks."""
    read_only = map(ReadOnlyStore, knobs.autotune_readonly_dirs.get())
    return [user_store(), *read_only, *map(PackStore, pack_places())]


def records_of(store: Store, function: str | None) -> Iterator[StoredRecord]:
    """Records of every function of that name: its last part, its qualified name, or with its
    module; ``None``: all."""
    for stored in store.records():
        if function is None or names(stored.record.key, function):
            yield stored


def add_choice(parser: argparse.ArgumentParser, metavar: str = "", about: str = "") -> None:
    """Add the options that choose among a function's records, see :func:`chosen`; before them, if
    it has a ``metavar``, the argument that names the function."""
    if metavar:
        parser.add_argument("function", metavar=metavar, help=about)
    parser.add_argument("--key", metavar="TEXT", help="records whose key has TEXT in it")
    parser.add_argument(
        "--on", metavar="TEXT", help="records whose hardware, or settings, have TEXT in them"
    )


def chosen(asked: str, arguments: argparse.Namespace) -> list[StoredRecord]:
    """Records that the words of a command fit: the file that is named, or those of the function,
    shipped ones last, that have ``--key`` in their key and ``--on`` in their hardware. A key that
    is the whole text counts alone.

    Raises:
        NoSuchRecord: ``asked`` is a file and no record.
    """
    if asked.endswith(".json"):
        return [in_file(Path(asked))]
    return fitting(records_of(with_packs(), asked), arguments)


def fitting(records: Iterable[StoredRecord], arguments: argparse.Namespace) -> list[StoredRecord]:
    """Those that ``--key`` and ``--on`` leave."""
    found = [each for each in records if (arguments.on or "") in made_on(each.record)]
    found = [each for each in found if made_on(each.record) == arguments.on] or found
    if arguments.key is None:
        return found
    whole = [each for each in found if str(each.record.key) == arguments.key]
    return whole or [each for each in found if arguments.key in str(each.record.key)]


def made_on(record: TuningRecord) -> str:
    """Hardware of a record; with the settings that it was tuned under, which tell records of one
    key apart."""
    settings = "" if record.shipped else record.fingerprint.settings
    return record.key.hardware + f", under {settings}" * bool(settings)


def only(asked: str, found: Sequence[StoredRecord]) -> StoredRecord:
    """The one of ``found``, at least one.

    Raises:
        NoSuchRecord: there are several; names some.
    """
    if len(found) == 1:
        return found[0]
    some = "".join(
        f"\n  {each.record.key}\n    on {made_on(each.record)}\n    {each.where}"
        for each in found[:_SOME]
    )
    more = f"\n  and {len(found) - _SOME} more" if len(found) > _SOME else ""
    raise NoSuchRecord(
        asked,
        f"{len(found)} records fit, one is needed:{some}{more}",
        "Name one: --key TEXT, --on TEXT, or its file in place of the function",
    )


_SOME = 5


def say_none(asked: str, arguments: argparse.Namespace) -> int:
    """Say that nothing fits; the exit status."""
    that = "".join(
        f", {option} {text!r}"
        for option, text in (("--key", arguments.key), ("--on", arguments.on))
        if text is not None
    )
    print(f"No record of {asked}{that} in {folders()}.")
    return 1


def in_file(path: Path) -> StoredRecord:
    """The record in a file. Raises ``NoSuchRecord`` if that is none."""
    try:
        return StoredRecord(read(path), str(path))
    except (NewerSchema, ValueError) as error:
        raise NoSuchRecord(
            str(path),
            f"it is no tuning record, or a damaged one: {error}",
            "If it is damaged, delete it: its key is tuned again. `triton-dist list FUNCTION` "
            "names others",
        ) from error


def interrupted_of(store: ReadOnlyStore, function: str | None) -> list[Interrupted]:
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
