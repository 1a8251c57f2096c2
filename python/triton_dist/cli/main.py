"""Finds the verb and runs it."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from triton_dist import __version__, knobs
from triton_dist._warn import printable
from triton_dist.cli import (
    clear,
    compare,
    debug,
    dump,
    env,
    explain,
    export,
    listing,
    pack,
    profile,
    replay,
    report,
    show,
    tune_model,
)
from triton_dist.cli.subcommand import show_commands, split
from triton_dist.errors import CacheWarning, TritonDistError

_USAGE_ERROR = 2
SUBCOMMANDS = (
    listing,
    show,
    explain,
    compare,
    report,
    export,
    replay,
    clear,
    pack,
    dump,
    debug,
    profile,
    tune_model,
    env,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``arguments``, default those of this process; returns the exit status.

    0: done; 1: nothing of what was asked for was found; 2: a mistake in what was asked, or what it
    needs cannot be loaded or written; standard error says what.
    """
    parser = argparse.ArgumentParser(
        prog="triton-dist",
        description="Looks into tuning records, and after the things that they depend on.",
        epilog="`triton-dist VERB --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=f"triton_dist {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="VERB")
    for subcommand in SUBCOMMANDS:
        subcommand.add_to(subcommands)
    show_commands()
    if sys.stdout is None:
        print("triton-dist: standard output is closed", file=sys.stderr)
        return _USAGE_ERROR
    for stream in (sys.stdout, sys.stderr):  # keys may hold what a locale cannot write
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words, command = split(sys.argv[1:] if arguments is None else arguments)
    parsed, rest = parser.parse_known_args(words)
    # argparse reads words that may be any number only once: before an option, or after it.
    if rest and ("words" not in parsed or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.words += rest
    if command:
        parsed.command = command
    with warnings.catch_warnings():
        warnings.simplefilter("always", CacheWarning)
        warnings.showwarning = _show_warning
        try:
            with _kernels_decided(parsed):
                status: int = parsed.run(parsed)
            sys.stdout.flush()
        except BrokenPipeError:  # such as that of `head`, which has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (TritonDistError, OSError) as error:
            print(f"triton-dist: {printable(str(error), keep=chr(10))}", file=sys.stderr)
            return _USAGE_ERROR
    return status


def _kernels_decided(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Set ``TRITON_INTERPRET`` by the rule, for what imports kernels, here or in another process.

    Other subcommands start without torch. Those that compile kernels set the variable themselves.
    """
    command = arguments.subcommand == "profile" and arguments.command
    if not (command or arguments.subcommand == "explain" or getattr(arguments, "stale", False)):
        return nullcontext()
    from triton_dist.runtime.device import interprets_kernels

    interprets, _ = interprets_kernels()
    if interprets == knobs.triton_interpret.get():
        return nullcontext()
    return knobs.having(knobs.triton_interpret.variable, str(int(interprets)))


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Without the line of code, which says nothing to who asked."""
    print(f"triton-dist: {message}", file=sys.stderr)
