"""``status``: print the progress of running and interrupted tunings, once or until they end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from triton_dist import knobs
from triton_dist._tuning.store import InterruptedTuning, is_in_use, last_line_by_rank
from triton_dist._tuning.store.readonly import read
from triton_dist._warn import printable
from triton_dist.cli import cache, listing, text
from triton_dist.cli.subcommand import add_subcommand, counted

_Tree = dict[str, Any]
_REFRESH_SECONDS = 1.0
_IDLE_SECONDS = 30.0
"""``--watch`` ends if no tuning has been running for this time. A job may pause between the tunings
of two keys."""


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "status",
        _run,
        help="progress of running and interrupted tunings",
        description="Prints the tunings that have no record yet: number of configs tried, best "
        "time so far, and, if the tuning is running, the last step of each rank. The next call of "
        "the function resumes an interrupted tuning; `clear --interrupted` removes it. --watch "
        "prints the progress of running tunings until no tuning has been running for "
        f"{_IDLE_SECONDS:.0f} s, or until Ctrl-C. Nothing is written to the cache.",
        examples=["status", "status matmul --watch", "status matmul --json"],
    )
    cache.add_function_argument(parser, metavar="FUNCTION", nargs="?", help="only this function")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--watch", action="store_true", help="follow running tunings")
    output.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.watch:
        return _watch(arguments.function)
    tunings = [*map(_tree, cache.interrupted_of(cache.user_store(), arguments.function))]
    if arguments.json:
        text.print_json({"tunings": tunings})
    elif tunings:
        for line in (line for tuning in tunings for line in _lines(tuning)):
            print(*text.wrapped(line), sep="\n")
    else:
        _print_none("running or interrupted", arguments.function)
    return 1 if arguments.function and not tunings else 0


def _print_none(state: str, function: str | None) -> None:
    print(f"No {state} tuning{f' of {function}' * bool(function)} in {knobs.cache_dir.get()}.")


def _tree(each: InterruptedTuning) -> _Tree:
    running, age = is_in_use(each.path), 0.0
    if running:
        with suppress(OSError):  # ``seconds`` ends at the last outcome: add the time since
            age = max(0.0, time.time() - each.path.stat().st_mtime)
    return {
        **listing.tree_of_unfinished(each),
        "going_on": running,
        "candidates": each.num_candidates,
        "best_ms": each.best_ms,
        "seconds": each.seconds + age,
        "not_tried_again": each.num_quarantined,
        "ranks": [
            {"rank": rank, "time": when, "step": step}
            for rank, (when, step) in (last_line_by_rank(each.path) if running else {}).items()
        ],
    }


def _lines(tuning: _Tree) -> Iterator[str]:
    yield _title(tuning)
    yield f"    on      {tuning['hardware'] or 'unknown hardware'}"
    yield f"    {_progress(tuning)}"
    yield from (f"    rank {step}" for step in _steps(tuning))
    yield f"    file    {tuning['file']}"


def _title(tuning: _Tree) -> str:
    return f"{tuning['function'] or 'unknown function'}, key {tuning['key'] or 'unknown'}"


def _progress(tuning: _Tree) -> str:
    state = "running" if tuning["going_on"] else "interrupted"
    best = "" if tuning["best_ms"] is None else f", best {tuning['best_ms']:.4f} ms"
    stuck = tuning["not_tried_again"]
    return (
        f"{state}, {tuning['tried']} of {counted(tuning['candidates'], 'config')} tried "
        f"in {tuning['seconds']:.1f} s{best}"
        + f", {counted(stuck, 'config')} not tried again"
        * bool(stuck)
    )


def _steps(tuning: _Tree) -> Iterator[str]:
    for each in tuning["ranks"]:
        yield f"{each['rank']}, {text.age(each['time'])} ago: {each['step']}"


def _watch(function: str | None) -> int:
    """Print the progress of running tunings until they end. Return 1 if no tuning was running."""
    store, running, last, any_ran = cache.user_store(), dict[str, _Tree](), time.monotonic(), False
    with suppress(KeyboardInterrupt), _display() as show:
        while running or time.monotonic() - last < _IDLE_SECONDS:
            before, trees = running, map(_tree, cache.interrupted_of(store, function))
            running = {tree["file"]: tree for tree in trees if tree["going_on"]}
            show(running.values(), [_end(before[file]) for file in before.keys() - running.keys()])
            if running:
                last, any_ran = time.monotonic(), True
            time.sleep(_REFRESH_SECONDS)
    if not any_ran:
        _print_none("running", function)
    return int(not any_ran)


def _end(tuning: _Tree) -> str:
    """Return a line about a tuning that is no longer running."""
    journal = Path(tuning["file"])
    if not journal.exists():
        with suppress(OSError, ValueError):
            record = read(journal.with_suffix(".json"))
            best = f"{cache.best_ms(record):.4f} ms, {record.best}"
            return f"{_title(tuning)}: tuned in {record.seconds:.1f} s, {best}"
    return f"{_title(tuning)}: ended without a record; the next call resumes the tuning"


@contextmanager
def _display() -> Iterator[Callable[[Collection[_Tree], Collection[str]], None]]:
    """Context manager that yields a function to print running tunings and tunings that ended. On a
    terminal, running tunings are redrawn in place. Otherwise, a line is printed for each tuning
    that has a new outcome."""
    if not text.is_terminal():
        printed = set[tuple[object, ...]]()

        def show(tunings: Collection[_Tree], ends: Collection[str]) -> None:
            text.print_lines(*ends)
            for tuning in tunings:
                state = tuning["file"], tuning["tried"], tuning["best_ms"]
                if state not in printed:
                    printed.add(state)
                    steps = "".join(f"; rank {step}" for step in _steps(tuning))
                    text.print_lines(f"{_title(tuning)}: {_progress(tuning)}{steps}")
            sys.stdout.flush()

        yield show
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    def line(content: str, style: str = "") -> Text:
        return Text(printable(content), style, no_wrap=True, overflow="ellipsis")

    def redraw(tunings: Collection[_Tree], ends: Collection[str]) -> None:
        parts: list[Text | ProgressBar] = []
        if not tunings:
            parts.append(line("Waiting for a tuning; Ctrl-C ends"))
        for tuning in tunings:
            bar = ProgressBar(tuning["candidates"], tuning["tried"], width=40)
            steps = (line(f"  rank {step}") for step in _steps(tuning))
            parts += [line(_title(tuning), "bold"), bar, line(f"  {_progress(tuning)}"), *steps]
        live.update(Group(*parts), refresh=True)
        for end in ends:
            live.console.print(Text(printable(end)))

    # rich's shared console would keep the width that the terminal had at its first use.
    with Live(console=Console(), auto_refresh=False) as live:
        yield redraw
