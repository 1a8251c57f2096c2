"""Whatever happens to a rank, all end soon: with one config, or with an error that says who, in
which config, at what. ``make chaos`` runs the full table, the other tests a quick part of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.chaos_scenarios import TABLE, Scenario
from tests.distributed.chaos_start import TIMEOUT, attempts, start

ALLOWED = TIMEOUT + 10
"""Seconds until every rank has ended."""


def check(row: Scenario, endings: list[dict]) -> None:
    victim = 0 if row.leads else len(endings) - 1
    for rank, ending in enumerate(endings):
        is_victim = rank == victim and row.victim is not None
        expected = row.victim if is_victim else row.others
        got = str(ending.get("chosen", ending.get("error")))
        assert got in str(expected).split(" or "), (rank, ending)
        assert ending["seconds"] < ALLOWED, (rank, ending)
        if not is_victim and got not in ("ended", "killed") and "error" in ending:
            for pattern in row.says:
                assert re.search(pattern.format(victim=victim), ending["message"]), (rank, ending)


def play(world: int, row: Scenario, folder: Path) -> None:
    victim = 0 if row.leads else world - 1
    endings = start(world, row.run, folder, victim)
    seconds = max(ending["seconds"] for ending in endings)
    outcomes = [str(ending.get("chosen", ending.get("error"))) for ending in endings]
    print(f"| {row.name} | {world} | {', '.join(outcomes)} | {seconds:.1f} |")
    check(row, endings)
    if row.then is None:
        return
    endings = start(world, row.run, folder, victim, armed=False)
    assert [ending.get("chosen") for ending in endings] == [row.then] * world, endings
    if row.repeats is not None:
        assert attempts(folder) <= 3 + row.repeats


NAMES = [row.name for row in TABLE]


@pytest.mark.parametrize("row", [row for row in TABLE if row.quick], ids=lambda row: row.name)
def test_quick(row, tmp_path):
    play(2, row, tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("row", TABLE, ids=NAMES)
def test_all(row, world, tmp_path):
    play(world, row, tmp_path)


def test_the_table_is_large_enough():
    assert len(set(NAMES)) == len(NAMES) >= 24
