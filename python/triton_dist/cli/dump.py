"""``dump``: run a program and export every kernel that it uses, at every level; compare two."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton_dist
from triton_dist import _files, knobs
from triton_dist.cli import levels, site
from triton_dist.cli.verb import add_verb, counted
from triton_dist.errors import InvalidArgument

_SASS = "sass"
_ROW = "{:<40} {:>5} {:>5} {:>6} {:>9} {:>7} {:>8}"
_HEAD = ("kernel", "arch", "warps", "stages", "registers", "stack B", "shared B")


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "dump",
        _run,
        help="run a program and export every kernel that it uses; compare two",
        description="Runs COMMAND, and writes each Triton or Gluon kernel that it compiles or "
        "takes from Triton's cache into a folder of its own in DIR: <kernel>.ttir to "
        "<kernel>.cubin, its machine code <kernel>.sass, and <kernel>.json, what it was made for. "
        "Kernels of libraries too; the program need not know. Exits with the status of COMMAND. "
        "--diff compares two of those folders instead: registers, stack, shared memory, and the "
        "operations of TTGIR, PTX and machine code in each loop and outside of loops; 1 if they "
        "differ.",
        examples=[
            "dump --to kernels -- python train.py",
            "dump --to k --levels ptx -- torchrun t.py",
            "dump --diff kernels/product-0a1b2c kernels/product-1b2c3d",
        ],
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", type=Path, metavar="DIR")
    what.add_argument("--diff", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument(
        "--levels", metavar="LEVELS",
        help="some of ttir,ttgir,llir,ptx,cubin,sass; the cubin is always there (default: all)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="of --diff: for programs")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --")
    parser.set_defaults(fail=parser.error)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.diff:
        old, new = arguments.diff
        return levels.diff(old, new, arguments.json)
    if not arguments.command:
        arguments.fail("a command is needed: dump --to DIR -- COMMAND")
    folder = arguments.to.resolve()
    _files.check_writable(folder / "kernel")
    before = set(folder.glob("*/*.json"))
    wanted = _levels(arguments.levels) if arguments.levels else knobs.dump_levels.default
    known = knobs.environment()
    package = str(Path(triton_dist.__file__).parents[1])
    paths = [str(Path(str(site.__file__)).parent), known.get("PYTHONPATH", ""), package]
    variables = {
        knobs.dump_dir.variable: str(folder),
        knobs.dump_levels.variable: ",".join(wanted),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        knobs.triton_interpret.variable: known.get(knobs.triton_interpret.variable) or "0",
    }
    status = subprocess.run(arguments.command, env=known | variables).returncode
    sides = sorted(folder.glob("*/*.json"))
    rows = [_row(side, _SASS in wanted) for side in sides]
    if rows:
        print("\n".join(_ROW.format(*row) for row in (_HEAD, *rows)), file=sys.stderr)
    new = len(set(sides) - before)
    print(f"{folder}: {counted(len(sides), 'kernel')}, {new} new", file=sys.stderr)
    return 128 - status if status < 0 else status or int(not sides)


def _levels(raw: str) -> tuple[str, ...]:
    try:
        return knobs.dump_levels.parse(raw)
    except ValueError as error:
        raise InvalidArgument("dump", "--levels", raw, knobs.dump_levels.expected) from error


def _row(side: Path, with_sass: bool) -> tuple[object, ...]:
    """Columns of one kernel; its machine code is written beside it."""
    from triton_dist.runner import files
    from triton_dist.runtime.compiling import facts

    artefact = files.load(side.parent, side.stem)
    if with_sass:
        _files.write(side.with_suffix(f".{_SASS}"), facts.sass(artefact.data).encode())
    options, launch = artefact.about.options, artefact.about.launch
    return (
        side.parent.name, f"sm_{artefact.about.arch}", options.get("num_warps"),
        options.get("num_stages"), *facts.resource_usage(artefact.data), launch.get("shared"),
    )  # fmt: skip
