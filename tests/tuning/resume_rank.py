"""A race that is killed at a chosen moment, and gone on with by the next start."""

from __future__ import annotations

import os

from tests.distributed.chaos_rank import (
    MILLISECONDS,
    Me,
    Moments,
    ScriptedTimer,
    is_victim,
    tuner,
)

# The fastest is at 17; close ones around it, far ones too, in no order.
SPACE = [{"n": 10 + (7 * place) % 24} for place in range(24)]
SEARCHES = ("racing", "exhaustive")


def race(me: Me) -> int:
    """What a race of 24 configs chooses; ``CHAOS_FATAL``: the moment at which the victim dies."""
    moments = Moments(int(os.environ["CHAOS_FATAL"]) if is_victim() else None)
    ScriptedTimer.jitter = 0.1

    def times(n: int) -> None:
        os.environ[MILLISECONDS] = str(1.0 + abs(n - 17) / 20)

    chosen: int = tuner(times, SPACE, search=os.environ["CHAOS_SEARCH"])(7)
    (me.folder / f"{me.rank}.moments").write_text(str(moments.count))
    return chosen
