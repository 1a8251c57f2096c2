"""The modes of ``TRITON_DIST_DEBUG``: what each mode finds, where it works, and what it sets.

Triton ignores unknown instrumentation modes, so a run with a misspelt mode would find nothing. This
module raises an error for modes that cannot find anything in this process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import triton
from packaging.version import Version

from triton_dist import knobs
from triton_dist.debugging.faults import DebugModeRefused
from triton_dist.runtime import interpreter
from triton_dist.runtime.triton_compat import is_interpreting, triton_version

CHECKS = ("bounds", "init", "waits", "race")
"""Checks of ``interp``, the mode that runs kernels in the interpreter."""
_INTERACTIVE = ("attach", "where")
"""Modes that let the user inspect a running job."""
INTERPRETER, GPU, NOTHING = "interpreter", "gpu", "nothing"
"""What executes kernels in a process. ``NOTHING``: there is no GPU, and kernels are compiled."""
_INTERPRETER_COMMAND_PREFIX = "TRITON_INTERPRET=1 TRITON_DIST_DEVICE=cpu TRITON_DIST_DEBUG={}"
_INSTRUMENTATION_VARIABLE, _ASSERTIONS_VARIABLE = "TRITON_INSTRUMENTATION_MODE", "TRITON_DEBUG"


@dataclass(frozen=True)
class Mode:
    """A mode other than the checks of ``interp``.

    Attributes:
        finds: what the mode finds, in a few words.
        alternative: the mode to use instead. It finds most of the errors that this mode finds.
        unsupported: why the mode finds nothing with a release of Triton, by release (``"3.7"``).
        variables: environment variables that the mode sets for this process and its children.
        is_sanitizer_tool: whether this is a tool of compute-sanitizer, which starts the process.
        works_on: values of ``Environment.executor`` with which the mode works.
    """

    finds: str
    alternative: str
    unsupported: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    is_sanitizer_tool: bool = False
    works_on: tuple[str, ...] = (GPU,)


_UNSUPPORTED_REASON = "Triton {} does not support it and would ignore it"
_COMPILE_ERROR_REASON = "in Triton {} pipelined loops do not compile with it"
_SANITIZER_REASON = (
    "it only checks memory of its own allocator, and neither symmetric memory nor the inline "
    "assembly of packets"
)


def _unsupported(reason: str, *releases: str) -> dict[str, str]:
    return {release: reason.format(release) for release in releases}


def _instrumented(finds: str, name: str, alternative: str, unsupported: Mapping[str, str]) -> Mode:
    return Mode(finds, alternative, unsupported, {_INSTRUMENTATION_VARIABLE: name})


MODES: Mapping[str, Mode] = {
    # Interpreted kernels always check assertions.
    "assert": Mode(
        "tl.device_assert, integer overflow",
        "interp",
        variables={_ASSERTIONS_VARIABLE: "1"},
        works_on=(GPU, INTERPRETER),
    ),
    "attach": Mode(
        "nothing itself; it lets pdb stop ranks", "interp:waits,attach", works_on=(INTERPRETER,)
    ),
    "agree": Mode(
        "expert ids, or inputs of layers, that differ between ranks in one call",
        "agree",
        works_on=(GPU, INTERPRETER, NOTHING),
    ),
    "where": Mode("the status of each rank", "where", works_on=(GPU, INTERPRETER, NOTHING)),
    "consan": _instrumented(
        "races on shared memory, barriers, asynchronous copies",
        "consan",
        "racecheck",
        _unsupported(_COMPILE_ERROR_REASON, "3.7", "3.8"),
    ),
    "iisan": _instrumented(
        "TMA arguments that cause an illegal instruction",
        "iisan",
        "interp:bounds",
        _unsupported(_UNSUPPORTED_REASON, "3.6"),
    ),
    "fpsan": _instrumented(
        "wrong operands: floats are replaced by integers, whose results are exact",
        "fpsan",
        "interp",
        _unsupported(_UNSUPPORTED_REASON, "3.6", "3.7"),
    ),
    "gsan": _instrumented(
        "races on global memory",
        "gsan",
        "interp:race",
        _unsupported(_UNSUPPORTED_REASON, "3.6", "3.7")
        | _unsupported(_SANITIZER_REASON, "3.8", "3.9"),
    ),
    "memcheck": Mode("accesses outside of allocations", "interp:bounds", is_sanitizer_tool=True),
    "initcheck": Mode(
        "reads of memory that was never written", "interp:init", is_sanitizer_tool=True
    ),
    "racecheck": Mode("races on shared memory", "interp", is_sanitizer_tool=True),
    "synccheck": Mode(
        "barriers that not all threads reach", "interp:waits", is_sanitizer_tool=True
    ),
}


@dataclass(frozen=True)
class Environment:
    """The environment that decides which modes work.

    Attributes:
        version: Triton's version.
        executor: what executes kernels: ``INTERPRETER``, ``GPU`` or ``NOTHING``.
        sanitizer_tool: the compute-sanitizer tool under which the process runs, or "".
    """

    version: Version
    executor: str
    sanitizer_tool: str = ""

    @classmethod
    def current(cls) -> Environment:
        executor = INTERPRETER if is_interpreting() else GPU if _compiles() else NOTHING
        return cls(triton_version(), executor, knobs.debug_tool.get() or "")


def _compiles() -> bool:
    """Return whether kernels can be compiled: with a GPU, or with a driver that replaces it."""
    return torch.cuda.is_available() or triton.runtime.driver._active is not None


_NOT_MODES: Mapping[str, tuple[str, str]] = {
    "compile": (
        "kernels that are only compiled write nothing and set no flags: the program would "
        "continue with wrong values, and its ranks would wait forever",
        "triton_dist.testing.compile_only around the launches to compile, and "
        "`triton-dist dump --diff`",
    )
}
"""Words that users may expect to be modes: why they are not modes, and what to use instead."""


def interpreter_checks(names: Iterable[str]) -> tuple[str, ...]:
    """Return the interpreter checks among ``names``, in the order of ``CHECKS``.

    Raises:
        DebugModeRefused: a name is not a mode.
    """
    names, requested_checks = set(names), set()
    for name in names:
        base, _, check = name.partition(":")
        if name in MODES:
            continue
        if name in _NOT_MODES:
            raise DebugModeRefused(name, *_NOT_MODES[name])
        if base != "interp" or (check and check not in CHECKS):
            known = ["interp", *(f"interp:{each}" for each in CHECKS), *MODES]
            raise DebugModeRefused(name, "no such mode", f"one of {', '.join(known)}")
        requested_checks |= {check} if check else {*CHECKS}
    return tuple(check for check in CHECKS if check in requested_checks)


def check(names: Iterable[str], environment: Environment) -> tuple[str, ...]:
    """Check that the modes in ``names`` work, and return the interpreter checks among them.

    Raises:
        DebugModeRefused: a name is not a mode, or the mode cannot find anything. The message has
            the reason and an alternative that works.
    """
    names = tuple(names)
    checks = interpreter_checks(names)
    release = f"{environment.version.major}.{environment.version.minor}"
    if checks and environment.executor != INTERPRETER:
        raise DebugModeRefused(
            "interp",
            "kernels are not interpreted in this process; Triton decides this at its import",
            "`triton-dist debug interp -- COMMAND`, or "
            + _INTERPRETER_COMMAND_PREFIX.format(",".join(names)),
        )
    for name in names:
        mode = MODES.get(name)
        if mode is None or (environment.executor in mode.works_on and environment.executor != GPU):
            continue
        alternative = alternative_to(name, environment.executor)
        if name == "attach":
            raise DebugModeRefused(name, "pdb steps through interpreted kernels only", alternative)
        if environment.executor == INTERPRETER:
            raise DebugModeRefused(
                name, "it requires compiled kernels, but kernels are interpreted", alternative
            )
        if release in mode.unsupported:
            raise DebugModeRefused(name, mode.unsupported[release], alternative)
        if environment.executor == NOTHING:
            raise DebugModeRefused(name, "there is no GPU", alternative)
        if mode.is_sanitizer_tool and environment.sanitizer_tool != name:
            command = f"`triton-dist debug {name} -- COMMAND`"
            raise DebugModeRefused(name, "compute-sanitizer starts the process", command)
    exclusive = [
        name for name in names if _INSTRUMENTATION_VARIABLE in MODES.get(name, _NO_MODE).variables
    ]
    exclusive = exclusive or [name for name in names if MODES.get(name, _NO_MODE).is_sanitizer_tool]
    if len(exclusive) > 1:
        raise DebugModeRefused(
            exclusive[1], f"it cannot be combined with {exclusive[0]}", "two runs"
        )
    return checks


_NO_MODE = Mode("", "")


def alternative_to(name: str, executor: str) -> str:
    """Return what to use instead of the mode ``name``: the name of another mode, or the environment
    variables for a mode of the interpreter."""
    alternative = MODES[name].alternative
    if alternative in MODES and executor == GPU:
        return alternative
    return _INTERPRETER_COMMAND_PREFIX.format("interp" if alternative in MODES else alternative)


def variables_to_set(names: Iterable[str]) -> dict[str, str]:
    """Return the environment variables that the modes in ``names`` set. Modes that slow down
    compiled kernels also turn tuning off."""
    variables = {n: v for name in names if name in MODES for n, v in MODES[name].variables.items()}
    if any(
        MODES[name].is_sanitizer_tool or MODES[name].variables for name in names if name in MODES
    ):
        variables[knobs.autotune.variable] = "0"
    return variables


@functools.cache
def activate() -> tuple[str, ...]:
    """Turn on and print the modes of ``TRITON_DIST_DEBUG``. Return the interpreter checks and the
    interactive modes among them.

    Raises:
        DebugModeRefused: see :func:`check`.
    """
    names = knobs.debug.get()
    if not names:
        return ()
    interactive = tuple(name for name in _INTERACTIVE if name in names)
    environment = Environment.current()
    checks = check(names, environment)
    changed = variables_to_set(names) if environment.executor == GPU else {}
    for variable, value in changed.items():
        knobs.put(variable, value)
    # Triton has already read these variables at its import.
    if _INSTRUMENTATION_VARIABLE in changed:
        triton.knobs.compilation.instrumentation_mode = changed[_INSTRUMENTATION_VARIABLE]
    if _ASSERTIONS_VARIABLE in changed:
        triton.knobs.runtime.debug = True
    active = [*(f"interp:{each}" for each in checks), *(name for name in names if name in MODES)]
    settings = " ".join(f"{variable}={value}" for variable, value in changed.items())
    print(
        f"triton_dist: rank {knobs.rank.get()}: debugging with {', '.join(active)}"
        + (f"; {settings}; times are not meaningful" if settings else ""),
        file=sys.stderr,
        flush=True,
    )
    if environment.executor != INTERPRETER and interactive:
        from triton_dist.debugging import deadlock_check, rank_status

        rank_status.install_signal_handler()
        rank_status.start()
        deadlock_check.DeadlockCheck(raises=False).start()
    return checks + interactive


@functools.cache
def install_interpreter() -> None:
    """Apply the workarounds for Triton's interpreter, and turn on the modes of
    ``TRITON_DIST_DEBUG``. Runs once per process.

    Raises:
        DebugModeRefused: see :func:`check`.
    """
    interpreter.install()
    requested_checks = activate()
    if requested_checks:  # imported lazily, because the checks are slow to import and rarely used
        from triton_dist.debugging import checks

        checks.install(requested_checks)
