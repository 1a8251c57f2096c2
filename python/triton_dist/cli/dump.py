"""``dump``: export the kernels of a program at every compilation level, or compare two kernels."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triton_dist import _files, knobs
from triton_dist.cli import site, text
from triton_dist.cli.subcommand import add_command, add_subcommand, counted
from triton_dist.errors import InvalidArgument

_SASS = "sass"
_COLUMNS = ("kernel", "arch", "warps", "stages", "registers", "stack B", "shared B")


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "dump",
        _run,
        help="run a program and export every kernel that it uses, or compare two kernels",
        description="--to runs COMMAND and exports each Triton or Gluon kernel that COMMAND "
        "compiles or loads from Triton's cache, including kernels of libraries. Each kernel gets a "
        "folder in DIR with <kernel>.ttir to <kernel>.cubin, the machine code <kernel>.sass, and "
        "<kernel>.json, which describes target, signature and options. The exit status is the "
        "status of COMMAND; 1 if COMMAND succeeds but no kernel is exported. --diff compares the "
        "kernels in two of these kernel folders: registers, stack, "
        "shared memory, and the operations of TTGIR, PTX and machine code in each loop and "
        "outside of loops. The exit status of --diff is 1 if the kernels differ.",
        examples=[
            "dump --to kernels -- python train.py",
            "dump --to k --levels ptx -- torchrun t.py",
            "dump --diff kernels/product-0a1b2c kernels/product-1b2c3d",
        ],
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--to", type=Path, metavar="DIR", help="run COMMAND and export to DIR")
    action.add_argument(
        "--diff", type=Path, nargs=2, metavar=("OLD", "NEW"), help="compare two kernels' folders"
    )
    parser.add_argument(
        "--levels", metavar="LEVELS",
        help="levels to export: some of ttir,ttgir,llir,ptx,cubin,sass; cubin is always exported; "
        "default: all",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="with --diff: print JSON")
    add_command(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.diff:
        old, new = arguments.diff
        return diff(old, new, arguments.json)
    if not arguments.command:
        arguments.fail("a command is needed: dump --to DIR -- COMMAND")
    folder = arguments.to.resolve()
    _files.check_writable(folder / "kernel")
    before = set(folder.glob("*/*.json"))
    wanted = _levels(arguments.levels) if arguments.levels else knobs.dump_levels.default
    interpret = knobs.triton_interpret.variable
    variables = {
        knobs.dump_dir.variable: str(folder),
        knobs.dump_levels.variable: ",".join(wanted),
        interpret: knobs.environment().get(interpret) or "0",
    }
    status = site.run(arguments.command, variables)
    descriptions = sorted(folder.glob("*/*.json"))
    rows = [_row(each, _SASS in wanted) for each in descriptions]
    if rows:
        print(*text.table(_COLUMNS, rows, left=("kernel",)), sep="\n", file=sys.stderr)
    new = len(set(descriptions) - before)
    print(f"{folder}: {counted(len(descriptions), 'kernel')}, {new} new", file=sys.stderr)
    return 128 - status if status < 0 else status or int(not descriptions)


def _levels(raw: str) -> tuple[str, ...]:
    try:
        return knobs.dump_levels.parse(raw)
    except ValueError as error:
        raise InvalidArgument("dump", "--levels", raw, knobs.dump_levels.expected) from error


def _row(description: Path, with_sass: bool) -> list[str]:
    """Return the table row of the kernel that the file ``<kernel>.json`` describes. With
    ``with_sass``, also write the kernel's machine code."""
    from triton_dist.runner import files
    from triton_dist.runtime.compiling import facts

    artefact = files.load(description.parent, description.stem)
    if with_sass:
        _files.write(description.with_suffix(f".{_SASS}"), facts.sass(artefact.data).encode())
    options, launch = artefact.metadata.options, artefact.metadata.launch_metadata
    launched = (options.get("num_warps"), options.get("num_stages"))
    used = (*facts.resource_usage(artefact.data), launch.get("shared"))
    return [description.parent.name, f"sm_{artefact.metadata.arch}", *map(str, (*launched, *used))]


_MAX_LISTED_OPERATIONS = 12
_COUNTED_OPTIONS = ("num_warps", "num_stages")


def diff(old: Path, new: Path, as_json: bool) -> int:
    """Print how the kernel in ``new`` differs from the kernel in ``old``. Return 1 if it does.

    Raises:
        InvalidArgument: a folder contains no kernel, or several kernels.
    """
    tree = comparison(old, new)
    print(json.dumps(tree, indent=2) if as_json else "\n".join(_lines(tree)))
    parts = [part for level in tree["levels"].values() for part in level.values()]
    alike = all(a == b for a, b in tree["facts"].values())
    return 0 if alike and all(part["same"] for part in parts) else 1


