"""``explain``: why each record of a function is or is not used."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from triton_dist import knobs
from triton_dist._tuning.store import LayeredStore
from triton_dist._tuning.values import (
    Fingerprint,
    Key,
    Origin,
    TuningRecord,
    validity,
)
from triton_dist.cli import cache, subject
from triton_dist.tune import AutoTuner

_FOUND, _NOTHING = 0, 1


def add_to(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "explain",
        help="why the records of a function are or are not used",
        description="Prints each record of FUNCTION: key, winner, date, file, and whether it would "
        "be used now; if not, what differs, as recorded and as it is. The module is imported, so "
        "that source and config space are compared; set TRITON_INTERPRET and the like as in the "
        "run. With a bare name the records are listed and nothing is compared. Status 0: a record "
        "would be used (bare name: there is one), 1: none, 2: a mistake.",
    )
    parser.add_argument(
        "function", metavar="FUNCTION", help="package.module:function, or a bare name"
    )
    parser.add_argument("--module", help="where the function is: a dotted name or a .py file")
    parser.add_argument(
        "--world-size", type=int, help="ranks that tune together; default: as recorded"
    )
    parser.add_argument(
        "--local-world-size", type=int, help="ranks on this host; default: as recorded"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    module, _, name = arguments.function.rpartition(":")
    module = arguments.module or module
    store = cache.with_packs()
    if not module:
        return _list(store, name)
    ranks = {
        fact: str(value)
        for fact, value in (
            ("world_size", arguments.world_size),
            ("local_world_size", arguments.local_world_size),
        )
        if value is not None
    }
    return _compare(store, subject.load(module, name), ranks)


def _list(store: LayeredStore, name: str) -> int:
    """What there is; nothing is known about the function itself."""
    records = list(cache.records_of(store, name))
    if not records:
        return _none_of(name)
    for record, where in records:
        print(*_heading(record, where), sep="\n")
    module = next((record.key.module for record, _ in records if record.key.module), "MODULE")
    print(
        f"{len(records)} record(s) of {name}. Nothing was compared: a bare name says not where the "
        f"function is. To compare: python -m triton_dist explain {name} --module {module}"
    )
    return _FOUND


def _compare(store: LayeredStore, tuned: AutoTuner, ranks: Mapping[str, str]) -> int:
    origin, live = tuned.origin(), tuned.fingerprint()
    used = count = 0
    for key in _keys(store, origin):
        taken = ""
        for record, where in store.find(key):
            now = dataclasses.replace(live, topology=_topology(record, live, ranks))
            found = validity(record, now, tuned.config_space, knobs.autotune_version_check.get())
            print(*_heading(record, where), sep="\n")
            if found.reasons:
                print(*(f"  not used: {reason}" for reason in found.reasons), sep="\n")
            elif taken:
                print(f"  not used: {taken} comes first")
            else:
                taken = where
                unless = tuned.prune_fn is not None and record.shipped
                print("  used" + ", unless prune_fn drops the winner" * unless)
                print(*(f"  accepted: {each}\n" for each in found.tolerated), sep="", end="")
            count += 1
        used += bool(taken)
    if count == 0:
        return _none_of(origin.function)
    if knobs.autotune_always_tune.get():
        print(f"{knobs.autotune_always_tune.variable} is set: it is tuned again in any case.")
    group = " ".join(f"{name} {value}" for name, value in ranks.items()) or "as many as recorded"
    print(f"{count} record(s) of {origin.function}, {used} used. Ranks: {group}.")
    return _FOUND if used else _NOTHING


def _keys(store: LayeredStore, origin: Origin) -> Iterator[Key]:
    """The keys that records of this function have, as a tuner would look for them."""
    seen = set()
    full_name = f"{origin.module}.{origin.function}"
    for record, _ in store.records():
        if record.key.function in (origin.function, full_name):
            key = Key(
                origin.function,
                record.key.text,
                record.key.hardware,
                origin.module,
                origin.signature,
            )
            if key not in seen:
                seen.add(key)
                yield key


def _topology(
    record: TuningRecord, live: Fingerprint, ranks: Mapping[str, str]
) -> Mapping[str, str]:
    """This process is alone: the group that would call the function is taken to be the recorded
    one."""
    recorded = record.fingerprint.topology
    return {**live.topology, **recorded, **ranks}


def _heading(record: TuningRecord, where: str) -> list[str]:
    best, tuned = record.best, f"{record.timestamp}, in {record.seconds:.1f} s"
    if record.shipped:
        versions = (f"{name} {text}" for name, text in record.fingerprint.software.items())
        tuned = f"{record.timestamp}, with {', '.join(versions)}; shipped as version "
        tuned += record.fingerprint.version
    return [
        f"{record.key.full_name}, key {record.key}",
        f"  on      {record.key.hardware}",
        f"  winner  {best}, {best.outcome.median:.4f} ms",  # type: ignore[union-attr]
        f"  tuned   {tuned}",
        f"  file    {where}",
    ]


def _none_of(name: str) -> int:
    print(f"No record of {name} in {cache.folders()}.")
    return _NOTHING
