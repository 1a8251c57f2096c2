"""``packs``: look into packs with kernels, merge, check and install them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from triton_dist import _archive, knobs
from triton_dist._archive import SUFFIX, Entry, Pack, sha256
from triton_dist._tuning.store.archive import differences, merged, records_of, verified
from triton_dist._tuning.values import codec
from triton_dist.cli import text
from triton_dist.cli.verb import add_verb, counted
from triton_dist.errors import PackRefused


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "packs",
        _run,
        help="show, diff, merge, verify or import packs with kernels",
        description="show: what is in FILE. diff: what the second FILE has besides, lacks, or has "
        "otherwise. merge: all of every FILE in one, the same bytes in whatever order they are "
        "named. verify: reads each FILE to the end, and compares every hash. import: verifies "
        "each FILE and puts it where every program of this user looks for packs, packs/ of "
        "TRITON_DIST_CACHE_DIR.",
        examples=[
            "packs show model.tdpack",
            "packs diff old.tdpack new.tdpack",
            "packs merge rank-0.tdpack rank-1.tdpack --out model.tdpack",
            "packs verify model.tdpack",
            "packs import model.tdpack",
        ],
    )
    parser.add_argument("action", choices=sorted(_ACTIONS))
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="of merge", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="of show: for programs")
    parser.set_defaults(fail=parser.error)


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.out is None) == (arguments.action == "merge"):
        arguments.fail("merge, and nothing else, takes --out FILE")
    if arguments.action == "diff" and len(arguments.files) != 2:
        arguments.fail("diff takes two files")
    status: int = _ACTIONS[arguments.action](arguments)
    return status


def _show(arguments: argparse.Namespace) -> int:
    packs = [Pack(path) for path in arguments.files]
    if arguments.json:
        print(json.dumps([_facts(packed) for packed in packs], indent=2))
        return 0
    for packed in packs:
        records = records_of(packed)
        text.say(f"{packed.path}: {_counts(packed)}")
        functions = sorted({(r.key.full_name, r.fingerprint.version, _gpu(r)) for r in records})
        for name, version, gpu in functions:
            keys = sum((r.key.full_name, _gpu(r)) == (name, gpu) for r in records)
            text.say(f"  {counted(keys, 'record')} of {name}, version {version}, on {gpu}")
        for digest, entry in sorted(packed.kernels.items(), key=lambda each: each[1].name):
            for_what = ", ".join(
                entry.facts[fact] for fact in ("target", "python", "triton") if fact in entry.facts
            )
            text.say(f"  {digest[:12]}  {entry.name}  ({for_what})")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    lines = list(differences(*map(Pack, arguments.files)))
    text.say(*(lines or ["no difference"]))
    return 1 if lines else 0


def _merge(arguments: argparse.Namespace) -> int:
    contents = merged([Pack(path).contents() for path in arguments.files])
    size = _archive.write(arguments.out, contents)
    trees = [codec.loads(data) for data in contents.records.values()]
    records = sum(len(group["results"]) for tree in trees for group in tree["groups"])
    counts = _counted(records, [kernel.entry for kernel in contents.kernels.values()])
    print(f"{arguments.out}: {counts}, {size / 1e3:.0f} kB")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """All files are looked at; 1 if one is refused."""
    refused = 0
    for path in arguments.files:
        try:
            packed = verified(path)
        except PackRefused as error:
            text.say(str(error))
            refused += 1
        else:
            text.say(f"{path}: good: {_counts(packed)}")
    return 1 if refused else 0


def _import(arguments: argparse.Namespace) -> int:
    folder = knobs.cache_dir.get() / "packs"
    written: dict[Path, Path] = {}
    for path in arguments.files:
        packed = verified(path)
        contents = packed.contents()
        there = folder / f"{path.stem}{SUFFIX}"
        if written.get(there, path) != path:  # a second input of this name
            there = folder / f"{path.stem}-{sha256(contents.to_bytes())[:8]}{SUFFIX}"
        written[there] = path
        _archive.write(there, contents)
        text.say(f"{there}: {_counts(packed)}")
    return 0


def _facts(packed: Pack) -> dict[str, Any]:
    records = [
        {"function": r.key.full_name, "key": r.key.text, "hardware": r.key.hardware,
         "version": r.fingerprint.version, "config": r.best.config}
        for r in records_of(packed)
    ]  # fmt: skip
    kernels = {digest: vars(entry) for digest, entry in packed.kernels.items()}
    return {"pack": str(packed.path), "records": records, "kernels": kernels}


def _counts(packed: Pack) -> str:
    return _counted(len(records_of(packed)), packed.kernels.values())


def _counted(records: int, entries: Collection[Entry]) -> str:
    modules = sum(entry.is_module for entry in entries)
    kernels = counted(len(entries) - modules, "kernel")
    modules_too = f", {counted(modules, 'native module')}" if modules else ""
    return f"{counted(records, 'record')}, {kernels}{modules_too}"


def _gpu(record: Any) -> str:
    return str(record.fingerprint.hardware.get("gpu"))


_ACTIONS = {
    "show": _show,
    "diff": _diff,
    "merge": _merge,
    "verify": _verify,
    "import": _import,
}
