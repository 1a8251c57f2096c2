"""``replay``: run search algorithms on the recorded times of a tuning."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_dist.cli import cache, export, text
from triton_dist.cli.subcommand import add_subcommand, counted, positive
from triton_dist.errors import NoSuchRecord

if TYPE_CHECKING:
    from triton_dist.testing.replay import RecordedSpace

_DEFAULT_SEARCHES = ("racing", "exhaustive", "surrogate")
_SEARCHES = (*_DEFAULT_SEARCHES, "optuna")


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "replay",
        _run,
        help="run other search algorithms on the recorded times of a tuning",
        description="Runs search algorithms on the recorded samples of a tuning: of a record of "
        "FUNCTION, of a record in FILE, or of a file from `export --format t4`. Each search runs "
        "several times, with the samples in different orders. Prints how much slower the chosen "
        "config is than the fastest config. Nothing is measured: a config with a single sample has "
        "the same time in each run.",
        examples=[
            "replay matmul --key 8192 --search surrogate --tries 50",
            "replay space_T4.json.gz --search racing,surrogate --json",
        ],
    )
    cache.add_record_options(
        parser, "FUNCTION|FILE", "function name, a record's file, or a T4 file"
    )
    parser.add_argument(
        "--search",
        type=_searches,
        default=_DEFAULT_SEARCHES,
        metavar="NAME,...",
        help=f"some of {','.join(_SEARCHES)}; default: {','.join(_DEFAULT_SEARCHES)}",
    )
    parser.add_argument(
        "--tries", type=positive, default=200, metavar="N",
        help="maximum number of configs that a search tries; default: 200",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=positive, default=8, metavar="N",
        help="number of orders of the samples; default: 8",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def _searches(names: str) -> tuple[str, ...]:
    unknown = [name for name in names.split(",") if name not in _SEARCHES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: choose from {', '.join(_SEARCHES)}")
    return tuple(names.split(","))


def _run(arguments: argparse.Namespace) -> int:
    from triton_dist._tuning.search import search_for
    from triton_dist._tuning.values import Policy
    from triton_dist.testing.replay import score

    space = _space(arguments)
    if space is None:
        return cache.print_no_record(arguments.function, arguments)
    scores = []
    for name in arguments.search:
        policy = Policy.for_device("cuda", timing="events", search=name, max_trials=arguments.tries)
        result = score(
            space, name, lambda configs, policy, seed: search_for(configs, policy), policy,
            range(arguments.seeds),
        )  # fmt: skip
        scores.append(result)
    if arguments.json:
        tree = {"space": space.name, "configs": len(space.configs), "seeds": arguments.seeds}
        text.print_json({**tree, "scores": [asdict(each) for each in scores]})
        return 0
    text.print_lines(
        f"{space.name}: {counted(len(space.configs), 'config')}, {arguments.seeds} orders"
    )
    print(*(f"  {each}" for each in scores), sep="\n")
    return 0


def _space(arguments: argparse.Namespace) -> RecordedSpace | None:
    """Return the recorded samples to replay, or ``None`` if no record matches."""
    from triton_dist.testing.replay import RecordedSpace

    path = Path(arguments.function)
    if path.name.endswith((".json", ".json.gz")) and path.exists():
        try:
            return RecordedSpace.read(path)
        except ValueError as error:
            if path.suffix == ".gz":
                remedy = "Pass a record, or a file in the T4 format"
                raise NoSuchRecord(str(path), str(error), remedy) from error
    found = cache.select_records(arguments.function, arguments)
    if not found:
        return None
    record = cache.single_record(arguments.function, found)
    return RecordedSpace.parse(export.t4([record]), record.record.key.full_name)
