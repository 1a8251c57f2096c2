"""``show``: print the configs of a record as a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from triton_dist._tuning.values import StoredRecord
from triton_dist._tuning.values.analysis import Analysis, show_parameters
from triton_dist._tuning.values.show import spread
from triton_dist.cli import cache, listing, text
from triton_dist.cli.subcommand import add_subcommand, counted

_DEFAULT_ROWS = 8


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "show",
        _run,
        help="print the configs that a tuning measured, as a table",
        description="Prints the records of FUNCTION, or the record in FILE: the fastest configs "
        "and their times, the number of configs near the winner, the importance of each parameter, "
        "and failures. In the table, `to best` is a config's time divided by the winner's time. "
        "`spread` is the interquartile range of a config's samples divided by their median.",
        examples=[
            "show matmul",
            "show matmul --key 8192 --top 20",
            "show matmul --code",
            "show matmul --json | jq",
        ],
    )
    cache.add_record_options(parser, "FUNCTION|FILE", "function name, or a record's file")
    parser.add_argument(
        "--top",
        type=int,
        default=_DEFAULT_ROWS,
        metavar="N",
        help=f"rows to print; default: {_DEFAULT_ROWS}",
    )
    parser.add_argument("--code", action="store_true", help="print only the winners, as code")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _run(arguments: argparse.Namespace) -> int:
    found = cache.select_records(arguments.function, arguments)
    if arguments.json:
        text.print_json({"records": [tree(each) for each in found]})
        return 0 if found else 1
    if not found:
        return cache.print_no_record(arguments.function, arguments)
    if arguments.code:
        # The printed argument gives ``tune.autotune`` a single config, which it does not measure.
        for record in (stored.record for stored in found):
            title = f"{record.key.full_name}, key {record.key}, {cache.hardware_text(record)}"
            text.print_lines(f"# {title}: {Analysis(record).winner.ms:.4f} ms")
            text.print_lines(f"config_space=[{record.best}],")
        return 0
    for index, stored in enumerate(found):
        for line in [*([""] if index else []), *_lines(stored, arguments.top)]:
            print(*text.wrapped(line, indent=4), sep="\n")
    return 0


def tree(stored: StoredRecord) -> dict[str, Any]:
    """Return one record as a JSON tree, fastest config first."""
    record = stored.record
    found = Analysis(record)
    return {
        **listing.tree_of(stored),
        "seconds": record.seconds,
        "shipped": record.is_shipped,
        "configs": [
            {
                "config": str(each.trial),
                "digest": each.trial.digest,
                "parameters": each.parameters,
                "ms": each.ms,
                "to_best": found.ratio(each.ms),
                "samples": list(each.samples),
            }
            for each in found.timed
        ],
        "failures": [vars(each) for each in found.failed],
        "pruned": [{"config": config, "reason": reason} for config, reason in found.pruned],
        "always_failed": [
            {"parameter": name, "value": value, "count": count}
            for name, value, count in found.always_failed()
        ],
        "within_1_percent": found.count_within(0.01),
        "importance": dict(found.parameters_by_importance()),
        "price": {name: found.slowdown_by_value(name) for name in found.varying},
        "fixed": found.fixed,
        "by_rank": {digest: own.to_tree() for digest, own in record.times_by_rank.items()},
        "dropped": dict(record.num_pruned_by_reason),
    }


def _lines(stored: StoredRecord, top: int) -> Iterator[str]:
    record, location = stored
    found = Analysis(record)
    age = f"{text.age(record.timestamp)} ago, in {record.seconds:.1f} s"
    yield f"{record.key.full_name}, key {record.key}"
    yield f"  on      {cache.hardware_text(record)}"
    yield f"  tuned   {record.timestamp}, {'shipped' if record.is_shipped else age}"
    if record.warm_started_from:
        yield f"  how     {record.warm_started_from}"
    yield f"  file    {location}"
    yield f"  winner  {record.best}, {found.winner.ms:.4f} ms"
    if found.varying and found.fixed:
        yield f"  all     {show_parameters(found.fixed, found.fixed)}"
    names = found.varying or tuple(found.fixed)
    rows = [
        (
            f"{timed.ms:.4f}", f"{found.ratio(timed.ms):.3f}x", spread(timed.samples),
            str(len(timed.samples)),
            show_parameters(timed.parameters, names) + "  <- winner" * (timed is found.winner),
        )
        for index, timed in enumerate(found.timed)
        if index < top or timed is found.winner
    ]  # fmt: skip
    heads = ("time (ms)", "to best", "spread", "samples", "config")
    yield from (f"  {line}" for line in text.table(heads, rows, left=("config",)))
    if len(found.timed) > top:
        yield f"  {len(found.timed)} were measured; --top N shows more"
    if found.varying:
        one, *others = (found.count_within(percent / 100) for percent in (1, 5, 10))
        yield f"  near the winner: {one} of {len(found.timed)} within 1 %, " + (
            "{} within 5 %, {} within 10 %".format(*others)
        )
    ranks = record.times_by_rank.get(record.best.digest)
    if ranks is not None:
        yield f"  the winner by rank: {ranks}"
    important = [
        f"{name} {share:.0%}" for name, share in found.parameters_by_importance() if share >= 0.005
    ]
    if important:
        yield f"  importance (PED-ANOVA): {', '.join(important)}"
    for config, reason in found.pruned[:top]:
        yield f"  pruned: {config}, {reason}"
    if len(found.pruned) > top:
        yield f"  {len(found.pruned)} were pruned; --top N names more"
    for each in found.failed:
        yield f"  {each.count} x {each.kind}, the first: {' '.join(each.first.split())[:120]}"
    for reason, number in record.num_pruned_by_reason.items():
        yield f"  {number} x pruned, not listed: {reason}"
    for name, value, count in found.always_failed():
        yield f"  always failed: {name}={value}, {counted(count, 'time')}"
