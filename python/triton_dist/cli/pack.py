"""``pack``: make one file of a function's records, and of kernels, to be shipped."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from triton_dist import _archive, _files, knobs
from triton_dist._archive import SUFFIX, Contents, Pack
from triton_dist._tuning.store import ReadOnlyStore
from triton_dist._tuning.store.archive import COLUMNS, contents_of, latest, merged
from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.values import TuningRecord, pack
from triton_dist.cli import cache, text
from triton_dist.cli.verb import add_verb, counted
from triton_dist.errors import NoSuchFunction


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "pack",
        _run,
        help="make one file of records, and of kernels, to be shipped",
        description="Writes the winners of FUNCTION on one model of GPU into FILE. The file is "
        "used where it lies in packs/ of a folder of TRITON_DIST_AUTOTUNE_READONLY_DIRS, under a "
        "name that begins with that of the function and a dot, by a function of the same module "
        "that declares the same version. Of several records of a key, and of several versions, the "
        "latest counts; one that was tuned under settings, as a debugging run is, only where "
        "there is no other. With --kernels COMMAND is run, with tuning forbidden, and FILE gets "
        "every kernel that its processes load besides the winners of any number of functions; its "
        "name ends with .tdpack.",
        examples=[
            "pack matmul --out packs/matmul.H200.json",
            "pack matmul --kernels --out model.tdpack -- python warm_up.py",
        ],
        takes_command=True,
    )
    parser.add_argument("function", metavar="FUNCTION", nargs="*", help="name, or with its module")
    parser.add_argument("--cache", type=Path, help="default: TRITON_DIST_CACHE_DIR")
    parser.add_argument("--gpu", help="model of GPU; needed if there are records of several")
    parser.add_argument("--kernels", action="store_true", help="those that COMMAND loads")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.set_defaults(fail=parser.error, command=[])


def _run(arguments: argparse.Namespace) -> int:
    folder = arguments.cache or knobs.cache_dir.get()
    store = ReadOnlyStore(folder) if arguments.cache else cache.user_store()
    if bool(arguments.command) != arguments.kernels:
        arguments.fail("kernels are those that a command loads: --kernels --out FILE -- COMMAND")
    if not arguments.kernels and len(arguments.function) != 1:
        arguments.fail("one FUNCTION is needed, or --kernels")
    chosen: list[TuningRecord] = []
    for name in arguments.function:
        found = [stored.record for stored in cache.records_of(store, name)]
        if not found:
            print(f"No record of {name} in {folder}.")
            return 1
        records = _chosen(name, found, arguments.gpu)
        chosen += records
        first = records[0]
        text.say(
            f"{arguments.out}: {counted(len(records), 'record')} of {first.key.full_name}, version "
            f"{first.fingerprint.version}, on {_gpu(first)}; {len(found) - len(records)} left out"
        )
    if arguments.kernels:
        return _with_kernels(arguments.out, contents_of(chosen), arguments.command)
    _files.write(arguments.out, readable_json(pack(chosen), COLUMNS).encode("ascii"))
    if not arguments.out.name.startswith(f"{chosen[0].key.function_name}."):
        print(f"It is looked for under a name that begins with {chosen[0].key.function_name}.")
    return 0


def _with_kernels(out: Path, records: Contents, command: list[str]) -> int:
    """Run ``command``, and write what its processes loaded; its status if it fails."""
    _files.check_writable(out)
    with tempfile.TemporaryDirectory(prefix="triton_dist-pack-") as folder:
        told = {knobs.record_kernels.variable: folder, knobs.autotune_frozen.variable: "1"}
        known, interpret = knobs.environment(), knobs.triton_interpret.variable
        ran = subprocess.run(command, env=known | told | {interpret: known.get(interpret) or "0"})
        if ran.returncode:
            print(f"The command ended with status {ran.returncode}: {out} is not written.")
            return 1
        parts = [Pack(each).contents() for each in sorted(Path(folder).glob(f"*{SUFFIX}"))]
    contents = merged([records, *parts])
    size = _archive.write(out, contents)
    modules = sum(kernel.entry.is_module for kernel in contents.kernels.values())
    print(
        f"{out}: {counted(len(contents.kernels) - modules, 'kernel')}, "
        f"{counted(modules, 'native module')}, {size / 1e3:.0f} kB"
    )
    if out.suffix != SUFFIX:
        print(f"It is looked for under a name that ends with {SUFFIX}.")
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
    return latest(name, found)


def _gpu(record: TuningRecord) -> str:
    return record.fingerprint.hardware.get("gpu", "no gpu")
