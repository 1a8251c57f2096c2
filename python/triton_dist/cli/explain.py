"""``explain``: why each record of a function is or is not used."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from triton_dist import knobs
from triton_dist._tuning.store import LayeredStore
from triton_dist._tuning.values import Key, Origin, StoredRecord, TuningRecord
from triton_dist.cli import cache, listing, subject, text
from triton_dist.cli.judge import Judge
from triton_dist.cli.verb import add_verb, counted, positive
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
        examples=[
            "explain mypackage.ops:matmul",
            "explain matmul --module ops.py",
            "explain mypackage.ops:matmul --json",
        ],
    )
    parser.add_argument(
        "function",
        metavar="FUNCTION",
        help="package.module:function, the name as `list` prints it, or a bare name",
    )
    parser.add_argument("--module", help="where the function is: a dotted name or a .py file")
    parser.add_argument(
        "--world-size", type=positive, help="ranks that tune together; default: as recorded"
    )
    parser.add_argument(
        "--local-world-size", type=positive, help="ranks on this host; default: as recorded"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


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
    found, why = _explained(store, module, name, ranks)
    if arguments.json:
        print(json.dumps({"records": [_tree(each) for each in found], "why": why}, indent=2))
    elif not found:
        print(f"No record of {name} in {cache.folders()}.")
    else:
        _print(found, why, name, ranks)
    return _FOUND if any(each.used or each.used is None for each in found) else _NOTHING


@dataclass(frozen=True)
class _Explained:
    """A record, and whether it would be used."""

    record: TuningRecord
    where: str
    used: bool | None = None
    """``None``: nothing was compared."""
    reasons: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    may_be_dropped: bool = False
    """It is used, unless ``prune_fn`` drops the winner."""


def _explained(
    store: LayeredStore, module: str, name: str, ranks: Mapping[str, str]
) -> tuple[list[_Explained], str]:
    """Records with the verdict on each, and why nothing was compared, if so."""
    if module:
        return _compared(store, subject.load(module, name), ranks), ""
    records = list(cache.records_of(store, name))
    keys = [record.key for record, _ in records if record.key.module]
    why = ""
    key = next((key for key in keys if key.full_name == name), None)
    if key is not None:  # the record says which part is the module
        try:
            return _compared(store, subject.load(key.module, key.function), ranks), ""
        except NoSuchFunction as error:
            why = str(error)
    if records and not why:
        key = (keys or [records[0].record.key])[0]
        remedy = f"To compare: triton-dist explain {key.module or 'MODULE'}:{key.function}"
        why = f"a bare name does not say where the function is. {remedy}"
    return [_Explained(record, where) for record, where in records], why


def _compared(store: LayeredStore, tuned: AutoTuner, ranks: Mapping[str, str]) -> list[_Explained]:
    judge, explained = Judge(tuned, ranks), []
    for key in _keys(store, tuned.origin()):
        taken = ""
        for record, where in store.find(judge.under(key)):
            found = judge.validity(record, key)
            reasons = found.reasons or ((f"{taken} comes first",) if taken else ())
            taken = taken or ("" if reasons else where)
            may_be_dropped = tuned.prune_fn is not None and record.shipped
            accepted = () if reasons else found.tolerated
            about = (record, where, not reasons, reasons, accepted, may_be_dropped)
            explained.append(_Explained(*about))
    return explained


def _print(found: Sequence[_Explained], why: str, name: str, ranks: Mapping[str, str]) -> None:
    for each in found:
        text.say(*_heading(each.record, each.where))
        text.say(*(f"  not used: {reason}" for reason in each.reasons))
        if each.used:
            text.say("  used" + ", unless prune_fn drops the winner" * each.may_be_dropped)
        text.say(*(f"  accepted: {difference}" for difference in each.accepted))
    if found[0].used is None:
        text.say(f"{counted(len(found), 'record')} of {name}. Nothing was compared: {why}")
        return
    if knobs.autotune_always_tune.get():
        print(f"{knobs.autotune_always_tune.variable} is set: it is tuned again in any case.")
    group = " ".join(f"{name} {value}" for name, value in ranks.items()) or "as many as recorded"
    function, used = found[0].record.key.function, sum(bool(each.used) for each in found)
    text.say(f"{counted(len(found), 'record')} of {function}, {used} used. Ranks: {group}.")


def _tree(each: _Explained) -> dict[str, Any]:
    return {
        **listing.tree_of(StoredRecord(each.record, each.where)),
        "used": each.used,
        "reasons": list(each.reasons),
        "accepted": list(each.accepted),
    }


def _keys(store: LayeredStore, origin: Origin) -> Iterator[Key]:
    """The keys that records of this function have, as a tuner would look for them."""
    seen = set()
    for function in (origin.function, f"{origin.module}.{origin.function}"):
        asked = Key(function, "", "", origin.module, origin.signature)
        for record, _ in store.records_of(asked):
            text, hardware = record.key.text, record.key.hardware
            key = replace(asked, function=origin.function, text=text, hardware=hardware)
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
        f"  on      {cache.made_on(record)}",
        f"  winner  {best}, {best.outcome.median:.4f} ms",  # type: ignore[union-attr]
        f"  tuned   {tuned}",
        *([f"  how     {record.carried}"] if record.carried else []),
        f"  file    {where}",
    ]
