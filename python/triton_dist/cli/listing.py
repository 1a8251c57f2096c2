"""``list`` and ``status``: finished, running and interrupted tunings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from triton_dist import knobs
from triton_dist._tuning.store import Interrupted, is_held
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
        "file. Interrupted tunings are listed too; the next call resumes them.",
        examples=["list", "list matmul", "list --json | jq '.records[].winner'"],
    )
    parser.add_argument("function", metavar="FUNCTION", nargs="?", help="only this function")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser = add_subcommand(
        subcommands,
        "status",
        _status,
        help="list running and interrupted tunings",
        description="Lists tunings that have no record yet: the progress, the best time so far, "
        "and whether a process is running the tuning. The next call resumes an interrupted tuning; "
        "`clear --interrupted` removes it.",
        examples=["status", "status matmul --json"],
    )
    parser.add_argument("function", metavar="FUNCTION", nargs="?", help="only this function")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    store, asked = cache.all_stores(), arguments.function
    records = list(cache.records_of(store, asked))
    begun = cache.interrupted_of(cache.user_store(), asked)
    if arguments.json:
        tree = {
            "records": [tree_of(each) for each in records],
            "interrupted": [*map(tree_of_begun, begun)],
        }
        print(json.dumps(tree, indent=2))
    elif records or begun:
        for line in _lines(records, begun, in_full=asked is not None):
            text.say(line)
    else:
        print(f"No record of {asked or 'any function'} in {cache.folders()}.")
    return 1 if asked and not records and not begun else 0


def _lines(
    records: Sequence[StoredRecord], begun: Sequence[Interrupted], in_full: bool
) -> Iterator[str]:
    groups: dict[str, dict[str, list[list[str]]]] = {}
    for stored in records:
        key = stored.record.key
        of = groups.setdefault(key.full_name, {}).setdefault(cache.made_on(stored.record), [])
        of.append(_block(stored, in_full))
    for each in begun:
        name = each.key.full_name if each.key is not None else each.path.parent.name
        hardware = each.key.hardware if each.key is not None else "unknown hardware"
        key_text = f"  {each.key}" if each.key is not None else ""
        line = f"     interrupted, {counted(each.tried, 'config')} measured:{key_text}"
        groups.setdefault(name, {}).setdefault(hardware, []).append([line])
    for name, by_hardware in sorted(groups.items()):
        yield name
        for hardware, blocks in by_hardware.items():
            yield from text.fitted(f"  on {hardware}")
            for block in blocks:
                for line in block:
                    yield from text.fitted(line) if in_full else [text.cut(line)]
    yield (
        f"{counted(len(records), 'record')} of {counted(len(groups), 'function')}"
        + f", {counted(len(begun), 'interrupted tuning')}" * bool(begun)
        + f" in {cache.folders()}."
        + " Winners and files: triton-dist list FUNCTION" * (not in_full)
    )


def _block(stored: StoredRecord, in_full: bool) -> list[str]:
    record, where = stored
    median = record.best.outcome.median  # type: ignore[union-attr]  # the best was measured
    if not in_full:
        return [f"  {median:12.4f} ms {text.age(record.timestamp):>7} ago  {record.key}"]
    failed = sum(isinstance(trial.outcome, Failure) for trial in record.trials)
    tried = f"best of {len(record.trials) - failed}" + f", {failed} failed or pruned" * bool(failed)
    return [
        f"    key     {record.key}",
        f"    winner  {record.best}",
        f"    time    {median:.4f} ms, {tried}, {text.age(record.timestamp)} ago",
        f"    file    {where}",
        "",
    ]


def tree_of(stored: StoredRecord) -> dict[str, Any]:
    """Return a record as a JSON tree."""
    record, where = stored
    return {
        "function": record.key.full_name,
        "key": str(record.key),
        "hardware": record.key.hardware,
        "settings": record.fingerprint.settings,
        "winner": str(record.best),
        "ms": record.best.outcome.median,  # type: ignore[union-attr]
        "timestamp": record.timestamp,
        "file": where,
    }


def tree_of_begun(each: Interrupted) -> dict[str, Any]:
    """Return a tuning that has no record yet as a JSON tree."""
    key = each.key
    return {
        "function": key and key.full_name,
        "key": key and str(key),
        "hardware": key and key.hardware,
        "tried": each.tried,
        "file": str(each.path),
    }


def _status(arguments: argparse.Namespace) -> int:
    begun = cache.interrupted_of(cache.user_store(), arguments.function)
    told = [
        {
            **tree_of_begun(each),
            "going_on": is_held(each.path),
            "candidates": each.candidates,
            "best_ms": each.best,
            "seconds": each.seconds,
            "not_tried_again": each.stuck,
        }
        for each in begun
    ]
    if arguments.json:
        print(json.dumps({"tunings": told}, indent=2))
    elif told:
        for tuning in told:
            for line in _status_lines(tuning):
                print(*text.fitted(line), sep="\n")
    else:
        of = f" of {arguments.function}" if arguments.function else ""
        print(f"No running or interrupted tuning{of} in {knobs.cache_dir.get()}.")
    return 1 if arguments.function and not told else 0


def _status_lines(tuning: dict[str, Any]) -> Iterator[str]:
    state = "running" if tuning["going_on"] else "interrupted"
    best = "" if tuning["best_ms"] is None else f", best {tuning['best_ms']:.4f} ms"
    stuck = tuning["not_tried_again"]
    yield f"{tuning['function'] or 'unknown function'}, key {tuning['key'] or 'unknown'}"
    yield f"    on      {tuning['hardware'] or 'unknown hardware'}"
    yield f"    {state}, {tuning['tried']} of {counted(tuning['candidates'], 'config')} tried" + (
        f" in {tuning['seconds']:.1f} s{best}"
        + f", {counted(stuck, 'config')} not tried again" * bool(stuck)
    )
    yield f"    file    {tuning['file']}"
