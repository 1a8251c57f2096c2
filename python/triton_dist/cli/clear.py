"""``clear``: remove a function's records, so that it is tuned again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from triton_dist._tuning.store import is_held, places, remove_tuning
from triton_dist.cli import cache
from triton_dist.cli.verb import add_verb, counted


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "clear",
        _run,
        help="remove the records of a function",
        description="Removes the user's records of FUNCTION, so that it is tuned again, with their "
        "logs, and what interrupted tunings of it have measured. Read-only folders are left alone, "
        "and so is a tuning that is going on.",
        examples=["clear matmul", "clear mypackage.ops.matmul", "clear --all"],
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "function", metavar="FUNCTION", nargs="?", help="its name, or with its module"
    )
    which.add_argument("--all", action="store_true", help="the records of all functions")


def _run(arguments: argparse.Namespace) -> int:
    store, name = cache.user_store(), None if arguments.all else arguments.function
    records = [Path(stored.where) for stored in cache.records_of(store, name)]
    journals = [each.path for each in cache.interrupted_of(store, name)]
    found = {path.with_suffix("") for path in (*records, *journals)}
    removed: set[Path] = set()
    for place in sorted(places(store.root) if arguments.all else found):
        journal = place.with_suffix(".journal")
        if is_held(journal):
            print(f"{journal}: left alone, the tuning is going on")
        removed |= remove_tuning(place)
    gone = sorted(removed & {*records, *journals})
    print(*gone, sep="\n", end="\n" if gone else "")
    begun = sum(path.suffix == ".journal" for path in gone)
    parts = [counted(len(gone) - begun, "record"), counted(len(removed) - len(gone), "log")]
    parts[1:1] = [counted(begun, "interrupted tuning")] * bool(begun)
    print(f"removed {', '.join(parts)} of {name or 'all functions'}")
    return 0 if removed or arguments.all else 1
