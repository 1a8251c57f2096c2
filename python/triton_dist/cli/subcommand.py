"""Declare subcommands with a uniform help text."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

COLUMNS = 80
_WITH_COMMAND: dict[str, argparse.ArgumentParser] = {}


class Parser(argparse.ArgumentParser):
    """A parser whose errors end with its epilog: examples of correct usage."""

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
    takes_command: bool = False,
    aliases: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Return a parser for ``name`` whose help ends with examples.

    Args:
        run: runs the subcommand and returns the exit status.
        takes_command: a command follows ``--``. :func:`split` removes it before argparse runs,
            which would add it to a positional argument with ``nargs="*"``.
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
    parser.set_defaults(run=run)
    if takes_command:
        _WITH_COMMAND.update(dict.fromkeys((name, *aliases), parser))
    return parser


def show_commands() -> None:
    """Add ``-- COMMAND`` to the usage of subcommands that take one; call it after ``add_to``."""
    for parser in set(_WITH_COMMAND.values()):
        usage = parser.format_usage().removeprefix("usage: ").rstrip()
        indent = " " * len(f"usage: {parser.prog} ")
        parser.usage = f"{usage}\n{indent}[-- COMMAND ...]".replace("%", "%%")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of the subcommand and, if it takes a command, the words after ``--``."""
    if "--" not in words or words[0] not in _WITH_COMMAND:
        return list(words), []
    end = words.index("--")
    return list(words[:end]), list(words[end + 1 :])


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
