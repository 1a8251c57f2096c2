"""Time that candidates say they spend, for a timer that counts this alone: what a busy machine adds
decides no race."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from triton_dist.runtime.device import cpu

_OVERHEAD = 1e-3  # of a run, in milliseconds: none takes no time


class _Spent(threading.local):
    milliseconds: float | None = None


_spent = _Spent()
_counting = False


def spend(seconds: float) -> None:
    """Take ``seconds``: of the counted time where it is counted, else of the wall's."""
    if _counting:
        _spent.milliseconds = _now() + seconds * 1e3
    else:
        time.sleep(seconds)


def _now() -> float:
    return _spent.milliseconds or 0.0


class _SpentTimer:
    def start(self) -> None:
        self._begin = _now()

    def stop(self) -> None:
        self._end = _now()

    def is_done(self) -> bool:
        return True

    def milliseconds(self) -> float:
        return self._end - self._begin + _OVERHEAD


@contextmanager
def counted() -> Iterator[None]:
    """Within: what the calling thread spends is all the time that its runs take."""
    global _counting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "CpuTimer", _SpentTimer)
        _counting = True
        try:
            yield
        finally:
            _counting = False
