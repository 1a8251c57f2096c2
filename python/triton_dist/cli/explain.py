"""``explain``: print why each record of a function would or would not be used."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triton_dist import knobs
from triton_dist._tuning.values import Key, StoredRecord, TuningRecord
from triton_dist.cli import cache, listing, text
from triton_dist.cli.subcommand import add_subcommand, counted, positive
from triton_dist.cli.validator import (
    OTHER_FUNCTION_REASON,
    Verdict,
    is_own_package,
    verdict,
    verdicts_by_import,
)
from triton_dist.errors import NoSuchFunction

_NOT_FIRST_REASON = "another record of this key is found first and is used"


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "explain",
        _run,
        help="why the records of a function would or would not be used",
        description="Prints whether the records of FUNCTION would be used now. If a record would "
        "not be used, prints what differs, with the recorded and the present value. For records "
        "with equal reasons, prints their number, and key, winner, date and file of one of them; "
        "--all prints every record. Versions, hardware and source files are always compared. "
        "--import "
        "also compares the config space and constants. It imports the function's module in a "
        "separate process; set TRITON_INTERPRET and similar variables as in the program. Exit "
        "status: 0 if a record would or may be used, 1 if not, 2 for an error.",
        examples=[
            "explain matmul --key 8192 --on H200",
            "explain mypackage.ops:matmul --import",
            "explain matmul --module ops.py --import",
            "explain matmul --json",
        ],
    )
    cache.add_record_options(
        parser, "FUNCTION", "package.module:function, the name as `list` prints it, or a bare name"
    )
    parser.add_argument("--used", action="store_true", help="only records that would be used")
    parser.add_argument("--all", action="store_true", help="print every record")
    parser.add_argument(
        "--module", help="module that contains the function now: a dotted name or a .py file; "
        "default: the recorded module",
    )  # fmt: skip
    parser.add_argument(
        "--import", action="store_true", dest="imports",
        help="import the module, which runs its code, to compare config space and constants",
    )  # fmt: skip
    parser.add_argument(
        "--world-size", type=positive,
        help="number of ranks that would tune together; default: as recorded",
    )  # fmt: skip
    parser.add_argument(
        "--local-world-size", type=positive,
        help="number of these ranks on this host; default: as recorded",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print every record as JSON")


def _run(arguments: argparse.Namespace) -> int:
    module, _, name = arguments.function.rpartition(":")
    module = arguments.module or module
    sizes = {name: getattr(arguments, name) for name in ("world_size", "local_world_size")}
    ranks = {name: str(size) for name, size in sizes.items() if size is not None}
    records = _records(module, name)
    if module and not records and (arguments.imports or is_own_package(module)):
        # The function may have been tuned under a different name.
        records = _records("", None)
    kept = {id(each) for each in cache.matching_records((each for _, each in records), arguments)}
    records = [pair for pair in records if id(pair[1]) in kept]
    found = _explained(records, module, name, ranks, arguments.imports)
    found = [each for each in found if OTHER_FUNCTION_REASON not in each.verdict.reasons]
    unknown = [each.verdict.reasons[0] for each in found if each.verdict.is_used is None]
    why = "; ".join(dict.fromkeys(unknown))
    if module and arguments.imports and len(unknown) == len(found) > 0:
        raise NoSuchFunction(arguments.function, why, "Nothing was compared")
    shown = [each for each in found if each.verdict.is_used] if arguments.used else found
    if arguments.json:
        trees = [
            {
                **listing.tree_of(each.stored),
                "used": each.verdict.is_used,
                "reasons": each.verdict.reasons,
                "accepted": each.verdict.accepted_differences,
            }
            for each in shown
        ]
        text.print_json({"records": trees, "why": why})
    elif not found:
        return cache.print_no_record(name, arguments)
    elif not shown:
        print(f"No record of {name} would be used. Without --used, the reasons are printed.")
    else:
        _print(shown, ranks, arguments.all)
    return 0 if any(each.verdict.is_used is not False for each in shown) else 1


@dataclass(frozen=True)
class _Explained:
    """A record, and the verdict on whether a tuner would use it."""

    stored: StoredRecord
    verdict: Verdict


def _records(module: str, name: str | None) -> list[tuple[int, StoredRecord]]:
    """Return the records of function ``name`` (``None``: all records), each with the index of its
    store. A tuner searches the stores in this order."""
    found = []
    for index, store in enumerate(cache.searched_stores()):
        if not (module and name):
            found += [(index, each) for each in cache.records_of([store], name)]
            continue
        for function in (name, f"{module}.{name}"):  # in records of schema 1, names have the module
            key = Key(function, "", "", module)
            stored = store.records(key.function_name)
            found += [(index, each) for each in stored if each.is_of_function(key)]
    return found


def _explained(
    found: Sequence[tuple[int, StoredRecord]],
    module: str,
    name: str,
    ranks: Mapping[str, str],
    imports: bool,
) -> list[_Explained]:
    """Return each record with its verdict. Records of one key follow each other, in the order in
    which a tuner reads them."""
    groups: dict[str, list[tuple[int, StoredRecord]]] = {}
    for index, stored in found:
        groups.setdefault(module or stored.record.key.module, []).append((index, stored))
    explained: list[_Explained] = []
    for module_name, group in groups.items():
        records = [stored.record for _, stored in group]
        if is_own_package(module_name) or (imports and module_name):
            pairs = [(name if module else record.key.function, record) for record in records]
            verdicts = verdicts_by_import(module_name, pairs, ranks)
        else:
            verdicts = [verdict(record, ranks, module=module_name) for record in records]
        keys: dict[Key, list[tuple[int, _Explained]]] = {}
        for (index, stored), each in zip(group, verdicts, strict=True):
            keys.setdefault(stored.record.key, []).append((index, _Explained(stored, each)))
        for explained_of_key in keys.values():
            explained_of_key.sort(key=lambda pair: (pair[0], not pair[1].verdict.is_own_record))
            explained += _mark_first_used([each for _, each in explained_of_key])
    return explained


def _mark_first_used(records: Sequence[_Explained]) -> Iterator[_Explained]:
    """Change the verdicts of one key's records: only the first usable record is used."""
    used_file = ""
    for each in records:
        if each.verdict.is_used and used_file:
            each = replace(each, verdict=Verdict(False, (f"{_NOT_FIRST_REASON}: {used_file}",)))
        elif each.verdict.is_used:
            used_file = each.stored.location
        yield each


