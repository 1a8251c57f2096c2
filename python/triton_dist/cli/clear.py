"""``clear``: remove a function's records, so that it is tuned again."""

from __future__ import annotations

import argparse
from typing import Any

from triton_dist.cli import cache


def add_to(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "clear",
        help="remove the records of a function",
        description="Removes the user's records of FUNCTION, so that it is tuned again. Read-only "
        "folders are left alone.",
    )
    parser.add_argument("function", metavar="FUNCTION", help="its name, or with its module")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    store = cache.user_store()
    removed = list(cache.records_of(store, arguments.function))
    for stored in removed:
        store.remove(stored)
        print(stored.where)
    print(f"removed {len(removed)} record(s) of {arguments.function}")
    return 0 if removed else 1
