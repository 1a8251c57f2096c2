"""Errors of debug modes and of kernel checks."""

from __future__ import annotations

from triton_dist.errors import TritonDistError, WaitTimeout


class DebugModeRefused(TritonDistError, ValueError):
    """A mode of ``TRITON_DIST_DEBUG`` does not exist, or cannot find anything in this process."""

    def __init__(self, mode: str, reason: str, alternative: str) -> None:
        super().__init__(
            f"TRITON_DIST_DEBUG={mode} is refused: {reason}. Use instead: {alternative}"
        )


class NoSuchJob(TritonDistError, LookupError):
    """No job on this host, or more than one job, matches ``triton-dist debug``."""

    def __init__(self, job: str | None, known: list[str]) -> None:
        there = (
            f"the running jobs are {', '.join(known)}: select one with --job JOB"
            if known
            else ("no job on this host was started with TRITON_DIST_DEBUG=attach or where")
        )
        super().__init__(f"job {job or 'to inspect'}: {there}")


class KernelFault(TritonDistError):
    """An error in an interpreted kernel that a check found.

    The message begins with rank, program, kernel and source line.
    """


class OutOfBounds(KernelFault, IndexError):
    """An access outside of the tensor or symmetric region that its pointer belongs to."""


class UninitialisedRead(KernelFault, ValueError):
    """A load of memory that was never written."""


class KernelAssertion(KernelFault, AssertionError):
    """A failed ``tl.device_assert``."""


class DataRace(KernelFault):
    """Two accesses to one address, of which at least one is a store, that neither a flag nor a
    collective orders."""


class WaitNeverEnds(WaitTimeout):
    """A wait of an interpreted kernel for a flag that no rank can set any more."""

    def __init__(self, message: str, rank: int, flag: str, expected: int, seen: int) -> None:
        self.rank, self.flag, self.expected, self.seen = rank, flag, expected, seen
        Exception.__init__(self, message)
