"""``pack``: make one file of a function's records, to be shipped."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from triton_dist import knobs
from triton_dist._tuning.store import FileStore
from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.values import Key, TuningRecord, pack
from triton_dist.cli import cache
from triton_dist.cli.verb import add_verb, counted
from triton_dist.errors import NoSuchFunction

_COLUMNS = 200  # a result on one line


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "pack",
        _run,
        help="make one file of the records of a function, to be shipped",
        description="Writes the winners of FUNCTION on one model of GPU into FILE. The file is "
        "used where it lies in packs/ of a folder of TRITON_DIST_AUTOTUNE_READONLY_DIRS, under a "
        "name that begins with that of the function and a dot, by a function of the same module "
        "that declares the same version. Of several records of a key, and of several versions, the "
        "latest counts.",
        examples=["pack matmul --out packs/matmul.H200.json"],
    )
    parser.add_argument("function", metavar="FUNCTION", help="its name, or with its module")
    parser.add_argument("--cache", type=Path, help="default: TRITON_DIST_CACHE_DIR")
    parser.add_argument("--gpu", help="model of GPU; needed if there are records of several")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")


def _run(arguments: argparse.Namespace) -> int:
    folder, name = arguments.cache or knobs.cache_dir.get(), arguments.function
    found = [stored.record for stored in cache.records_of(FileStore(folder), name)]
    if not found:
        print(f"No record of {name} in {folder}.")
        return 1
    records = _chosen(name, found, arguments.gpu)
    text = readable_json(pack(records), _COLUMNS)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text, encoding="ascii")
    first = records[0]
    print(
        f"{arguments.out}: {counted(len(records), 'record')} of {first.key.full_name}, version "
        f"{first.fingerprint.version}, on {_gpu(first)}; {len(found) - len(records)} left out"
    )
    if not arguments.out.name.startswith(f"{first.key.function_name}."):
        print(f"It is looked for under a name that begins with {first.key.function_name}.")
    return 0


def _chosen(name: str, found: list[TuningRecord], gpu: str | None) -> list[TuningRecord]:
    """The latest record of each key, of one function, GPU and version."""
    for what, of, wanted, remedy in (
        ("functions", lambda record: record.key.full_name, None, "Name it with its module"),
        ("models of GPU", _gpu, gpu, "Name one: --gpu"),
    ):
        there = {of(record) for record in found}
        if len(there if wanted is None else there & {wanted}) != 1:
            listed = ", ".join(sorted(there))
            raise NoSuchFunction(name, f"there are records of these {what}: {listed}", remedy)
        found = [record for record in found if wanted in (None, of(record))]
    found.sort(key=lambda record: record.timestamp)
    version = found[-1].fingerprint.version
    if not version:
        raise NoSuchFunction(
            name,
            "it declares no version, by which a shipped record could be matched",
            "Decorate it with autotune(..., version='1'), and tune again",
        )
    return _latest(record for record in found if record.fingerprint.version == version)


def _latest(records: Iterable[TuningRecord]) -> list[TuningRecord]:
    latest: dict[Key, TuningRecord] = {record.key: record for record in records}
    return list(latest.values())


def _gpu(record: TuningRecord) -> str:
    return record.fingerprint.hardware.get("gpu", "no gpu")
