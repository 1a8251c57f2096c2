"""``pack``: create, show, compare, merge and install packs of tuning records and kernels."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from triton_dist import _archive, _files, knobs
from triton_dist._archive import RECORDS_SUFFIX, SUFFIX, Pack, PackContents, sha256
from triton_dist._tuning.store import ReadOnlyStore
from triton_dist._tuning.store.packs import (
    differences,
    merge_packs,
    pack_contents,
    read_verified,
    records_of,
)
from triton_dist._tuning.values import TuningRecord
from triton_dist.cli import cache, text
from triton_dist.cli.subcommand import add_command, add_subcommand, counted
from triton_dist.errors import PackRefused

_NAMES = f"{SUFFIX}, or in {RECORDS_SUFFIX} for the records of one function and GPU model as text"


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "pack",
        _run,
        help="ship records and kernels in one file; show, diff, merge, verify, import such files",
        description="Writes a pack: the file FILE with the winners of each FUNCTION. If a key has "
        "several records or versions, writes the latest. A record that was tuned under special "
        "settings, such as a debug mode, is written only if the key has no other record. --kernels "
        "runs COMMAND without tuning (frozen mode), and adds every kernel that the processes of "
        "COMMAND load. If the first word is an action, the other words are packs. show: list the "
        "contents. diff: compare two packs. merge: write the contents of all packs into FILE. "
        "verify: read each pack and check every hash. import: verify each pack and copy it to "
        "packs/ in TRITON_DIST_CACHE_DIR, where every program of this user finds it.",
        examples=[
            "pack matmul --out matmul.tdpack",
            "pack matmul --kernels --out model.tdpack -- python warm_up.py",
            "pack show model.tdpack",
            "pack diff old.tdpack new.tdpack",
            "pack merge rank-0.tdpack rank-1.tdpack --out model.tdpack",
            "pack verify model.tdpack",
            "pack import model.tdpack",
        ],
        aliases=("packs",),
    )
    parser.add_argument(
        "words", metavar="FUNCTION", nargs="*",
        help="function names, optionally with the module; or an action and packs",
    )  # fmt: skip
    parser.add_argument(
        "--cache", type=Path, help="folder of the records; default: TRITON_DIST_CACHE_DIR"
    )
    parser.add_argument("--kernels", action="store_true", help="add kernels that COMMAND loads")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"file to write; the name ends in {_NAMES}"
    )
    parser.add_argument("--json", action="store_true", help="show: print JSON")
    add_command(parser)


def _run(arguments: argparse.Namespace) -> int:
    action = _ACTIONS.get(arguments.words[0] if arguments.words else "")
    if bool(arguments.command) != arguments.kernels or (action and arguments.kernels):
        arguments.fail("--kernels and a command need each other: --kernels --out FILE -- COMMAND")
    if action is None:
        if not (arguments.words or arguments.kernels):
            arguments.fail("expected a FUNCTION, --kernels, or an action: " + ", ".join(_ACTIONS))
        action = _create
    else:
        arguments.files = [Path(word) for word in arguments.words[1:]]
        if len(arguments.files) != 2 if action is _diff else not arguments.files:
            arguments.fail("diff takes two packs" if action is _diff else "expected a pack")
    if (arguments.out is None) == (action in (_create, _merge)):
        arguments.fail("--out FILE is required to create or merge packs, and not allowed otherwise")
    if arguments.out and arguments.out.suffix not in (SUFFIX, RECORDS_SUFFIX):
        arguments.fail(f"--out {arguments.out}: expected a name that ends in {_NAMES}")
    status: int = action(arguments)
    return status


def _create(arguments: argparse.Namespace) -> int:
    folder = arguments.cache or knobs.cache_dir.get()
    store = ReadOnlyStore(folder) if arguments.cache else cache.user_store()
    chosen: list[TuningRecord] = []
    for name in arguments.words:
        found = [stored.record for stored in cache.records_of([store], name)]
        if not found:
            print(f"No record of {name} in {folder}.")
            return 1
        chosen += found
    parts = [pack_contents(chosen)]
    if arguments.kernels:
        _files.check_writable(arguments.out)
        with tempfile.TemporaryDirectory(prefix="triton_dist-pack-") as loaded:
            variables = {knobs.record_kernels.variable: loaded, knobs.autotune_frozen.variable: "1"}
            known, interpret = knobs.environment(), knobs.triton_interpret.variable
            variables[interpret] = known.get(interpret) or "0"
            status = subprocess.run(arguments.command, env=known | variables).returncode
            if status:
                print(f"The command exited with status {status}: {arguments.out} is not written.")
                return 1
            parts += _archive.contents_of_folder(Path(loaded))
    return _write(arguments.out, merge_packs(parts))


def _write(out: Path, contents: PackContents) -> int:
    data = _archive.write(out, contents)
    packed = Pack(out, data)
    text.print_lines(f"{out}: {_counts(packed)}, {len(data) / 1e3:.0f} kB", *_functions(packed))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    packs = [Pack(path) for path in arguments.files]
    if arguments.json:
        text.print_json([_tree(packed) for packed in packs])
        return 0
    for packed in packs:
        text.print_lines(f"{packed.path}: {_counts(packed)}", *_functions(packed))
        for digest, entry in sorted(packed.kernels.items(), key=lambda each: each[1].name):
            built_for = ", ".join(
                entry.facts[fact] for fact in ("target", "python", "triton") if fact in entry.facts
            )
            text.print_lines(f"  {digest[:12]}  {entry.name}  ({built_for})")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    lines = list(differences(*map(Pack, arguments.files)))
    text.print_lines(*(lines or ["no difference"]))
    return 1 if lines else 0


def _merge(arguments: argparse.Namespace) -> int:
    return _write(arguments.out, merge_packs([Pack(path).contents() for path in arguments.files]))


def _verify(arguments: argparse.Namespace) -> int:
    """Verify all packs. Return exit status 1 if a pack is damaged."""
    num_damaged = 0
    for path in arguments.files:
        try:
            text.print_lines(f"{path}: good: {_counts(read_verified(path))}")
        except PackRefused as error:
            text.print_lines(str(error))
            num_damaged += 1
    return 1 if num_damaged else 0


def _import(arguments: argparse.Namespace) -> int:
    folder = knobs.cache_dir.get() / "packs"
    written: dict[Path, Path] = {}
    for path in arguments.files:
        packed = read_verified(path)
        contents = packed.contents()
        target = folder / f"{path.stem}{SUFFIX}"
        if written.get(target, path) != path:  # two of the packs have equal file names
            target = folder / f"{path.stem}-{sha256(contents.to_bytes())[:8]}{SUFFIX}"
        written[target] = path
        _archive.write(target, contents)
        text.print_lines(f"{target}: {_counts(packed)}")
    return 0


def _tree(packed: Pack) -> dict[str, Any]:
    records = [
        {"function": r.key.full_name, "key": r.key.text, "hardware": r.key.hardware,
         "version": r.fingerprint.version, "config": r.best.config}
        for r in records_of(packed)
    ]  # fmt: skip
    kernels = {digest: vars(entry) for digest, entry in packed.kernels.items()}
    return {"pack": str(packed.path), "records": records, "kernels": kernels}


def _functions(packed: Pack) -> list[str]:
    """Return a line with the number of records for each function, version and GPU model."""
    functions = [
        f"{r.key.full_name}, version {r.fingerprint.version}, on {r.fingerprint.hardware['gpu']}"
        for r in records_of(packed)
    ]
    return [
        f"  {counted(functions.count(each), 'record')} of {each}" for each in sorted(set(functions))
    ]


def _counts(packed: Pack) -> str:
    modules = sum(entry.is_module for entry in packed.kernels.values())
    parts = [
        counted(len(records_of(packed)), "record"),
        counted(len(packed.kernels) - modules, "kernel"),
        *([counted(modules, "native module")] if modules else []),
    ]
    return ", ".join(parts)


_ACTIONS = {"show": _show, "diff": _diff, "merge": _merge, "verify": _verify, "import": _import}
