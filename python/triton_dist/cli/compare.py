"""``diff``: what changed between two records. ``compare``: compare all records of each key.

A key has several records if it was tuned with different hardware, numbers of ranks or versions.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any

from triton_dist._tuning.store import ReadOnlyStore
from triton_dist._tuning.values import StoredRecord
from triton_dist._tuning.values.analysis import Analysis, Changes, slowdown_of_winner
from triton_dist.cli import cache, text
from triton_dist.cli.subcommand import add_subcommand, counted, folder

_MAX_CHANGED_CONFIGS = 5


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "compare",
        _run,
        help="compare the records of one key across GPUs, numbers of ranks and versions",
        description="For each key of FUNCTION that has several records (of different GPUs, numbers "
        "of ranks or versions), prints the winners and their times. A table has a row per winner "
        "and a column per record: the winner's time there, divided by that record's shortest time.",
        examples=[
            "compare matmul --key 8192 --cache /shared/cache",
            "compare gemm_rs --ranks --key 7168",
        ],
    )
    cache.add_record_options(parser, "FUNCTION", "function name, optionally with its module")
    parser.add_argument(
        "--cache", type=folder, action="append", default=[], metavar="DIR",
        help="another folder of records to search; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="also compare keys that differ only in the number of ranks: in each key, ignore the "
        "last number that equals the number of ranks",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser = add_subcommand(
        subcommands,
        "diff",
        _diff,
        help="what changed from one record to another",
        description="Prints what changed from record OLD to record NEW: facts that the results "
        "depend on (such as versions), the winner, and the median times of configs that both "
        "records contain. OLD and NEW are files of records, or functions for which --key and --on "
        "select one record. The exit status is 1 if the facts, the configs or the winner differ.",
        examples=["diff old.json new.json", "diff ~/backup/1f0c-2a.json matmul --key 8192"],
    )
    parser.add_argument("old", metavar="OLD", help="a record's file, or a function")
    parser.add_argument("new", metavar="NEW", help="a record's file, or a function")
    cache.add_record_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    found = cache.select_records(arguments.function, arguments)
    for path in arguments.cache:
        known = {stored.location for stored in found}
        more = cache.records_of([ReadOnlyStore(path)], arguments.function)
        found += [
            each for each in cache.matching_records(more, arguments) if each.location not in known
        ]
    keys: dict[str, list[StoredRecord]] = {}
    for stored in found:
        keys.setdefault(_group_text(stored, arguments.ranks), []).append(stored)
    several = [sorted(group, key=_sort_key) for _, group in sorted(keys.items()) if len(group) > 1]
    if arguments.json:
        text.print_json({"keys": [_tree(group) for group in several]})
        return 0 if several else 1
    if not found:
        return cache.print_no_record(arguments.function, arguments)
    for group in several:
        for line in _lines(group):
            print(*text.wrapped(line, indent=6), sep="\n")
    alone = len(keys) - len(several)
    print(f"{counted(len(several), 'key')} of {arguments.function} with several records, "
          f"{alone} with one.")  # fmt: skip
    return 0 if several else 1


def _group_text(stored: StoredRecord, ignores_num_ranks: bool) -> str:
    """Return a text that is equal for the records that are compared with each other."""
    key, ranks = stored.record.key, stored.record.fingerprint.topology.get("world_size", "")
    text = key.text
    if ignores_num_ranks and (found := [*re.finditer(rf"\b{re.escape(ranks)}\b", text)]) and ranks:
        text = f"{text[: found[-1].start()]}RANKS{text[found[-1].end() :]}"
    return f"{key.function} {text}"


def _sort_key(stored: StoredRecord) -> str:
    """Return a key that sorts by hardware (2 ranks before 16), then by date."""
    return text.natural_order(f"{stored.record.key.hardware} {stored.record.timestamp}")


def _lines(group: Sequence[StoredRecord]) -> list[str]:
    found = [Analysis(stored.record) for stored in group]
    fastest = min(each.winner.ms for each in found)
    lines = [f"{group[0].record.key.full_name}, key {group[0].record.key}"]
    lines.append("       time (ms)  to best  on")
    for number, (each, stored) in enumerate(zip(found, group, strict=True), 1):
        ratio = f"{each.winner.ms / fastest:.3f}x" if fastest > 0 else "-"
        lines.append(
            f"  [{number}] {each.winner.ms:10.4f} {ratio:>8}  {_hardware_and_versions(stored)}"
        )
        lines.append(f"      {each.record.best}")
    heads = ["winner of", *(f"on [{number}]" for number in range(1, len(found) + 1))]
    ratios = [[slowdown_of_winner(one, other) for other in found] for one in found]
    rows = [
        [f"[{number}]", *("-" if ratio is None else f"{ratio:.3f}x" for ratio in row)]
        for number, row in enumerate(ratios, 1)
    ]
    return lines + [f"  {line}" for line in text.table(heads, rows)]


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
                "file": stored.location,
                "shipped": each.record.is_shipped,
            }
            for each, stored in zip(found, group, strict=True)
        ],
        "winner_elsewhere": [[slowdown_of_winner(one, other) for other in found] for one in found],
    }


def _hardware_and_versions(stored: StoredRecord) -> str:
    record = stored.record
    triton = record.fingerprint.software.get("triton")
    parts = [cache.hardware_text(record), *([f"triton {triton}"] if triton else [])]
    parts += [f"version {record.fingerprint.version}"] if record.fingerprint.version else []
    return "; ".join([*parts, "shipped" if record.is_shipped else record.timestamp])


def _diff(arguments: argparse.Namespace) -> int:
    pair = []
    for name in (arguments.old, arguments.new):
        found = cache.select_records(name, arguments)
        if not found:
            return cache.print_no_record(name, arguments)
        pair.append(cache.single_record(name, found))
    old, new = pair
    changes = Changes.of(old.record, new.record)
    if arguments.json:
        tree = {
            "old": old.location,
            "new": new.location,
            "facts": changes.changed_dependencies,
            "same_winner": changes.has_same_winner,
            "winner_old": str(old.record.best),
            "winner_new": str(new.record.best),
            "ms_old": changes.before.winner.ms,
            "ms_new": changes.after.winner.ms,
            "older_winner_now": changes.older_winner_ratio,
            "rank_correlation": changes.correlation,
            "common": [
                {"config": str(now.trial), "digest": now.trial.digest, "old": was.ms, "new": now.ms}
                for was, now in changes.common
            ],
            "only_old": [str(trial) for trial in changes.only_before],
            "only_new": [str(trial) for trial in changes.only_after],
        }
        text.print_json(tree)
    else:
        for line in [f"old  {old.location}", f"new  {new.location}", *lines_of_changes(changes)]:
            print(*text.wrapped(line, indent=4), sep="\n")
    differ = (
        changes.changed_dependencies
        or changes.only_after
        or changes.only_before
        or not changes.has_same_winner
    )
    return 1 if differ else 0


def lines_of_changes(changes: Changes) -> Iterator[str]:
    before, after = changes.before, changes.after
    yield from (f"  {line}" for line in changes.changed_dependencies or ["facts: no difference"])
    yield f"  time of the winner: {before.winner.ms:.4f} ms, now {after.winner.ms:.4f} ms, " + (
        f"{changes.ratio:.3f}x"
    )
    if changes.has_same_winner:
        yield f"  winner: the same, {after.record.best}"
    else:
        yield f"  winner: it was {before.record.best}"
        yield f"          it is  {after.record.best}"
        if (now := changes.older_winner_ratio) is not None:
            yield f"          the old winner now takes {now:.3f}x the time of the new winner"
    order = changes.correlation
    alike = "" if order is None else f", rank correlation of their times {order:.2f}"
    yield f"  {counted(len(changes.common), 'config')} in both{alike}"
    largest_first = sorted(changes.common, key=lambda pair: -abs(_change(pair[0].ms, pair[1].ms)))
    for old, new in largest_first[:_MAX_CHANGED_CONFIGS]:
        yield f"  {old.ms:10.4f} -> {new.ms:.4f} ms {_change(old.ms, new.ms):+7.1%}  {new.trial}"
    for record, trials in (("old", changes.only_before), ("new", changes.only_after)):
        if trials:
            yield f"  {counted(len(trials), 'config')} only in {record}, such as {trials[0]}"


def _change(old: float, new: float) -> float:
    return new / old - 1 if old > 0 else 0.0
