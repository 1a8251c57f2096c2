"""``diff``: what changed from one tuning to another."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from triton_dist._tuning.values.analysis import Changes
from triton_dist.cli import cache, text
from triton_dist.cli.verb import add_verb, counted

_MOVED = 5


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "diff",
        _run,
        help="what changed from one record to another",
        description="Prints what changed from the record OLD to the record NEW, each a record's "
        "file, or a function of which --key and --on leave one record: facts that the results "
        "depend on, the winner, and medians of configs that both measured. Status 1 if there is "
        "a difference in the facts, the configs or the winner.",
        examples=["diff old.json new.json", "diff ~/backup/1f0c-2a.json matmul --key 8192"],
    )
    parser.add_argument("old", metavar="OLD", help="a record's file, or a function")
    parser.add_argument("new", metavar="NEW", help="the same")
    cache.add_choice(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def _run(arguments: argparse.Namespace) -> int:
    pair = []
    for asked in (arguments.old, arguments.new):
        found = cache.chosen(asked, arguments)
        if not found:
            return cache.say_none(asked, arguments)
        pair.append(cache.only(asked, found))
    old, new = pair
    changes = Changes.of(old.record, new.record)
    if arguments.json:
        print(json.dumps({"old": old.where, "new": new.where, **tree(changes)}, indent=2))
    else:
        for line in [f"old  {old.where}", f"new  {new.where}", *lines(changes)]:
            print(*text.fitted(line, indent=4), sep="\n")
    differ = changes.facts or changes.new or changes.gone or not changes.same_winner
    return 1 if differ else 0


def tree(changes: Changes) -> dict[str, Any]:
    """All that changed, for programs."""
    before, after = changes.before, changes.after
    return {
        "facts": changes.facts,
        "same_winner": changes.same_winner,
        "winner_old": str(before.record.best),
        "winner_new": str(after.record.best),
        "ms_old": before.winner.ms,
        "ms_new": after.winner.ms,
        "older_winner_now": changes.older_winner_now,
        "rank_correlation": changes.correlation,
        "common": [
            {"config": str(new.trial), "digest": new.trial.digest, "old": old.ms, "new": new.ms}
            for old, new in changes.common
        ],
        "only_old": [str(trial) for trial in changes.gone],
        "only_new": [str(trial) for trial in changes.new],
    }


def lines(changes: Changes) -> Iterator[str]:
    """The same for people."""
    before, after = changes.before, changes.after
    yield from (f"  {sentence}" for sentence in changes.facts or ["facts: no difference"])
    yield f"  time of the winner: {before.winner.ms:.4f} ms, now {after.winner.ms:.4f} ms, " + (
        f"{changes.ratio:.3f}x"
    )
    if changes.same_winner:
        yield f"  winner: the same, {after.record.best}"
    else:
        yield f"  winner: it was {before.record.best}"
        yield f"          it is  {after.record.best}"
        if (now := changes.older_winner_now) is not None:
            yield f"          the older one now takes {now:.3f}x the time of the newer"
    order = changes.correlation
    alike = "" if order is None else f", rank correlation of their times {order:.2f}"
    yield f"  {counted(len(changes.common), 'config')} in both{alike}"
    moved = sorted(changes.common, key=lambda pair: -abs(_change(pair[0].ms, pair[1].ms)))
    for old, new in moved[:_MOVED]:
        change = _change(old.ms, new.ms)
        yield f"  {old.ms:10.4f} -> {new.ms:.4f} ms {change:+7.1%}  {new.trial}"
    for what, trials in (("old", changes.gone), ("new", changes.new)):
        if trials:
            yield f"  {counted(len(trials), 'config')} only in {what}, such as {trials[0]}"


def _change(old: float, new: float) -> float:
    return new / old - 1 if old > 0 else 0.0
