"""Errors of modes and checks of kernels."""

from __future__ import annotations

from triton_dist.errors import TritonDistError, WaitTimeout


class DebugModeRefused(TritonDistError, ValueError):
    """A mode of ``TRITON_DIST_DEBUG`` that would find nothing here."""

    def __init__(self, mode: str, reason: str, nearest: str) -> None:
        super().__init__(f"TRITON_DIST_DEBUG={mode} is refused: {reason}. Nearest: {nearest}")


class NoSuchJob(TritonDistError, LookupError):
    """No job of this host, or more than one, that ``triton-dist debug`` could mean."""

    def __init__(self, job: str | None, known: list[str]) -> None:
        there = (
            f"there are {', '.join(known)}: say --job JOB"
            if known
            else ("none that was started with TRITON_DIST_DEBUG=attach or where is on this host")
        )
        super().__init__(f"job {job or 'to look into'}: {there}")


class KernelFault(TritonDistError):
    """A mistake in an interpreted kernel that a check found; the message begins with rank, program,
    kernel and source line."""


class OutOfBounds(KernelFault, IndexError):
    """An access outside of the tensor or symmetric region that its pointer was made from."""


class UninitialisedRead(KernelFault, ValueError):
    """A load of memory that nobody wrote."""


class KernelAssertion(KernelFault, AssertionError):
    """A ``tl.device_assert`` that does not hold."""


class DataRace(KernelFault):
    """Two accesses of one address, one of them a write, that no flag brings into an order."""


class WaitNeverEnds(WaitTimeout):
    """A wait of an interpreted kernel for a flag that nobody is left to set."""

    def __init__(self, message: str, rank: int, flag: str, expected: int, seen: int) -> None:
        self.rank, self.flag, self.expected, self.seen = rank, flag, expected, seen
        Exception.__init__(self, message)
