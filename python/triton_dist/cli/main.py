"""Parse the command line and run the subcommand."""

from __future__ import annotations

import argparse
import io
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

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
    remote,
    replay,
    report,
    show,
    status,
    tune_model,
)
from triton_dist.cli.subcommand import Parser
from triton_dist.errors import CacheWarning, TritonDistError

_USAGE_ERROR = 2
SUBCOMMANDS = (
    listing,
    status,
    show,
    explain,
    compare,
    report,
    export,
    replay,
    clear,
    pack,
    remote,
    dump,
    debug,
    profile,
    tune_model,
    env,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (default: ``sys.argv``) and return the exit status.

    0: success. 1: nothing was found, a comparison found differences, ``pack verify`` found a
    damaged pack, or the program of ``pack --kernels`` failed. 2: the arguments are wrong, or a
    required file cannot be read or written; standard error has the message. ``debug``, ``dump`` and
    ``profile`` return the exit status of their program, or 1 if there is nothing to report.
    """
    parser = full_parser()
    if "_ARGCOMPLETE" in knobs.environment():  # the shell asks for completions
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser, exit_method=sys.exit)
    if sys.stdout is None:
        print("triton-dist: standard output is closed", file=sys.stderr)
        return _USAGE_ERROR
    for stream in (sys.stdout, sys.stderr):  # keys may contain characters that these cannot encode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words, command = list(sys.argv[1:] if arguments is None else arguments), list[str]()
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    parsed, rest = parser.parse_known_args(words)
    # With nargs="*", argparse leaves the words after an option in ``rest`` if others precede it.
    if rest and ("words" not in parsed or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.words += rest
    if command and "command" not in parsed:
        parser.error(f"{parsed.subcommand} takes no program after --")
    if command:
        parsed.command = command
    with warnings.catch_warnings():
        warnings.simplefilter("always", CacheWarning)
        warnings.showwarning = _show_warning
        try:
            with _with_interpret_variable(parsed):
                status: int = parsed.run(parsed)
            sys.stdout.flush()
        except BrokenPipeError:  # the program that reads the pipe, such as `head`, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (TritonDistError, OSError) as error:
            print(f"triton-dist: {printable(str(error), keep=chr(10))}", file=sys.stderr)
            return _USAGE_ERROR
    return status


def full_parser() -> argparse.ArgumentParser:
    """Return the parser of ``triton-dist`` with all subcommands."""
    parser = Parser(
        prog="triton-dist",
        description="Inspect, compare and ship tuning records; debug and profile programs.",
        epilog="`triton-dist SUBCOMMAND --help` prints examples, such as: triton-dist list",
    )
    packages = [f"{name} {env.installed_version(name)}" for name in ("torch", "triton")]
    parser.add_argument(
        "--version",
        action="version",
        help="print the versions of triton_dist, torch, triton and Python",
        version=", ".join(
            [f"triton_dist {__version__}", *packages, f"Python {platform.python_version()}"]
        ),
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for subcommand in SUBCOMMANDS:
        subcommand.add_to(subcommands)
    return parser


def _with_interpret_variable(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Context manager that sets ``TRITON_INTERPRET`` for subcommands that import kernels. Other
    subcommands do not import torch, or set the variable themselves."""
    command = arguments.subcommand == "profile" and arguments.command
    if not (command or arguments.subcommand == "explain" or getattr(arguments, "stale", False)):
        return nullcontext()
    from triton_dist.runtime.device import interprets_kernels

    interprets, _ = interprets_kernels()
    if interprets == knobs.triton_interpret.get():
        return nullcontext()
    return knobs.with_value(knobs.triton_interpret.variable, str(int(interprets)))


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"triton-dist: {message}", file=sys.stderr)
