"""Declare subcommands with a uniform help text."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

COLUMNS = 80


class Parser(argparse.ArgumentParser):
    """A parser whose error messages end with its epilog, which contains examples."""

    def error(self, message: str) -> NoReturn:
        super().error(f"{message}\n{self.epilog}")


def add_subcommand(
    subcommands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    examples: Sequence[str],
    aliases: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Add the subcommand ``name`` and return its parser. Its help text ends with ``examples``.

    Args:
        run: runs the subcommand with the parsed arguments and returns the exit status. To report a
            usage error and exit, ``run`` calls ``arguments.fail(message)``.
        aliases: other names of the subcommand.
    """
    lines = "\n".join(f"  triton-dist {example}" for example in examples)
    parser: argparse.ArgumentParser = subcommands.add_parser(
        name,
        aliases=aliases,
        help=help,
        description=textwrap.fill(description, COLUMNS),
        epilog=f"example{'s' * (len(examples) > 1)}:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, fail=parser.error)
    return parser


def add_command(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the program after ``--``. ``main`` takes these words from the command
    line before argparse parses it."""
    parser.add_argument("command", nargs="*", type=_not_after_dashes, metavar="-- COMMAND",
                        help="the program to run, and its arguments")  # fmt: skip


def _not_after_dashes(word: str) -> str:
    raise argparse.ArgumentTypeError(f"unexpected {word!r}: write -- before the program to run")


def positive(word: str) -> int:
    """Parse an integer argument of 1 or more."""
    number = int(word) if word.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word!r}: expected an integer, 1 or more")
    return number


def folder(word: str) -> Path:
    """Parse an argument that names an existing folder."""
    if not Path(word).expanduser().is_dir():
        raise argparse.ArgumentTypeError(f"{word!r}: no such folder")
    return Path(word)


def counted(number: int, thing: str) -> str:
    """Return the number with its noun: ``1 record``, ``2 records``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