def _print(found: Sequence[_Explained], ranks: Mapping[str, str], prints_all: bool) -> None:
    """Print one record of each group with equal verdicts, or every record if ``prints_all``."""
    groups: dict[object, list[_Explained]] = {}
    for number, each in enumerate(found):
        groups.setdefault(number if prints_all else _group_key(each), []).append(each)
    order = list(groups.values())
    if not prints_all:
        order.sort(key=lambda group: (not group[0].verdict.is_used, -len(group)))
    for group in order:
        common = group[0].verdict
        if len(order) < len(found):
            text.print_lines(f"{len(group)} of {counted(len(found), 'record')}, for example:")
        text.print_lines(*_heading(*group[0].stored))
        state = "not compared" if common.is_used is None else "not used"
        text.print_lines(*(f"  {state}: {reason}" for reason in common.reasons))
        if common.is_used:
            unless = ", unless prune_fn drops the winner" * common.may_be_dropped
            text.print_lines(f"  used{unless}")
        text.print_lines(
            *(f"  accepted: {difference}" for difference in common.accepted_differences)
        )
    if knobs.autotune_always_tune.get():
        print(f"{knobs.autotune_always_tune.variable} is set: the next call tunes again anyway.")
    given = " ".join(f"{name} {value}" for name, value in ranks.items()) or "as many as recorded"
    used = sum(each.verdict.is_used is True for each in found)
    unknown = sum(each.verdict.is_used is None for each in found)
    text.print_lines(
        f"{counted(len(found), 'record')} of {found[0].stored.record.key.function}, {used} used"
        + f", {unknown} not compared" * bool(unknown)
        + f". Ranks: {given}."
        + " Every record: --all" * (len(order) < len(found))
    )


def _group_key(each: _Explained) -> object:
    """Return a value that is equal for records of one function with equal verdicts."""
    verdict = each.verdict
    reasons = tuple(
        _NOT_FIRST_REASON if r.startswith(_NOT_FIRST_REASON) else r for r in verdict.reasons
    )
    name = each.stored.record.key.full_name
    return name, verdict.is_used, reasons, verdict.accepted_differences, verdict.may_be_dropped


def _heading(record: TuningRecord, location: str) -> list[str]:
    tuned = f"{record.timestamp}, in {record.seconds:.1f} s"
    if record.is_shipped:
        versions = (f"{name} {text}" for name, text in record.fingerprint.software.items())
        tuned = f"{record.timestamp}, with {', '.join(versions)}; shipped as version "
        tuned += record.fingerprint.version
    return [
        f"{record.key.full_name}, key {record.key}",
        f"  on      {cache.hardware_text(record)}",
        f"  winner  {record.best}, {cache.best_ms(record):.4f} ms",
        f"  tuned   {tuned}",
        *([f"  how     {record.warm_started_from}"] if record.warm_started_from else []),
        f"  file    {location}",
    ]