def comparison(old: Path, new: Path) -> dict[str, Any]:
    """Return the comparison of two kernels as a JSON tree.

    ``facts`` has the old and the new value of registers, options and constants, by name. ``levels``
    has the comparison of each level (such as PTX) that both kernels have, by its parts: each loop,
    and the code outside of loops. ``missing`` has the reason for each level that is not compared.
    """
    from triton_dist.runner.sections import LEVELS_WITH_SECTIONS, Section, sections

    old_file, new_file = _description_in(old), _description_in(new)
    old_facts, new_facts = _facts(old_file), _facts(new_file)
    levels: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for level in LEVELS_WITH_SECTIONS:
        try:
            parts, others = (sections(level, _text(each, level)) for each in (old_file, new_file))
        except (OSError, RuntimeError, subprocess.CalledProcessError) as failure:
            missing[level] = f"{type(failure).__name__}: {failure}"
            continue
        levels[level] = {
            name: _compare_sections(parts.get(name, Section()), others.get(name, Section()))
            for name in [*parts, *(name for name in others if name not in parts)]
        }
    names = [*old_facts, *(name for name in new_facts if name not in old_facts)]
    facts = {name: [old_facts.get(name), new_facts.get(name)] for name in names}
    return {
        "old": str(old_file.parent), "new": str(new_file.parent), "facts": facts, "levels": levels,
        "missing": missing,
    }  # fmt: skip


def _description_in(folder: Path) -> Path:
    """Return the file ``<kernel>.json`` of the only kernel in ``folder`` or its subfolders."""
    found = sorted(folder.glob("*.json")) or sorted(folder.glob("*/*.json"))
    if len(found) != 1:
        there = ", ".join(str(path.parent.relative_to(folder)) for path in found[:8]) or "none"
        expected = f"the folder of one kernel, as runner.export writes it; kernels found: {there}"
        raise InvalidArgument("dump", "--diff", str(folder), expected)
    return found[0]


def _facts(description: Path) -> dict[str, Any]:
    from triton_dist.runner import files
    from triton_dist.runtime.compiling import facts

    artefact = files.load(description.parent, description.stem)
    metadata = artefact.metadata
    found: dict[str, Any] = {"kernel": metadata.function, "arch": f"sm_{metadata.arch}"}
    found |= {name: str(value) for name, value in artefact.constants().items()}
    found |= {name: metadata.options.get(name) for name in _COUNTED_OPTIONS}
    try:
        found["registers"], found["stack B"] = facts.resource_usage(artefact.data)
    except RuntimeError as failure:  # cuobjdump is not installed
        found["registers"] = found["stack B"] = f"not known: {failure}"
    found["shared B"] = metadata.launch_metadata.get("shared")
    return found


def _text(description: Path, level: str) -> str:
    from triton_dist.runtime.compiling import facts

    if level == "sass":
        return facts.sass(description.with_suffix(".cubin").read_bytes())
    return description.with_suffix(f".{level}").read_text(encoding="utf-8")


def _compare_sections(old: Any, new: Any) -> dict[str, Any]:
    """Compare two sections of code: numbers of lines, and operations whose counts differ."""
    before, after = old.operations, new.operations
    changed = sorted(
        (name for name in Counter({**before, **after}) if before[name] != after[name]),
        key=lambda name: (-abs(after[name] - before[name]), name),
    )
    layouts = [line for line in (*old.lines, *new.lines) if line.startswith("#")]
    return {
        "old": len(old.lines),
        "new": len(new.lines),
        "same": old.lines == new.lines,
        "operations": {name: [before[name], after[name]] for name in changed},
        "only_old": [line for line in layouts if line not in new.lines],
        "only_new": [line for line in layouts if line not in old.lines],
    }


def _lines(tree: dict[str, Any]) -> Iterator[str]:
    yield from (f"{name}  {tree[name]}" for name in ("old", "new"))
    for name, (old, new) in tree["facts"].items():
        yield f"  {name:<16} {old!s:>12}" + ("" if old == new else f" -> {new}")
    for level, parts in tree["levels"].items():
        for name, part in parts.items():
            yield f"{level}, {name}: {_numbers(part)}"
            yield from (f"  - {line}" for line in part["only_old"])
            yield from (f"  + {line}" for line in part["only_new"])
            changed = list(part["operations"].items()) if name != "layouts" else []
            for operation, (old, new) in changed[:_MAX_LISTED_OPERATIONS]:
                yield f"  {old:5} -> {new:<5} {operation}"
            if len(changed) > _MAX_LISTED_OPERATIONS:
                yield f"  and {len(changed) - _MAX_LISTED_OPERATIONS} more; --json has all"
    yield from (f"{level}: not compared: {why}" for level, why in tree["missing"].items())


def _numbers(part: dict[str, Any]) -> str:
    old, new = part["old"], part["new"]
    if part["same"]:
        return f"{new}, the same"
    return f"{old} -> {new}" if old != new or part["operations"] else f"{new}, other operands"
