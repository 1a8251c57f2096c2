"""Exceptions and warnings of triton_dist, each defined together with its message.

A message says what happened, where (argument, rank, config, key) and what to do. All exceptions
derive from :class:`TritonDistError`. They also derive from a matching built-in exception
(``ValueError``, ``OSError``, ``TimeoutError``), if there is one, so ``except ValueError`` works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class TritonDistError(Exception):
    """Base class of all exceptions of triton_dist."""


class InvalidArgument(TritonDistError, ValueError):
    """An argument has an unsupported value. Raised before anything is launched."""

    def __init__(self, function: str, argument: str, value: object, expected: str) -> None:
        self.function, self.argument, self.value, self.expected = (
            function,
            argument,
            value,
            expected,
        )
        super().__init__(f"{function}: {argument} is {value!r}, expected {expected}")


class ContextFinalized(TritonDistError, RuntimeError):
    """A context was used after its symmetric memory was freed."""

    def __init__(self, context: str) -> None:
        super().__init__(
            f"{context} was finalized: its symmetric buffers are freed. Create a new context, or "
            "call finalize() only after the last use."
        )


class DeviceUnavailable(TritonDistError, RuntimeError):
    """The requested device cannot be used in this process."""

    def __init__(self, requested: str, reason: str, remedy: str) -> None:
        super().__init__(f"device {requested!r} cannot be used: {reason}. {remedy}")


class UnsupportedVersion(TritonDistError, ImportError):
    """An installed dependency has a version outside of the supported range."""

    def __init__(self, package: str, found: str, supported: str, remedy: str = "") -> None:
        remedy = remedy or f"Install a supported version: pip install '{package}{supported}'"
        super().__init__(
            f"{package} {found} is installed, triton_dist supports {package} {supported}. {remedy}"
        )


class SymmetricMemoryFull(TritonDistError, OSError):
    """A rank has too little memory for a symmetric allocation; raised on every rank."""

    def __init__(self, where: str, needed: int, available: int, remedy: str) -> None:
        self.needed, self.available = needed, available
        super().__init__(
            f"{where}: a symmetric allocation needs {needed} bytes, {available} bytes are "
            f"available. {remedy}"
        )


class WaitTimeout(TritonDistError, TimeoutError):
    """A wait for a flag exceeded its wall-clock limit.

    Raised by waits in interpreted kernels and on copy streams.
    """

    def __init__(
        self, *, rank: int, program: object, flag: str, expected: int, seen: int, seconds: float
    ) -> None:
        self.rank, self.flag, self.expected, self.seen = rank, flag, expected, seen
        super().__init__(
            f"rank {rank}, {program}: waited {seconds:.1f} s for flag {flag} to reach "
            f"{expected}, it is {seen}. The rank that sets the flag failed, or ranks run "
            "different programs. TRITON_DIST_WAIT_TIMEOUT sets the limit in seconds."
        )


class RankTimeout(TritonDistError, TimeoutError):
    """A rank did not reach a step that all ranks of the group take together.

    All ranks here are global ranks.

    Attributes:
        missing: ranks that did not reach the step.
        because: by missing rank: the reason, if it is known.
        refusals: by rank: text of the error that the rank's own call raised before it sent anything
            to other ranks.
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
    """Return the clause about the missing ranks, with the known reasons."""
    late = ", ".join(map(str, missing)) or "unknown"
    reasons = "; ".join(
        f"rank {rank}{reason if reason.startswith(',') else f' {reason}'}"
        for rank, reason in because.items()
    )
    return f"rank(s) {late} did not arrive within {seconds:.1f} s: " + (
        reasons or "they failed, or still run other code; their own logs show the cause"
    )


