"""Every exception and warning of triton_dist, each with its message beside it.

A message says what happened, where (argument, rank, config, key) and what to do. All exceptions
derive from :class:`TritonDistError`; where Python has a fitting built-in (``ValueError``,
``OSError``, ``TimeoutError``), they derive from that too, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class TritonDistError(Exception):
    """Base of every exception that triton_dist raises on purpose."""


class InvalidArgument(TritonDistError, ValueError):
    """An argument that the function cannot work with; raised before anything is launched."""

    def __init__(self, function: str, argument: str, value: object, expected: str) -> None:
        self.function, self.argument, self.value, self.expected = (
            function,
            argument,
            value,
            expected,
        )
        super().__init__(f"{function}: {argument} is {value!r}, expected {expected}")


class ContextFinalized(TritonDistError, RuntimeError):
    """A context whose symmetric memory was already freed."""

    def __init__(self, context: str) -> None:
        super().__init__(
            f"{context} was finalized: its symmetric buffers are freed. Create a new context, or "
            "call finalize() only after the last use."
        )


class DeviceUnavailable(TritonDistError, RuntimeError):
    """The device that was asked for cannot be used in this process."""

    def __init__(self, asked: str, reason: str, remedy: str) -> None:
        super().__init__(f"device {asked!r} cannot be used: {reason}. {remedy}")


class UnsupportedVersion(TritonDistError, ImportError):
    """A dependency whose version is outside the supported range."""

    def __init__(self, package: str, found: str, supported: str, remedy: str = "") -> None:
        remedy = remedy or f"Install a supported version: pip install '{package}{supported}'"
        super().__init__(
            f"{package} {found} is installed, triton_dist supports {package} {supported}. {remedy}"
        )


class SymmetricMemoryFull(TritonDistError, OSError):
    """Not enough memory for a symmetric allocation on some rank."""

    def __init__(self, where: str, needed: int, available: int, remedy: str) -> None:
        self.needed, self.available = needed, available
        super().__init__(
            f"{where}: a symmetric allocation needs {needed} bytes, {available} bytes are "
            f"available. {remedy}"
        )


class WaitTimeout(TritonDistError, TimeoutError):
    """A wait inside a kernel (interpreter) or on a copy stream that exceeded its wall-clock
    limit."""

    def __init__(
        self, *, rank: int, program: object, flag: str, expected: int, seen: int, seconds: float
    ) -> None:
        self.rank, self.flag, self.expected, self.seen = rank, flag, expected, seen
        super().__init__(
            f"rank {rank}, {program}: waited {seconds:.1f} s for flag {flag} to reach {expected}, "
            f"it is {seen}. The rank that sets it did not get there: it failed, or ranks run "
            "different programs. TRITON_DIST_WAIT_TIMEOUT sets the limit in seconds."
        )


class RankTimeout(TritonDistError, TimeoutError):
    """Some rank did not arrive at a step that all ranks of the group take together.

    Ranks are those of the world, also in ``missing``, ``because`` (why a rank does not come, as far
    as it is known) and ``refusals`` (ranks whose own call raised before they sent a message, with
    what it raised).
    """

    def __init__(
        self,
        *,
        rank: int,
        phase: str,
        missing: Iterable[int],
        seconds: float,
        because: Mapping[int, str] | None = None,
        refusals: Mapping[int, str] | None = None,
    ) -> None:
        self.rank, self.phase, self.missing = rank, phase, tuple(missing)
        self.seconds, self.because = seconds, dict(because or {})
        self.refusals = dict(refusals or {})
        super().__init__(
            f"rank {rank}: {phase}: {_absence(self.missing, seconds, self.because)}. "
            "TRITON_DIST_AUTOTUNE_TIMEOUT sets the limit."
        )


def _absence(missing: Iterable[int], seconds: float, because: Mapping[int, str]) -> str:
    """The ranks that did not come, and what is known of them."""
    late = ", ".join(map(str, missing)) or "unknown"
    known = "; ".join(
        f"rank {rank}{reason if reason.startswith(',') else f' {reason}'}"
        for rank, reason in because.items()
    )
    return f"rank(s) {late} did not arrive within {seconds:.1f} s: " + (
        known or "they failed, or are still in other code; their own log says why"
    )


class TuningTimeout(RankTimeout):
    """A tuning that ended because some rank did not take part in a step: stuck, ended, or gone.

    Raised on every rank that is in the tuner's code; a rank that is stuck in the tuned function is
    ended by its watchdog with the same sentence and exit status :data:`WATCHDOG_EXIT_STATUS`.
    ``summary`` is the message without what to do. Ranks are those of the world.
    """

    def __init__(
        self,
        *,
        rank: int,
        function: str,
        phase: str,
        config: object,
        missing: Iterable[int],
        seconds: float,
        because: Mapping[int, str] | None = None,
        remark: str = "",
        is_first_message: bool = False,
    ) -> None:
        self.rank, self.function, self.phase, self.config = rank, function, phase, config
        self.missing, self.seconds, self.because = tuple(missing), seconds, dict(because or {})
        self.refusals: dict[int, str] = {}
        what = f"{phase} of config {config}" if config is not None else phase
        absence = _absence(self.missing, seconds, self.because)
        self.summary = f"rank {rank}: tuning of {function}, {what}: {absence}"
        advice = (
            "TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT sets the limit."
            if is_first_message
            else "What was measured is kept: start again and the tuning goes on. "
            "TRITON_DIST_AUTOTUNE_TIMEOUT sets the limit, TRITON_DIST_COMPILE_TIMEOUT that of "
            "prepare_fn."
        )
        super(RankTimeout, self).__init__(
            f"{self.summary}. {remark}{' ' if remark else ''}{advice}"
        )


WATCHDOG_EXIT_STATUS = 86
"""Exit status of a process that was stuck in a candidate, which only its end could interrupt."""


class RankDisagreement(TritonDistError, RuntimeError):
    """Ranks that must act alike came with different values; ``by_rank`` has the ranks of the
    world."""

    def __init__(
        self,
        what: str,
        by_rank: Mapping[int, object],
        remedy: str = "All ranks must come with the same.",
    ) -> None:
        self.by_rank = dict(by_rank)
        lines = "\n".join(f"  rank {rank}: {value}" for rank, value in self.by_rank.items())
        super().__init__(f"ranks disagree on {what}:\n{lines}\n{remedy}")


class NoValidConfig(TritonDistError, RuntimeError):
    """No config of the space can be used; holds the cause for each."""

    def __init__(self, function: str, key: object, causes: Mapping[str, str]) -> None:
        self.causes = dict(causes)
        lines = "\n".join(f"  {config}: {cause}" for config, cause in self.causes.items())
        detail = f"\n{lines}" if lines else " the config space is empty."
        super().__init__(f"{function}: no valid config for key {key}:{detail}")


class TuningAborted(TritonDistError, RuntimeError):
    """A failed candidate left some rank in a state in which no other can be tried."""

    def __init__(self, function: str, config: object, causes: Mapping[int, str]) -> None:
        self.causes = dict(causes)
        lines = "\n".join(f"  rank {rank}: {cause}" for rank, cause in self.causes.items())
        super().__init__(
            f"{function}: tuning ends at config {config}, which failed; then recovering failed "
            f"too:\n{lines}\nStart the processes again: the tuning goes on without that config. A "
            "recover_fn that resets the state would have let it go on here."
        )


class CaptureInProgress(TritonDistError, RuntimeError):
    """Something was asked for that cannot be done while the current stream is captured into a CUDA
    graph: a tuning, or memory that outlives the graph."""

    def __init__(
        self,
        function: str,
        reason: str = "cannot be tuned during CUDA-graph capture, and this key has no record. "
        "Call its tune() with the same arguments before the capture.",
    ) -> None:
        super().__init__(f"{function}: {reason}")


class TuningFrozen(TritonDistError, RuntimeError):
    """A call that would have to tune, while ``TRITON_DIST_AUTOTUNE_FROZEN`` forbids it.

    Raised on every rank, before anything is launched. ``reason`` says why this rank has no valid
    record; ``ranks`` are those on which the variable is set.
    """

    def __init__(
        self, function: str, key: object, hardware: str, reason: str, ranks: Iterable[int]
    ) -> None:
        self.function, self.key, self.reason, self.ranks = function, key, reason, tuple(ranks)
        super().__init__(
            f"{function}, key {key} on {hardware}: {reason}; and tuning is forbidden, because "
            f"TRITON_DIST_AUTOTUNE_FROZEN is set on rank(s) {', '.join(map(str, self.ranks))}. "
            "Tune ahead, on such ranks and without the variable: call the function, or its tune(), "
            "with such arguments; or unset the variable."
        )


class NewerSchema(TritonDistError, ValueError):
    """A tuning record, or a pack of them, that a later version of triton_dist wrote."""

    def __init__(self, schema: int, known: int) -> None:
        super().__init__(
            f"its schema is {schema}, this version of triton_dist reads up to {known}; a later "
            "one wrote it"
        )


class PackRefused(TritonDistError, ValueError):
    """A pack, or a file in it, is damaged, foreign or of a later format.

    Attributes:
        pack: path of the pack.
        member: name of the file in it, or empty.
    """

    def __init__(self, pack: str, member: str, reason: str) -> None:
        reason = " ".join(reason.split())  # it may quote the pack
        self.pack, self.member, self.reason = pack, member, reason
        what = f"pack {pack}, member {member!r}," if member else f"pack {pack}"
        super().__init__(f"{what} is refused: {reason}. Make it again: triton-dist pack")


class KernelNotShipped(TritonDistError, RuntimeError):
    """A kernel that would have to be compiled, while ``TRITON_DIST_COMPILE_FROZEN`` forbids it.

    ``specialisation`` has what it would be compiled from, as text; ``nearest`` is the shipped
    kernel of that name which is most like it, empty if there is none, and ``differences`` say what
    differs. A native module by which Triton launches kernels is one too: it would take a C
    compiler. So is an artefact above the cubin, or a toolchain, of a launch by ``runner``.
    """

    def __init__(
        self,
        kernel: str,
        specialisation: Mapping[str, str],
        nearest: str,
        differences: Iterable[str],
        reason: str = "",
        remedy: str = "triton-dist pack --kernels",
    ) -> None:
        self.kernel, self.specialisation = kernel, dict(specialisation)
        self.nearest, self.differences = nearest, tuple(differences)
        what = ", ".join(f"{name}: {value}" for name, value in self.specialisation.items())
        near = f"nearest is {nearest}; " if nearest else ""
        why = reason or near + ("; ".join(self.differences) or "no such name is shipped")
        super().__init__(
            f"kernel {kernel} ({what}) is neither in Triton's cache nor in a pack: {why}. "
            "Compiling is forbidden, because TRITON_DIST_COMPILE_FROZEN is set. Ship it: "
            f"{remedy}, or unset the variable."
        )


class NoSuchFunction(TritonDistError, LookupError):
    """A command was asked about a tuned function that is not there, or has not what it needs."""

    def __init__(self, asked: str, reason: str, remedy: str) -> None:
        super().__init__(f"{asked}: {reason}. {remedy}")


class NoSuchRecord(TritonDistError, LookupError):
    """A command was asked about one tuning record, and a file is none, or the words fit several."""

    def __init__(self, asked: str, reason: str, remedy: str) -> None:
        super().__init__(f"{asked}: {reason}. {remedy}")


class MissingExtra(TritonDistError, ImportError):
    """A package that only some uses need, and that is not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(
            f"{what} needs {package}, which is not installed here. Install it: pip install "
            f"'triton_dist[{extra}]', or pip install {package}"
        )


