"""Limits of waits for a flag: none in production, one while candidates are tried.

To learn whether a wait in a kernel gave up, the host must wait for the device. An op that did so in
its call would lengthen every sample that a tuner takes of it. So it leaves that to the tuner, if
the tuner has said that it will ``settle`` after each call, and does it itself otherwise.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeAlias

from triton_dist import knobs
from triton_dist.errors import RankDisagreement, WaitTimeout
from triton_dist.runtime.sharing import ranks_per_gpu

Check: TypeAlias = Callable[[], WaitTimeout | RankDisagreement | None]
"""Called once the device is done: the error of the first wait that gave up since the last time, or
that found that ranks disagree."""

# One look at a flag takes about 0.5 us on H200, where the flag lies in the own memory (measured).
_POLLS_PER_SECOND = 2_000_000

# Of the process, not of a thread: kernels and copy streams wait on threads of their own. A list,
# because several groups may tune at once, each on its thread.
_limits: list[float] = []


on_look: Callable[[Any, Any, Any, int, int, bool], None] | None = None
"""Told of each look in vain of an interpreted wait, if kernels are checked: pointers, what is seen
and what is awaited as the kernel has them, bits of a flag that carry a size, how often the wait has
looked before, and whether it is overdue."""


on_publish: Callable[[], None] | None = None
"""Told of each interpreted ``publish_tile``, if kernels are checked."""


class Device(Protocol):
    def synchronize(self, seconds: float | None = None) -> None: ...


@contextmanager
def bounded_waits(seconds: float) -> Iterator[None]:
    """Within: a wait in a kernel gives up after ``seconds``, and ops that wait see to it that
    ``WaitTimeout`` is raised if one did: in the call, or where ``settling`` says. So a candidate
    that dead-locks fails, and the GPU stays usable.
    """
    _limits.append(seconds)
    try:
        yield
    finally:
        if seconds in _limits:  # not so in a child that was forked here
            _limits.remove(seconds)


os.register_at_fork(after_in_child=_limits.clear)


def limit_seconds() -> float | None:
    """The limit in force for kernels on GPUs; ``None``: they wait as long as it takes."""
    return min(_limits, default=None)


def limit_polls() -> int:
    """The same, in looks at a flag, as kernels count it; 0: no limit.

    A rank that shares its GPU looks in its turns only, so it counts fewer in the same time.
    """
    if not _limits:  # in production, at each call of an op
        return 0
    limit = limit_seconds()
    if limit is None:
        return 0
    return min(int(limit * _POLLS_PER_SECOND / ranks_per_gpu()), 2**31 - 1)


def interpreted_limit_seconds() -> float:
    """The limit of a wait in an interpreted kernel, which always has one."""
    return min([knobs.wait_timeout.get(), *_limits])


class _Settling:
    """The checks that ops have left, each once. They stay to the end, since a CUDA graph that was
    captured here makes the op's waits again at each replay, and calls no op that could say so."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.checks: dict[Check, None] = {}

    def settle(self, seconds: float) -> None:
        """Wait for the device, ``seconds`` at most, and make all checks.

        Raises:
            WaitTimeout, RankDisagreement: a wait gave up; of several checks, of the first that was
                left.
            TimeoutError: the device did not finish in time.
        """
        if not self.checks:
            return
        self._device.synchronize(seconds)
        # All of them, so that none is left to blame the next candidate.
        overdue = [error for check in list(self.checks) if (error := check()) is not None]
        if overdue:
            raise overdue[0]


class _OfThread(threading.local):
    """State of a thread, because only what calls the op there knows when to settle: what another
    thread calls meanwhile is checked in its call."""

    def __init__(self) -> None:
        self.settlings: list[_Settling] = []


_thread = _OfThread()


@contextmanager
def settling(device: Device, seconds: float) -> Iterator[Callable[[], None]]:
    """Within, on this thread: ops leave their checks to the caller, who calls what this yields
    after each call of them, outside of what it times.

    It waits ``seconds`` at most for ``device``, and raises ``WaitTimeout`` if a wait gave up.
    Within another ``settling`` of the thread: settles that first, because what was called before
    is not the fault of what comes.
    """
    settlings, own = _thread.settlings, _Settling(device)
    if settlings:
        settlings[-1].settle(seconds)
    settlings.append(own)
    try:
        yield functools.partial(own.settle, seconds)
    finally:
        settlings.remove(own)
        # Drop checks left by a call that raised, without waiting: no later call is to blame.
        with suppress(Exception):
            own.settle(0.0)


def leave(check: Check) -> bool:
    """Leave ``check`` to whoever settles on this thread; ``False`` if nobody does, and it is to be
    made now."""
    if not _thread.settlings:
        return False
    _thread.settlings[-1].checks[check] = None
    return True
