"""How long a wait for a flag may take: no limit in production, one while candidates are tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from triton_dist import knobs

# One look at a flag takes about 0.5 us on H200, where the flag lies in the own memory (measured).
_POLLS_PER_SECOND = 2_000_000

# Of the process, not of a thread: kernels and copy streams wait on threads of their own. A list,
# because several groups may tune at once, each on its thread.
_limits: list[float] = []


@contextmanager
def bounded_waits(seconds: float) -> Iterator[None]:
    """Within: a wait in a kernel gives up after ``seconds``, and ops that wait check whether one
    did and raise ``WaitTimeout``. So a candidate that dead-locks fails, and the GPU stays usable.
    """
    _limits.append(seconds)
    try:
        yield
    finally:
        _limits.remove(seconds)


def limit_seconds() -> float | None:
    """The limit in force for kernels on GPUs; ``None``: they wait as long as it takes."""
    return min(_limits, default=None)


def limit_polls() -> int:
    """The same, in looks at a flag, as kernels count it; 0: no limit."""
    if not _limits:  # in production, at each call of an op
        return 0
    limit = limit_seconds()
    return 0 if limit is None else min(int(limit * _POLLS_PER_SECOND), 2**31 - 1)


def interpreted_limit_seconds() -> float:
    """The limit of a wait in an interpreted kernel, which always has one."""
    return min([knobs.wait_timeout.get(), *_limits])