class CandidateFailed(TritonDistError, RuntimeError):
    """One config could not be prepared or run; the tuner records it and goes on."""


class InvalidArtefact(TritonDistError, ValueError):
    """A compiled kernel in a file, or a text of one, that is missing, damaged, of a later version,
    or that Triton cannot compile any further; ``why`` says which."""

    def __init__(self, where: str, why: str) -> None:
        self.where, self.why = where, why
        super().__init__(f"{where}: {why}")


class ArtefactRefused(TritonDistError, ValueError):
    """A launch whose artefact was made for other arguments or another GPU; nothing was launched.

    ``why`` has what the artefact wants and what the call has.
    """

    def __init__(self, kernel: str, where: str, why: str) -> None:
        self.kernel, self.where, self.why = kernel, where, why
        super().__init__(f"{kernel}: {where} cannot be launched so: {why}")


class CompileTimeout(TritonDistError, TimeoutError):
    """A kernel that the compiler did not finish in time."""

    def __init__(self, kernel: str, seconds: float) -> None:
        super().__init__(
            f"compiling {kernel} took more than {seconds:.0f} s and was ended; "
            "TRITON_DIST_COMPILE_TIMEOUT sets the limit"
        )


@dataclass(frozen=True)
class RankFailure:
    """The end of one spawned rank that did not return."""

    exception: str
    """Name of the exception's type; ``"Died"`` and ``"TimedOut"`` for a rank that raised none."""
    message: str
    traceback: str
    """Activity of the rank: the exception's traceback, or the stacks of a rank that was stuck."""


