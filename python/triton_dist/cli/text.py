"""Fit text to the width of the terminal. Text for a pipe is neither wrapped nor cut."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

from triton_dist._warn import printable

_SECONDS_BY_UNIT = {"d": 86400, "h": 3600, "min": 60, "s": 1}


def print_lines(*lines: str) -> None:
    """Print each of ``lines`` on one line, with control characters escaped."""
    for line in lines:
        print(printable(line))


def print_json(tree: object) -> None:
    print(json.dumps(tree, indent=2))


def wrapped(line: str, indent: int = 12) -> list[str]:
    """Return ``line`` wrapped to the width of the terminal. If the output is a pipe, return one
    line, so that grep can search it."""
    line = printable(line)
    if not is_terminal():
        return [line]
    lines = textwrap.wrap(
        line, shutil.get_terminal_size().columns, subsequent_indent=" " * indent,
        break_on_hyphens=False, break_long_words=False,  # paths must stay copyable
    )  # fmt: skip
    return lines or [""]


def truncated(line: str) -> str:
    """Return ``line`` cut to the width of the terminal."""
    line = printable(line)
    width = shutil.get_terminal_size().columns
    return line if not is_terminal() or len(line) <= width else f"{line[: width - 3]}..."


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()
) -> list[str]:
    """Return the lines of a table whose columns are right-aligned, except those in ``left``."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    signs = ["<" if head in left else ">" for head in heads]
    return [
        "  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, signs, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    ]


def natural_order(line: str) -> str:
    """Return a sort key with which numbers in lines are sorted by value: "2" before "16"."""
    return re.sub(r"\d+", lambda number: number[0].rjust(12, "0"), line)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def age(timestamp: str) -> str:
    """Return the time since ``timestamp`` (ISO 8601) as text in the largest unit, such as "3 d"."""
    try:
        then = datetime.datetime.fromisoformat(timestamp)
        seconds = (datetime.datetime.now(datetime.timezone.utc) - then).total_seconds()
    except (ValueError, TypeError):
        return "unknown"
    for unit, size in _SECONDS_BY_UNIT.items():
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return "0 s"
