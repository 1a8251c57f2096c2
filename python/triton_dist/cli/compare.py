"""``compare``: the same key on other hardware, with other ranks or versions."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from triton_dist._tuning.store import ReadOnlyStore
from triton_dist._tuning.values import StoredRecord
from triton_dist._tuning.values.analysis import Analysis, elsewhere
from triton_dist.cli import cache, text
from triton_dist.cli.verb import add_verb, counted, folder


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "compare",
        _run,
        help="records of one key: other GPUs, other numbers of ranks, other versions",
        description="For each key of FUNCTION that has several records (of other GPUs, numbers of "
        "ranks or versions): the winners with their times, and how much slower the winner of one "
        "is where another was measured, as far as it was measured there.",
        examples=[
            "compare matmul --key 8192 --cache /shared/cache",
            "compare gemm_rs --ranks --key 7168",
        ],
    )
    parser.add_argument("function", metavar="FUNCTION", help="its name, or with its module")
    cache.add_choice(parser)
    parser.add_argument(
        "--cache", type=folder, action="append", default=[], metavar="DIR",
        help="a folder of records to look into besides; any number of times",
    )  # fmt: skip
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="keys that differ in the number of ranks alone are one: the last number in a key that "
        "is as large as its group does not count",
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def _run(arguments: argparse.Namespace) -> int:
    found = cache.chosen(arguments.function, arguments)
    for place in arguments.cache:
        known = {stored.where for stored in found}
        more = cache.records_of(ReadOnlyStore(place), arguments.function)
        found += [each for each in cache.fitting(more, arguments) if each.where not in known]
    keys: dict[str, list[StoredRecord]] = {}
    for stored in found:
        keys.setdefault(_text(stored, arguments.ranks), []).append(stored)
    several = [sorted(group, key=_order) for _, group in sorted(keys.items()) if len(group) > 1]
    if arguments.json:
        print(json.dumps({"keys": [_tree(group) for group in several]}, indent=2))
        return 0 if several else 1
    if not found:
        return cache.say_none(arguments.function, arguments)
    for group in several:
        for line in _lines(group):
            print(*text.fitted(line, indent=6), sep="\n")
    alone = len(keys) - len(several)
    print(f"{counted(len(several), 'key')} of {arguments.function} with several records, "
          f"{alone} with one.")  # fmt: skip
    return 0 if several else 1


def _text(stored: StoredRecord, but_ranks: bool) -> str:
    """The same for records that are compared."""
    key, ranks = stored.record.key, stored.record.fingerprint.topology.get("world_size", "")
    text = key.text
    if but_ranks and (found := [*re.finditer(rf"\b{re.escape(ranks)}\b", text)]) and ranks:
        text = f"{text[: found[-1].start()]}RANKS{text[found[-1].end() :]}"
    return f"{key.function} {text}"


def _order(stored: StoredRecord) -> list[str]:
    """By hardware, 2 ranks before 16, then by age."""
    parts = re.split(r"(\d+)", f"{stored.record.key.hardware} {stored.record.timestamp}")
    return [part.rjust(8, "0") if part.isdigit() else part for part in parts]


def _lines(group: Sequence[StoredRecord]) -> list[str]:
    found = [Analysis(stored.record) for stored in group]
    fastest = min(each.winner.ms for each in found)
    lines = [f"{group[0].record.key.full_name}, key {group[0].record.key}"]
    lines.append(f"      {'ms':>10} {'to best':>8}  on")
    for number, (each, stored) in enumerate(zip(found, group, strict=True), 1):
        ratio = f"{each.winner.ms / fastest:.3f}x" if fastest > 0 else "-"
        lines.append(f"  [{number}] {each.winner.ms:10.4f} {ratio:>8}  {_place(stored)}")
        lines.append(f"      {each.record.best}")
    numbers = range(1, len(found) + 1)
    lines.append("  winner of" + "".join(f"{f'on [{n}]':>9}" for n in numbers))
    for number, one in enumerate(found, 1):
        cells = (elsewhere(one, other) for other in found)
        row = "".join(f"{'-' if cell is None else f'{cell:.3f}x':>9}" for cell in cells)
        lines.append(f"  {f'[{number}]':>9}{row}")
    return lines


def _tree(group: Sequence[StoredRecord]) -> dict[str, Any]:
    found = [Analysis(stored.record) for stored in group]
    return {
        "function": group[0].record.key.full_name,
        "key": str(group[0].record.key),
        "records": [
            {
                "hardware": each.record.key.hardware,
                "software": dict(each.record.fingerprint.software),
                "version": each.record.fingerprint.version,
                "winner": str(each.record.best),
                "ms": each.winner.ms,
                "file": stored.where,
                "shipped": each.record.shipped,
            }
            for each, stored in zip(found, group, strict=True)
        ],
        "winner_elsewhere": [[elsewhere(one, other) for other in found] for one in found],
    }


def _place(stored: StoredRecord) -> str:
    record = stored.record
    triton = record.fingerprint.software.get("triton")
    parts = [cache.made_on(record), *([f"triton {triton}"] if triton else [])]
    parts += [f"version {record.fingerprint.version}"] if record.fingerprint.version else []
    return "; ".join([*parts, "shipped" if record.shipped else record.timestamp])