class TuningTimeout(RankTimeout):
    """Tuning ended because a rank did not take part in a step: it is stuck, ended or unreachable.

    Raised on every rank that waits for the missing rank. If a rank is stuck in the tuned function,
    a watchdog thread prints this message on the rank and ends its process with
    :data:`WATCHDOG_EXIT_STATUS`. All ranks here are global ranks.

    Attributes:
        summary: the message without the advice.
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
            else "Measurements are kept: a restart continues the tuning. "
            "TRITON_DIST_AUTOTUNE_TIMEOUT sets the limit, TRITON_DIST_COMPILE_TIMEOUT sets "
            "the limit of prepare_fn."
        )
        super(RankTimeout, self).__init__(
            f"{self.summary}. {remark}{' ' if remark else ''}{advice}"
        )


WATCHDOG_EXIT_STATUS = 86
"""Exit status of a process that was stuck in the tuned function and could not be interrupted."""


class RankDisagreement(TritonDistError, RuntimeError):
    """Ranks passed different values where equal values are required.

    Attributes:
        by_rank: the value of each rank, by global rank.
    """

    def __init__(
        self,
        what: str,
        by_rank: Mapping[int, object],
        remedy: str = "All ranks must pass the same value.",
    ) -> None:
        self.by_rank = dict(by_rank)
        lines = "\n".join(f"  rank {rank}: {value}" for rank, value in self.by_rank.items())
        super().__init__(f"ranks disagree on {what}:\n{lines}\n{remedy}")


class NoValidConfig(TritonDistError, RuntimeError):
    """No config of the space can be used.

    Attributes:
        causes: by config, as text: the reason.
    """

    def __init__(self, function: str, key: object, causes: Mapping[str, str]) -> None:
        self.causes = dict(causes)
        lines = "\n".join(f"  {config}: {cause}" for config, cause in self.causes.items())
        detail = f"\n{lines}" if lines else " the config space is empty."
        super().__init__(f"{function}: no valid config for key {key}:{detail}")


class PriorFailed(TritonDistError, RuntimeError):
    """``prior_fn`` raised, or did not return a positive number. Raised on every rank.

    Attributes:
        rank: global rank whose ``prior_fn`` failed.
        config: the config as text.
    """

    def __init__(self, function: str, key: object, rank: int, config: str, cause: str) -> None:
        self.rank, self.config, self.cause = rank, config, cause
        super().__init__(
            f"{function}, key {key}: prior_fn failed on rank {rank} for config {config}: {cause}. "
            "It must return the predicted milliseconds of every config; inf means unknown."
        )


class TuningAborted(TritonDistError, RuntimeError):
    """A config failed, and the state of some rank could not be reset to try another config.

    Attributes:
        causes: by global rank: the error, if the rank could not be reset.
    """

    def __init__(self, function: str, config: object, causes: Mapping[int, str]) -> None:
        self.causes = dict(causes)
        lines = "\n".join(f"  rank {rank}: {cause}" for rank, cause in self.causes.items())
        super().__init__(
            f"{function}: tuning ends because config {config} failed and the recovery after it "
            f"failed too:\n{lines}\nStart the processes again: the tuning continues without that "
            "config. A recover_fn that resets the state avoids the restart."
        )


class CaptureInProgress(TritonDistError, RuntimeError):
    """The call cannot be captured into a CUDA graph.

    The call must tune, or must allocate memory that outlives the graph.
    """

    def __init__(
        self,
        function: str,
        reason: str = "cannot be tuned during CUDA-graph capture, and this key has no record. "
        "Call its tune() with the same arguments before the capture.",
    ) -> None:
        super().__init__(f"{function}: {reason}")


class TuningFrozen(TritonDistError, RuntimeError):
    """A call needs tuning, which ``TRITON_DIST_AUTOTUNE_FROZEN`` forbids.

    Raised on every rank, before anything is launched.

    Attributes:
        reason: why this rank has no valid record.
        ranks: global ranks on which the variable is set.
    """

    def __init__(
        self, function: str, key: object, hardware: str, reason: str, ranks: Iterable[int]
    ) -> None:
        self.function, self.key, self.reason, self.ranks = function, key, reason, tuple(ranks)
        super().__init__(
            f"{function}, key {key} on {hardware}: {reason}. Tuning is forbidden, because "
            f"TRITON_DIST_AUTOTUNE_FROZEN is set on rank(s) {', '.join(map(str, self.ranks))}. "
            "Tune in advance, on the same number of ranks and without the variable: call the "
            "function, or its tune(), with these arguments. Or unset the variable."
        )


class NewerSchema(TritonDistError, ValueError):
    """A tuning record or a pack of records was written by a later version of triton_dist."""

    def __init__(self, schema: int, supported: int) -> None:
        super().__init__(
            f"its schema is {schema}, this version of triton_dist reads up to {supported}; a later "
            "version wrote it"
        )


class PackRefused(TritonDistError, ValueError):
    """A pack, or a file in it, is damaged, is not a pack, or has a later format.

    Attributes:
        pack: path of the pack.
        member: name of the file in the pack; empty if the pack itself is refused.
    """

    def __init__(self, pack: str, member: str, reason: str) -> None:
        reason = " ".join(reason.split())  # the reason may quote lines of the pack
        self.pack, self.member, self.reason = pack, member, reason
        what = f"pack {pack}, member {member!r}," if member else f"pack {pack}"
        super().__init__(f"{what} is refused: {reason}. Create it again: triton-dist pack")


class KernelNotShipped(TritonDistError, RuntimeError):
    """A kernel must be compiled, which ``TRITON_DIST_COMPILE_FROZEN`` forbids.

    Also raised if Triton must build its native launcher with a C compiler. ``triton_dist.runner``
    raises it for a launch from PTX or another level above the cubin, or with another Triton
    installation, because such a launch compiles.

    Attributes:
        specialisation: the inputs of the compilation, as text by name.
        nearest: the most similar shipped kernel with this name; empty if there is none.
        differences: the differences between ``nearest`` and this kernel.
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
    """A subcommand needs a tuned function that does not exist, has no records, or declares no
    ``version=``."""

    def __init__(self, requested: str, reason: str, remedy: str) -> None:
        super().__init__(f"{requested}: {reason}. {remedy}")


