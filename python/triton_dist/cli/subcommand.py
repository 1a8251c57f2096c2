"""Declaration of a verb, so that the help of all reads alike."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COLUMNS = 80
_WITH_COMMAND: dict[str, argparse.ArgumentParser] = {}


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
    """A parser for ``name``, whose help ends with commands to try.

    Args:
        run: does it; returns the exit status.
        takes_command: :func:`split` keeps what follows ``--`` from argparse, which would take it
            for words of the verb where those may be any number.
        aliases: other names of the verb.
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
    """Let the usage of verbs that take a command say so. Called when they have their arguments."""
    for parser in set(_WITH_COMMAND.values()):
        usage = parser.format_usage().removeprefix("usage: ").rstrip()
        indent = " " * len(f"usage: {parser.prog} ")
        parser.usage = f"{usage}\n{indent}[-- COMMAND ...]".replace("%", "%%")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a verb, and the command behind ``--`` if it takes one."""
    if "--" not in words or words[0] not in _WITH_COMMAND:
        return list(words), []
    end = words.index("--")
    return list(words[:end]), list(words[end + 1 :])


def positive(word: str) -> int:
    """An argument that is a number of something, 1 or more."""
    number = int(word) if word.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word!r}: expected an integer, 1 or more")
    return number


def folder(word: str) -> Path:
    """An argument that is a folder, which is there."""
    if not Path(word).expanduser().is_dir():
        raise argparse.ArgumentTypeError(f"{word!r}: there is no such folder")
    return Path(word)


def counted(number: int, thing: str) -> str:
    """``1 record``, ``2 records``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
