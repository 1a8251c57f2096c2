"""``explain``: why each record of a function is or is not used."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from triton_dist import knobs
from triton_dist._tuning.store import LayeredStore
from triton_dist._tuning.values import Key, Origin, TuningRecord
from triton_dist.cli import cache, subject
from triton_dist.cli.judge import Judge
from triton_dist.cli.verb import add_verb, counted
from triton_dist.errors import NoSuchFunction

if TYPE_CHECKING:
    from triton_dist.tune import AutoTuner

_FOUND, _NOTHING = 0, 1


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "explain",
        _run,
        help="why the records of a function are or are not used",
        description="Prints each record of FUNCTION: key, winner, date, file, and whether it would "
        "be used now; if not, what differs, as recorded and as it is. The module is imported, so "
        "that source and config space are compared; set TRITON_INTERPRET and the like as in the "
        "run. With a bare name the records are listed and nothing is compared. Status 0: a record "
        "would be used (bare name: there is one), 1: none, 2: a mistake.",
        examples=["explain mypackage.ops:matmul", "explain matmul --module ops.py"],
    )
    parser.add_argument(
        "function",
        metavar="FUNCTION",
        help="package.module:function, the name as `list` prints it, or a bare name",
    )
    parser.add_argument("--module", help="where the function is: a dotted name or a .py file")
    parser.add_argument(
        "--world-size", type=int, help="ranks that tune together; default: as recorded"
    )
    parser.add_argument(
        "--local-world-size", type=int, help="ranks on this host; default: as recorded"
    )


def _run(arguments: argparse.Namespace) -> int:
    module, _, name = arguments.function.rpartition(":")
    module = arguments.module or module
    store = cache.with_packs()
    ranks = {
        fact: str(value)
        for fact, value in (
            ("world_size", arguments.world_size),
            ("local_world_size", arguments.local_world_size),
        )
        if value is not None
    }
    if module:
        return _compare(store, subject.load(module, name), ranks)
    keys = [record.key for record, _ in cache.records_of(store, name) if record.key.module]
    key = next((key for key in keys if key.full_name == name), None)
    if key is not None:  # the record says which part is the module
        try:
            return _compare(store, subject.load(key.module, key.function), ranks)
        except NoSuchFunction as error:
            return _list(store, name, str(error))
    return _list(store, name)


def _list(store: LayeredStore, name: str, because: str = "") -> int:
    """Explain the records that there are; nothing is known about the function itself."""
    records = list(cache.records_of(store, name))
    if not records:
        return _none_of(name)
    for record, where in records:
        print(*_heading(record, where), sep="\n")
    key = next(
        (each.record.key for each in records if each.record.key.module), records[0].record.key
    )
    remedy = f"To compare: triton-dist explain {key.module or 'MODULE'}:{key.function}"
    because = because or f"a bare name does not say where the function is. {remedy}"
    print(f"{counted(len(records), 'record')} of {name}. Nothing was compared: {because}")
    return _FOUND


def _compare(store: LayeredStore, tuned: AutoTuner, ranks: Mapping[str, str]) -> int:
    origin, judge = tuned.origin(), Judge(tuned, ranks)
    used = count = 0
    for key in _keys(store, origin):
        taken = ""
        for record, where in store.find(key):
            found = judge.validity(record, key)
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
    print(f"{counted(count, 'record')} of {origin.function}, {used} used. Ranks: {group}.")
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
        *([f"  how     {record.carried}"] if record.carried else []),
        f"  file    {where}",
    ]


def _none_of(name: str) -> int:
    print(f"No record of {name} in {cache.folders()}.")
    return _NOTHING