class NoSuchRecord(TritonDistError, LookupError):
    """A subcommand needs one tuning record, but the given file is not a record, or the given words
    match no record or several records."""

    def __init__(self, requested: str, reason: str, remedy: str) -> None:
        super().__init__(f"{requested}: {reason}. {remedy}")


class MissingExtra(TritonDistError, ImportError):
    """An optional package is required but not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(
            f"{what} needs {package}, which is not installed. Install it: pip install "
            f"'triton-dist-tuner[{extra}]', or pip install {package}"
        )


class CandidateFailed(TritonDistError, RuntimeError):
    """A config cannot be prepared or run. The tuner records the failure and continues."""


class InvalidArtefact(TritonDistError, ValueError):
    """A file with a compiled kernel or its intermediate code cannot be used.

    It is missing, damaged, of a later version, or rejected by Triton's compiler.

    Attributes:
        location: path of the file, or another description of the artefact.
    """

    def __init__(self, location: str, reason: str) -> None:
        self.location, self.reason = location, reason
        super().__init__(f"{location}: {reason}")


class ArtefactRefused(TritonDistError, ValueError):
    """An artefact (a compiled kernel or its intermediate code, in a file) cannot be launched,
    because it was made for other arguments or another GPU.

    Nothing was launched.

    Attributes:
        reason: what the artefact requires and what the call passed.
    """

    def __init__(self, kernel: str, location: str, reason: str) -> None:
        self.kernel, self.location, self.reason = kernel, location, reason
        super().__init__(f"{kernel}: {location} cannot be launched with these arguments: {reason}")


class CompileTimeout(TritonDistError, TimeoutError):
    """The compiler did not finish a kernel within ``TRITON_DIST_COMPILE_TIMEOUT``."""

    def __init__(self, kernel: str, seconds: float) -> None:
        super().__init__(
            f"compiling {kernel} took more than {seconds:.0f} s and was stopped; "
            "TRITON_DIST_COMPILE_TIMEOUT sets the limit"
        )


@dataclass(frozen=True)
class RankFailure:
    """The failure of one spawned rank."""

    exception: str
    """Name of the exception's type; ``"Died"`` or ``"TimedOut"`` without an exception."""
    message: str
    traceback: str
    """Traceback of the exception, or the stacks of a rank that was stuck."""


class RanksFailed(TritonDistError, RuntimeError):
    """Some spawned ranks failed.

    The message begins with the failure that most likely caused the other failures. Equal failures
    are shown once.

    Attributes:
        by_rank: the :class:`RankFailure` of each failed rank, in order of time.
    """

    def __init__(self, function: str, world_size: int, by_rank: Mapping[int, RankFailure]) -> None:
        self.by_rank = dict(by_rank)
        ranks_by_texts: dict[tuple[str, ...], list[int]] = {}
        for rank, failure in sorted(
            self.by_rank.items(), key=lambda item: _is_consequence(item[1])
        ):
            texts = (failure.exception, failure.message, failure.traceback)
            ranks_by_texts.setdefault(
                tuple(re.sub(rf"\brank {rank}\b", "this rank", text) for text in texts), []
            ).append(rank)
        details = []
        for ranks in ranks_by_texts.values():
            failure = self.by_rank[ranks[0]]
            label = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            heading = f"{label}: {failure.exception}: {failure.message}"
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


def original_error(error: BaseException) -> BaseException:
    """Return the cause of ``error``, or ``error`` itself.

    If ``error`` is a timeout of a wait for ranks that happened while another exception was handled,
    return the other exception. The wait is usually part of the clean-up after it.
    """
    while isinstance(error, RankTimeout | WaitTimeout) and error.__cause__ is None:
        if error.__context__ is None:
            break
        error = error.__context__
    return error


def _is_consequence(failure: RankFailure) -> bool:
    """Return whether another rank's failure most likely caused ``failure``."""
    return failure.exception in (
        "RankTimeout", "TuningTimeout", "WaitTimeout", "RankDisagreement", "TimedOut"
    )  # fmt: skip


class TritonDistWarning(UserWarning):
    """Base class of all warnings of triton_dist."""


class CacheWarning(TritonDistWarning):
    """A tuning record could not be read or written."""


class ArtefactWarning(TritonDistWarning):
    """An artefact (a compiled kernel or its intermediate code, in a file) has no metadata, so its
    launch cannot be checked."""


class TuningWarning(TritonDistWarning):
    """A condition of a tuning that is not an error and that the user should fix or accept."""
