"""``status``: tunings that were begun."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from triton_dist import knobs
from triton_dist._tuning.store import Interrupted, is_held
from triton_dist.cli import cache, listing, text
from triton_dist.cli.verb import add_verb, counted


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "status",
        _run,
        help="tunings that are going on, or were interrupted",
        description="Lists tunings that have no record yet: how far each is, its best so far, and "
        "whether a process is at it. One that was interrupted goes on at the next call; `clear "
        "--interrupted` forgets it.",
        examples=["status", "status matmul --json"],
    )
    parser.add_argument("function", metavar="FUNCTION", nargs="?", help="only tunings of it")
    parser.add_argument("--json", action="store_true", help="for programs")


def _run(arguments: argparse.Namespace) -> int:
    begun = cache.interrupted_of(cache.user_store(), arguments.function)
    told = [_tree(each) for each in begun]
    if arguments.json:
        print(json.dumps({"tunings": told}, indent=2))
    elif told:
        for tuning in told:
            for line in _lines(tuning):
                print(*text.fitted(line), sep="\n")
    else:
        of = f" of {arguments.function}" if arguments.function else ""
        print(f"No tuning{of} is going on or was interrupted, in {knobs.cache_dir.get()}.")
    return 1 if arguments.function and not told else 0


def _tree(each: Interrupted) -> dict[str, Any]:
    return {
        **listing.tree_of_begun(each),
        "going_on": is_held(each.path),
        "candidates": each.candidates,
        "best_ms": each.best,
        "seconds": each.seconds,
        "not_tried_again": each.stuck,
    }


def _lines(tuning: dict[str, Any]) -> Iterator[str]:
    state = "going on" if tuning["going_on"] else "interrupted"
    best = "" if tuning["best_ms"] is None else f", best {tuning['best_ms']:.4f} ms"
    stuck = tuning["not_tried_again"]
    yield f"{tuning['function'] or 'unknown function'}, key {tuning['key'] or 'unknown'}"
    yield f"    on      {tuning['hardware'] or 'unknown hardware'}"
    yield f"    {state}, {tuning['tried']} of {counted(tuning['candidates'], 'config')} tried" + (
        f" in {tuning['seconds']:.1f} s{best}"
        + f", {counted(stuck, 'config')} not tried again" * bool(stuck)
    )
    yield f"    file    {tuning['file']}"
