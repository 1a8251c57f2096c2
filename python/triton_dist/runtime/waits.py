"""Limit the time for which kernels wait for a flag: unlimited in production, limited in tuning.

The host can check whether a wait gave up only after the device has finished. An op that waited for
the device in its call would lengthen every sample of a tuner. Inside ``deferred_checks``, the op
therefore leaves the check to the tuner. Otherwise the op checks within the call.
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
"""Function to call after the device has finished. It returns an error if, since its previous call,
a wait gave up or found that ranks disagree. It returns the first wait's error, or ``None``."""

# Measured on H200: one poll of a flag in local memory takes about 0.5 us.
_POLLS_PER_SECOND = 2_000_000

# The active limits in seconds. Per process, not per thread: kernels and copy streams wait on their
# own threads. A list, because several groups may tune at the same time on different threads.
_limits: list[float] = []


on_poll: Callable[[Any, Any, Any, int, int, bool], None] | None = None
"""Hook of the deadlock check, called after each unsuccessful poll of a wait in an interpreted
kernel. Arguments: pointers, the value seen, the value awaited, the number of low bits of a flag
that are the call tag, the number of earlier polls, and whether the wait is overdue."""


on_publish: Callable[[], None] | None = None
"""Hook of the race check, called by each ``publish_tile`` in an interpreted kernel."""


class Device(Protocol):
    def synchronize(self, seconds: float | None = None) -> None: ...


@contextmanager
def bounded_waits(seconds: float) -> Iterator[None]:
    """Context manager in which waits in kernels give up after ``seconds``. If a wait of an op gave
    up, the op raises ``WaitTimeout`` in its call or in ``deferred_checks``. If a config deadlocks
    in a tuning, only this config fails."""
    _limits.append(seconds)
    try:
        yield
    finally:
        if seconds in _limits:  # cleared in a forked child
            _limits.remove(seconds)


os.register_at_fork(after_in_child=_limits.clear)


def limit_seconds() -> float | None:
    """Return the smallest active limit, or ``None`` without a limit."""
    return min(_limits, default=None)


def are_limited() -> bool:
    """Return whether a limit is active, which means that an op is being tuned."""
    return bool(_limits)


def limit_polls() -> int:
    """Return the limit as a number of polls of a flag; 0: unlimited. A rank that shares its GPU
    polls only in its time slices, so it polls less often."""
    if not _limits:  # fast path in production: runs in each call of an op
        return 0
    limit = limit_seconds()
    if limit is None:
        return 0
    return min(int(limit * _POLLS_PER_SECOND / ranks_per_gpu()), 2**31 - 1)


def interpreted_limit_seconds() -> float:
    """Return the limit for waits in interpreted kernels: the smallest active limit or
    ``TRITON_DIST_WAIT_TIMEOUT``, whichever is smaller."""
    return min([knobs.wait_timeout.get(), *_limits])


class _DeferredChecks:
    """Checks that ops have passed to ``defer`` in one ``deferred_checks`` context, each once.

    They are kept until the context ends: a CUDA graph captured in the context repeats the waits at
    each replay without calling the op.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.checks: dict[Check, None] = {}

    def run_checks(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the device, then run all checks.

        Raises:
            WaitTimeout, RankDisagreement: a wait gave up or found that ranks disagree. If several
                checks return an error, the first is raised.
            TimeoutError: the device did not finish in time.
        """
        if not self.checks:
            return
        self._device.synchronize(seconds)
        # Run all checks, so that no error is attributed to the next config that is measured.
        errors = [error for check in list(self.checks) if (error := check()) is not None]
        if errors:
            raise errors[0]


class _ThreadState(threading.local):
    """The ``deferred_checks`` contexts of a thread. Ops of other threads check in their call."""

    def __init__(self) -> None:
        self.contexts: list[_DeferredChecks] = []


_thread = _ThreadState()


@contextmanager
def deferred_checks(device: Device, seconds: float) -> Iterator[Callable[[], None]]:
    """Context manager in which ops of this thread pass their checks to the caller.

    Yields a function to call after each op, outside of the timed section. The function waits up to
    ``seconds`` for ``device`` and raises ``WaitTimeout`` if a wait gave up. A nested context first
    runs the checks of the outer context: their errors must not be attributed to the inner context.
    """
    contexts, own_checks = _thread.contexts, _DeferredChecks(device)
    if contexts:
        contexts[-1].run_checks(seconds)
    contexts.append(own_checks)
    try:
        yield functools.partial(own_checks.run_checks, seconds)
    finally:
        contexts.remove(own_checks)
        # If a call raised, its checks have not run: run them now, without waiting.
        with suppress(Exception):
            own_checks.run_checks(0.0)


def defer(check: Check) -> bool:
    """Pass ``check`` to this thread's innermost ``deferred_checks``. Return whether one exists."""
    if not _thread.contexts:
        return False
    _thread.contexts[-1].checks[check] = None
    return True
