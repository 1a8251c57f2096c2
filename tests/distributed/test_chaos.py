"""Whatever happens to a rank, all end soon: with one config, or with an error that says who, in
which config, at what. ``make chaos`` runs the full table, the other tests a quick part of it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.distributed.chaos_rank import in_rank
from tests.distributed.chaos_scenarios import GRACE, TABLE, TIMEOUT, Scenario
from triton_dist.errors import WATCHDOG_EXIT_STATUS, RanksFailed

ALLOWED = TIMEOUT + 10
"""Seconds until every rank has ended."""


def start(spawn_ranks, world, row: Scenario, folder: Path, armed: bool) -> list[dict]:
    """How each rank ended: what it chose, its error, or ``killed`` or ``ended``."""
    for note in folder.glob("*.json"):
        note.unlink()
    env = {
        "CHAOS_ARMED": str(int(armed)),
        "CHAOS_VICTIM": "0" if row.leads else str(world - 1),
        "TRITON_DIST_CACHE_DIR": str(folder / "cache"),
        "TRITON_DIST_AUTOTUNE_TIMEOUT": str(TIMEOUT),
        "TRITON_DIST_COMPILE_TIMEOUT": str(TIMEOUT),
        "TRITON_DIST_AUTOTUNE_GRACE": str(GRACE),
    }
    deaths = {}
    begin = time.monotonic()
    try:
        spawn_ranks(
            world, in_rank, row.run, str(folder), env=env, timeout=60, grace=ALLOWED, init=True
        )
    except RanksFailed as failed:
        deaths = failed.by_rank
    seconds = time.monotonic() - begin
    endings = []
    for rank in range(world):
        note = folder / f"{rank}.json"
        ending = json.loads(note.read_text()) if note.exists() else died(deaths[rank], seconds)
        endings.append(ending)
    return endings


def died(failure, seconds: float) -> dict:
    if "SIGKILL" in failure.message:
        return {"error": "killed", "message": failure.message, "seconds": seconds}
    assert f"exited with status {WATCHDOG_EXIT_STATUS} " in failure.message, failure
    return {"error": "ended", "message": failure.message, "seconds": seconds}


def attempts(folder: Path) -> int:
    """Requests that were measured and not answered from the journal, in all starts so far."""
    notes = folder / "0.attempts"
    return len(notes.read_text().splitlines()) if notes.exists() else 0


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


def play(spawn_ranks, world: int, row: Scenario, folder: Path) -> None:
    endings = start(spawn_ranks, world, row, folder, armed=True)
    seconds = max(ending["seconds"] for ending in endings)
    outcomes = [str(ending.get("chosen", ending.get("error"))) for ending in endings]
    print(f"| {row.name} | {world} | {', '.join(outcomes)} | {seconds:.1f} |")
    check(row, endings)
    if row.then is None:
        return
    endings = start(spawn_ranks, world, row, folder, armed=False)
    assert [ending.get("chosen") for ending in endings] == [row.then] * world, endings
    if row.repeats is not None:
        assert attempts(folder) <= 3 + row.repeats


NAMES = [row.name for row in TABLE]


@pytest.mark.parametrize("row", [row for row in TABLE if row.quick], ids=lambda row: row.name)
def test_quick(row, spawn_ranks, tmp_path):
    play(spawn_ranks, 2, row, tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("row", TABLE, ids=NAMES)
def test_all(row, world, spawn_ranks, tmp_path):
    play(spawn_ranks, world, row, tmp_path)


def test_the_table_is_large_enough():
    assert len(set(NAMES)) == len(NAMES) >= 24
