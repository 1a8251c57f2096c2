"""``list``: finished and interrupted tunings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from triton_dist._tuning.store import InterruptedTuning, foreign_files, is_in_use
from triton_dist._tuning.values import Failure, StoredRecord
from triton_dist.cli import cache, text
from triton_dist.cli.subcommand import add_subcommand, counted


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "list",
        _run,
        help="list all records, or the records of one function",
        description="Lists the records in the cache and in the read-only folders, by function and "
        "hardware: time of the winner, age and key. With FUNCTION, also prints the winner and the "
        "record's file. Unfinished tunings are listed too; the next call resumes them. Files of "
        "other programs in the cache folder are only counted.",
        examples=["list", "list matmul", "list --json | jq '.records[].winner'"],
    )
    cache.add_function_argument(parser, metavar="FUNCTION", nargs="?", help="only this function")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _run(arguments: argparse.Namespace) -> int:
    store, function = cache.user_store(), arguments.function
    records = list(cache.records_of(cache.folders_of_records(), function))
    unfinished, others = cache.interrupted_of(store, function), foreign_files(store.root)
    if arguments.json:
        tree = {
            "records": [tree_of(each) for each in records],
            "interrupted": [*map(tree_of_unfinished, unfinished)],
            "of_other_programs": [*map(str, others)],
        }
        text.print_json(tree)
    elif records or unfinished:
        for line in _lines(records, unfinished, in_full=function is not None):
            text.print_lines(line)
    else:
        print(f"No record of {function or 'any function'} in {cache.searched_folders()}.")
    if others and not arguments.json:
        text.print_lines(
            f"{counted(len(others), 'file')} of another program in {store.root}, such as "
            f"{others[0].relative_to(store.root)}: not read, not changed. Triton-distributed uses "
            "the same default folder; TRITON_DIST_CACHE_DIR selects another."
        )
    return 1 if function and not records and not unfinished else 0


def _lines(
    records: Sequence[StoredRecord], unfinished: Sequence[InterruptedTuning], in_full: bool
) -> Iterator[str]:
    groups: dict[str, dict[str, list[StoredRecord | InterruptedTuning]]] = {}
    for stored in records:
        by_hardware = groups.setdefault(stored.record.key.full_name, {})
        by_hardware.setdefault(cache.hardware_text(stored.record), []).append(stored)
    for each in unfinished:
        name = each.key.full_name if each.key is not None else each.path.parent.name
        hardware = each.key.hardware if each.key is not None else "unknown hardware"
        groups.setdefault(name, {}).setdefault(hardware, []).append(each)
    for name, by_hardware in sorted(groups.items()):
        yield name
        for hardware, entries in by_hardware.items():
            yield from text.wrapped(f"  on {hardware}")
            if in_full:
                for line in (line for entry in entries for line in _block(entry)):
                    yield from text.wrapped(line)
                continue
            for line in text.table(("time (ms)", "tuned", "key"), [*map(_row, entries)], ("key",)):
                yield text.truncated(f"    {line}")
    yield (
        f"{counted(len(records), 'record')} of {counted(len(groups), 'function')}"
        + f", {counted(len(unfinished), 'unfinished tuning')}" * bool(unfinished)
        + f" in {cache.searched_folders()}."
        + " Winners and files: triton-dist list FUNCTION" * (not in_full)
    )


def _row(entry: StoredRecord | InterruptedTuning) -> list[str]:
    if isinstance(entry, StoredRecord):
        record = entry.record
        return [
            f"{cache.best_ms(record):.4f}",
            f"{text.age(record.timestamp)} ago",
            str(record.key),
        ]
    best = "-" if entry.best_ms is None else f"{entry.best_ms:.4f}"
    return [best, "unfinished", f"{entry.key or 'unknown'}, {_tried(entry)}"]


def _block(entry: StoredRecord | InterruptedTuning) -> list[str]:
    if isinstance(entry, InterruptedTuning):
        lines = [f"key     {entry.key or 'unknown'}", f"state   {_tried(entry)}"]
        return [*(f"    {line}" for line in lines), f"    file    {entry.path}", ""]
    record, location = entry
    failed = sum(isinstance(trial.outcome, Failure) for trial in record.trials)
    tried = f"best of {len(record.trials) - failed}" + f", {failed} failed or pruned" * bool(failed)
    return [
        f"    key     {record.key}",
        f"    winner  {record.best}",
        f"    time    {cache.best_ms(record):.4f} ms, {tried}, {text.age(record.timestamp)} ago",
        f"    file    {location}",
        "",
    ]


def _tried(each: InterruptedTuning) -> str:
    state = "running" if is_in_use(each.path) else "interrupted"
    return f"{state}, {each.num_tried} of {counted(each.num_candidates, 'config')} tried"


def tree_of(stored: StoredRecord) -> dict[str, Any]:
    """Return the main facts of a record as a JSON tree."""
    record, location = stored
    return {
        "function": record.key.full_name,
        "key": str(record.key),
        "hardware": record.key.hardware,
        "settings": record.fingerprint.settings,
        "winner": str(record.best),
        "ms": cache.best_ms(record),
        "timestamp": record.timestamp,
        "file": location,
    }


def tree_of_unfinished(each: InterruptedTuning) -> dict[str, Any]:
    """Return the main facts of an unfinished tuning, which has no record, as a JSON tree."""
    key = each.key
    return {
        "function": key and key.full_name,
        "key": key and str(key),
        "hardware": key and key.hardware,
        "tried": each.num_tried,
        "file": str(each.path),
    }