class RanksFailed(TritonDistError, RuntimeError):
    """Some spawned ranks did not return.

    ``by_rank`` has the :class:`RankFailure` of each, in the order in which they failed. The message
    begins with the failure that most likely caused the others, and shows equal failures once.
    """

    def __init__(self, function: str, world_size: int, by_rank: Mapping[int, RankFailure]) -> None:
        self.by_rank = dict(by_rank)
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank, failure in sorted(
            self.by_rank.items(), key=lambda item: _is_consequence(item[1])
        ):
            texts = (failure.exception, failure.message, failure.traceback)
            alike.setdefault(
                tuple(re.sub(rf"\brank {rank}\b", "this rank", text) for text in texts), []
            ).append(rank)
        details = []
        for ranks in alike.values():
            failure = self.by_rank[ranks[0]]
            named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            heading = f"{named}: {failure.exception}: {failure.message}"
            details.append((heading, f"--- {heading}\n{failure.traceback}".rstrip()))
        first = details[0][0].partition("\n")[0] if details else ""
        super().__init__(
            "\n".join(
                [
                    f"{function}: {len(self.by_rank)} of {world_size} ranks failed. {first}",
                    *(text for _, text in details),
                ]
            )
        )


def cause_of(error: BaseException) -> BaseException:
    """Return ``error``, or the exception that was handled when waiting for other ranks timed out.

    Such a wait is most often part of a clean-up: the exception before it is the cause.
    """
    while isinstance(error, RankTimeout | WaitTimeout) and error.__cause__ is None:
        if error.__context__ is None:
            break
        error = error.__context__
    return error


def _is_consequence(failure: RankFailure) -> bool:
    """True if the rank most likely failed because another rank did."""
    return failure.exception in (
        "RankTimeout", "TuningTimeout", "WaitTimeout", "RankDisagreement", "TimedOut"
    )  # fmt: skip


class TritonDistWarning(UserWarning):
    """Base of every warning that triton_dist issues."""


class CacheWarning(TritonDistWarning):
    """A cached tuning record that could not be used or written."""


class ArtefactWarning(TritonDistWarning):
    """An artefact that does not say what it was made for, so that a launch cannot be checked."""


class TuningWarning(TritonDistWarning):
    """Something about a tuning that a user should know and that is no error."""
