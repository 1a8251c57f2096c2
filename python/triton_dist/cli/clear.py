"""``clear``: remove a function's records, logs and interrupted tunings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_dist._tuning.store import is_in_use, record_stems, removable_files
from triton_dist._tuning.values import StoredRecord
from triton_dist.cli import cache, text
from triton_dist.cli.subcommand import add_subcommand, counted
from triton_dist.cli.validator import is_own_package, verdict, verdicts_by_import

_NAMES_BY_KIND = {"record": "record", "journal": "interrupted tuning", "log": "log"}


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "clear",
        _run,
        help="remove the records of a function",
        description="Removes the user's records of FUNCTION, their logs, and the measurements of "
        "interrupted tunings. The next call tunes FUNCTION again. With --stale, --logs or "
        "--interrupted, removes only stale records with their logs, only logs, or only interrupted "
        "tunings. Read-only folders and running tunings are not changed.",
        examples=[
            "clear matmul",
            "clear mypackage.ops.matmul --logs --interrupted",
            "clear --all --stale --import --dry-run",
        ],
    )
    which = parser.add_mutually_exclusive_group(required=True)
    help = "function name, optionally with its module"
    cache.add_function_argument(which, metavar="FUNCTION", nargs="?", help=help)
    which.add_argument("--all", action="store_true", help="clear all functions")
    parser.add_argument(
        "--stale",
        action="store_true",
        help="remove only records that would not be used with the present hardware, versions and "
        "source files, and the logs of these records",
    )
    parser.add_argument(
        "--import",
        action="store_true",
        dest="imports",
        help="with --stale: also compare config spaces and constants. To do this, the modules of "
        "the functions are imported, so their code runs",
    )
    parser.add_argument("--logs", action="store_true", help="remove logs, keep records")
    parser.add_argument(
        "--interrupted", action="store_true", help="remove interrupted tunings, keep records"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    parser.add_argument("--json", action="store_true", help="print what was removed as JSON")


def _run(arguments: argparse.Namespace) -> int:
    store, name = cache.user_store(), None if arguments.all else arguments.function
    records = list(cache.records_of([store], name))
    journals = [each.path for each in cache.interrupted_of(store, name)]
    found = {path.with_suffix("") for path in (*(Path(r.location) for r in records), *journals)}
    known = record_stems(store.root) if arguments.all else found
    kept = {
        str(journal): "the tuning is running"
        for journal in (stem.with_suffix(".journal") for stem in sorted(known))
        if is_in_use(journal)
    }
    kinds = {"log"} if arguments.logs else set()
    kinds |= {"journal"} if arguments.interrupted else set()
    if not (kinds or arguments.stale):
        kinds = set(_NAMES_BY_KIND)
    removed = {path: kind for path, kind in removable_files(known).items() if kind in kinds}
    if arguments.stale:
        stale, unknown = _stale(records, arguments.imports)
        kept |= unknown
        removed |= {
            path: kind for path, kind in removable_files(stale).items() if kind != "journal"
        }
    if not arguments.dry_run:
        for path in removed:
            path.unlink(missing_ok=True)
    removed = dict(sorted(removed.items()))
    if arguments.json:
        tree = {
            "dry_run": arguments.dry_run,
            "removed": [{"file": str(path), "kind": kind} for path, kind in removed.items()],
            "left_alone": [{"file": file, "why": why} for file, why in kept.items()],
        }
        text.print_json(tree)
    else:
        settings = {Path(location): record.fingerprint.settings for record, location in records}
        _print(arguments, removed, kept, settings)
    return 0 if removed or arguments.all else 1


def _stale(records: list[StoredRecord], imports: bool) -> tuple[set[Path], dict[str, str]]:
    """Return the paths of stale records, without suffix, and why records could not be compared."""
    verdicts = [verdict(record, {}, ignores_settings=True) for record, _ in records]
    modules: dict[str, list[int]] = {}
    for number, each in enumerate(verdicts):
        module = records[number].record.key.module
        if each.needs_import and (imports or is_own_package(module)):
            modules.setdefault(module, []).append(number)
    for module, numbers in modules.items():
        chosen = [records[number].record for number in numbers]
        pairs = [(record.key.function, record) for record in chosen]
        by_import = verdicts_by_import(module, pairs, {}, ignores_settings=True)
        for number, each in zip(numbers, by_import, strict=True):
            verdicts[number] = each
    stale: set[Path] = set()
    unknown: dict[str, str] = {}
    for (_, location), each in zip(records, verdicts, strict=True):
        if each.is_used is None:
            unknown[location] = f"not compared: {each.reasons[0]}"
        elif not each.is_used:
            stale.add(Path(location).with_suffix(""))
    return stale, unknown


def _print(
    arguments: argparse.Namespace,
    removed: dict[Path, Any],
    kept: dict[str, str],
    settings: Mapping[Path, str],
) -> None:
    for file, why in kept.items():
        text.print_lines(f"{file}: kept, {why}")
    for path in (path for path, kind in removed.items() if kind != "log"):
        under = settings.get(path)
        text.print_lines(f"{path}, tuned under {under}" if under else str(path))
    counts = {kind: list(removed.values()).count(kind) for kind in _NAMES_BY_KIND}
    parts = [
        counted(n, _NAMES_BY_KIND[kind]) for kind, n in counts.items() if n or kind != "journal"
    ]
    done = "would remove" if arguments.dry_run else "removed"
    print(f"{done} {', '.join(parts)} of {arguments.function or 'all functions'}")
