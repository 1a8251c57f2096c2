"""Find the tuning records and interrupted tunings that the arguments of a subcommand select."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from triton_dist import knobs
from triton_dist._archive import RECORDS_SUFFIX, files_in, pack_locations
from triton_dist._tuning.protocols import Store
from triton_dist._tuning.store import (
    InterruptedTuning,
    PackStore,
    ReadOnlyStore,
    interrupted_tunings,
)
from triton_dist._tuning.store.readonly import read
from triton_dist._tuning.values import Key, StoredRecord, TuningRecord
from triton_dist.errors import NewerSchema, NoSuchRecord


def user_store() -> ReadOnlyStore:
    """Return the store of the user's own records, read-only. (A tuner renames damaged files.)

    Raises:
        InvalidKnob: ``TRITON_DIST_CACHE_DIR`` is a file. (A tuner would continue without a cache.)
    """
    store, folder = ReadOnlyStore(knobs.cache_dir.get()), knobs.cache_dir
    if os.path.isfile(store.root.parent):
        raise knobs.InvalidKnob(folder.variable, str(folder.get()), "a folder, and it is a file")
    return store


def folders_of_records() -> list[ReadOnlyStore]:
    """Return the folders of records that a tuner searches, in the tuner's order."""
    return [user_store(), *map(ReadOnlyStore, knobs.autotune_readonly_dirs.get())]


def searched_stores() -> list[Store]:
    """Return the stores that a tuner searches: :func:`folders_of_records`, then packs."""
    return [*folders_of_records(), *map(PackStore, pack_locations())]


def records_of(stores: Sequence[Store], function: str | None) -> Iterator[StoredRecord]:
    """Yield the records of all functions named ``function`` (``None``: all records). ``function``
    is a bare name, a qualified name, or a name with its module."""
    bare_name = None if function is None else re.split("[.:]", function)[-1]
    for stored in (stored for store in stores for stored in store.records(bare_name)):
        if function is None or has_name(stored.record.key, function):
            yield stored


def add_record_options(parser: argparse.ArgumentParser, metavar: str = "", help: str = "") -> None:
    """Add ``--key`` and ``--on``, which select records (:func:`select_records`).

    With ``metavar``, also add the positional argument that names the function, with ``help``.
    """
    if metavar:
        add_function_argument(parser, metavar=metavar, help=help)
    parser.add_argument("--key", metavar="TEXT", help="only records whose key contains TEXT")
    parser.add_argument(
        "--on", metavar="TEXT", help="only records whose hardware or settings contain TEXT"
    )


def add_function_argument(parser: Any, **options: Any) -> None:
    """Add the positional argument ``function``, which shells can complete (argcomplete)."""
    parser.add_argument("function", **options).completer = _functions_with_records


def _functions_with_records(**_: object) -> set[str]:
    """Return the names of functions that have records: the names of folders and of packs. Reading
    the records would take seconds."""
    roots = (store.root for store in folders_of_records())
    names = {path.name for root in roots if root.is_dir() for path in root.iterdir()}
    packs = (
        path for location in pack_locations() for path in files_in(location, (RECORDS_SUFFIX,))
    )
    return names | {path.name.partition(".")[0] for path in packs}


def select_records(function: str, arguments: argparse.Namespace) -> list[StoredRecord]:
    """Return the records that the arguments select, shipped records last.

    If ``function`` ends in ``.json``, return the record in that file. Otherwise return the records
    of the function whose key contains ``--key`` and whose hardware or settings contain ``--on``. If
    some of these records have exactly this key, or this hardware text, return only those records.

    Raises:
        NoSuchRecord: the file ``function`` does not contain a record.
    """
    if function.endswith(".json"):
        return [record_in_file(Path(function))]
    return matching_records(records_of(searched_stores(), function), arguments)


def matching_records(
    records: Iterable[StoredRecord], arguments: argparse.Namespace
) -> list[StoredRecord]:
    """Return the records that match ``--key`` and ``--on``; see :func:`select_records`."""
    found = [each for each in records if (arguments.on or "") in hardware_text(each.record)]
    found = [each for each in found if hardware_text(each.record) == arguments.on] or found
    if arguments.key is None:
        return found
    whole = [each for each in found if str(each.record.key) == arguments.key]
    return whole or [each for each in found if arguments.key in str(each.record.key)]


def best_ms(record: TuningRecord) -> float:
    return record.best.outcome.median  # type: ignore[union-attr]  # the best was measured


def hardware_text(record: TuningRecord) -> str:
    """Return the record's hardware and its settings (such as a debug mode) as text. Records
    with equal text of the key may differ in both."""
    settings = "" if record.is_shipped else record.fingerprint.settings
    return record.key.hardware + f", under {settings}" * bool(settings)


def single_record(name: str, found: Sequence[StoredRecord]) -> StoredRecord:
    """Return the only record in ``found``, which must not be empty.

    Raises:
        NoSuchRecord: ``found`` has several records; the message lists up to 5.
    """
    if len(found) == 1:
        return found[0]
    some = "".join(
        f"\n  {each.record.key}\n    on {hardware_text(each.record)}\n    {each.location}"
        for each in found[:_MAX_SUGGESTIONS]
    )
    more = f"\n  and {len(found) - _MAX_SUGGESTIONS} more" if len(found) > _MAX_SUGGESTIONS else ""
    raise NoSuchRecord(
        name,
        f"{len(found)} records match, but exactly one is required:{some}{more}",
        "Select one with --key TEXT or --on TEXT, or pass its file instead of the function",
    )


_MAX_SUGGESTIONS = 5


def print_no_record(function: str, arguments: argparse.Namespace) -> int:
    """Print that no record matches, and return exit status 1."""
    conditions = "".join(
        f", {option} {text!r}"
        for option, text in (("--key", arguments.key), ("--on", arguments.on))
        if text is not None
    )
    searched = searched_folders()
    print(f"No record of {function}{conditions} in {searched}. All records: triton-dist list")
    return 1


def record_in_file(path: Path) -> StoredRecord:
    """Return the record in a file; raise ``NoSuchRecord`` if the file does not contain one."""
    try:
        return StoredRecord(read(path), str(path))
    except (NewerSchema, ValueError) as error:
        raise NoSuchRecord(
            str(path),
            f"the file is not a tuning record, or it is damaged: {error}",
            "Delete a damaged record: its key is tuned again at the next call. "
            "`triton-dist list FUNCTION` lists the files of records",
        ) from error


def interrupted_of(store: ReadOnlyStore, function: str | None) -> list[InterruptedTuning]:
    """Return the tunings of ``function`` that have started but have no record yet. See
    :func:`records_of` for the name."""
    return [
        each
        for each in interrupted_tunings(store.root)
        if function is None or (each.key is not None and has_name(each.key, function))
    ]


def has_name(key: Key, function: str) -> bool:
    module_and_function = f"{key.module}:{key.function}"
    return function in (key.function_name, key.function, key.full_name, module_and_function)


def searched_folders() -> str:
    return ", ".join(map(str, [knobs.cache_dir.get(), *knobs.autotune_readonly_dirs.get()]))
