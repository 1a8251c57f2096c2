"""Declaration of a verb, so that the help of all reads alike."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

COLUMNS = 80


def add_verb(
    verbs: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    examples: Sequence[str],
    takes_command: bool = False,
) -> argparse.ArgumentParser:
    """A parser for ``name``, whose help ends with commands to try.

    Args:
        run: does it; returns the exit status.
        takes_command: words after ``--`` are another program's, in ``command``.
    """
    lines = "\n".join(f"  triton-dist {example}" for example in examples)
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, COLUMNS),
        epilog=f"example{'s' * (len(examples) > 1)}:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, takes_command=takes_command)
    return parser


def counted(number: int, thing: str) -> str:
    """``1 record``, ``2 records``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
