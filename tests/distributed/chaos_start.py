"""Starts ranks that will not all come to a good end, and gathers how each one ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.chaos_rank import Me, in_rank
from triton_dist.errors import WATCHDOG_EXIT_STATUS, RankFailure, RanksFailed
from triton_dist.testing import spawn_ranks

TIMEOUT = 2.0
GRACE = 1.0


def start(
    world: int,
    scenario: Callable[[Me], Any],
    folder: Path,
    victim: int,
    armed: bool = True,
    seconds: float = TIMEOUT,
    **env: str,
) -> list[dict[str, Any]]:
    """How each rank ended: ``chosen``, or ``error`` (its type, ``"killed"`` or ``"ended"``) and
    ``message``; and ``seconds``.

    Args:
        folder: shared by the ranks, and by the starts of one story.
        armed: whether anything happens to the victim.
        seconds: limit of each step.
    """
    for note in folder.glob("*.json"):
        note.unlink()
    env |= {
        "CHAOS_ARMED": str(int(armed)),
        "CHAOS_VICTIM": str(victim),
        "TRITON_DIST_CACHE_DIR": str(folder / "cache"),
        "TRITON_DIST_AUTOTUNE_TIMEOUT": str(seconds),
        "TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT": str(seconds),
        "TRITON_DIST_COMPILE_TIMEOUT": str(seconds),
        "TRITON_DIST_AUTOTUNE_GRACE": str(GRACE),
    }
    deaths: dict[int, RankFailure] = {}
    begin = time.monotonic()
    try:
        spawn_ranks(world, in_rank, scenario, str(folder), env=env, timeout=60, grace=20)
    except RanksFailed as failed:
        deaths = failed.by_rank
    took = time.monotonic() - begin
    notes = [folder / f"{rank}.json" for rank in range(world)]
    return [
        json.loads(note.read_text()) if note.exists() else _death(deaths[rank], took)
        for rank, note in enumerate(notes)
    ]


def _death(failure: RankFailure, seconds: float) -> dict[str, Any]:
    """The ending of a rank that could not write it down."""
    if "SIGKILL" in failure.message:
        error = "killed"
    else:
        assert f"exited with status {WATCHDOG_EXIT_STATUS} " in failure.message, failure
        error = "ended"
    return {"error": error, "message": failure.message, "seconds": seconds}


def attempts(folder: Path) -> int:
    """Requests that were measured and not answered from the journal, in all starts so far."""
    notes = folder / "0.attempts"
    return len(notes.read_text().splitlines()) if notes.exists() else 0
