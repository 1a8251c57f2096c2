"""Modes of ``TRITON_DIST_DEBUG``: what each finds, where it can, and what it sets.

Triton takes any text as an instrumentation mode and ignores what its version lacks, so that a run
finds nothing because nothing was looked for. Here a mode that could find nothing is refused.
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
"""Checks of ``interp``."""
_TELL = ("attach", "where")
"""Modes that look for nothing, and answer who asks."""
INTERPRETER, GPU, NOTHING = "interpreter", "gpu", "nothing"
_IN_INTERPRETER = "TRITON_INTERPRET=1 TRITON_DIST_DEVICE=cpu TRITON_DIST_DEBUG={}"
_INSTRUMENTATION, _ASSERTIONS = "TRITON_INSTRUMENTATION_MODE", "TRITON_DEBUG"


@dataclass(frozen=True)
class Mode:
    """One mode that works in compiled kernels.

    Attributes:
        finds: in a few words.
        lacks: by release of Triton, such as ``"3.7"``, why the mode finds nothing there.
        nearest: the mode of the interpreter that finds the most of it.
        variables: what it sets for this process and its children.
        tool: a tool of compute-sanitizer, around the process.
        works: on what kernels run where it does something.
    """

    finds: str
    nearest: str
    lacks: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    tool: bool = False
    works: tuple[str, ...] = (GPU,)


_UNKNOWN = "Triton {} does not know it, and would ignore it"
_FAILS = "of Triton {} it fails to compile every loop that is pipelined"
_FOREIGN = (
    "it sees only memory of its own allocator, which symmetric memory is not taken from, and not "
    "the inline assembly of packets"
)


def _lacks(reason: str, *releases: str) -> dict[str, str]:
    return {release: reason.format(release) for release in releases}


def _instrumented(finds: str, name: str, nearest: str, lacks: Mapping[str, str]) -> Mode:
    return Mode(finds, nearest, lacks, {_INSTRUMENTATION: name})


MODES: Mapping[str, Mode] = {
    # Interpreted, assertions always hold a program up.
    "assert": Mode(
        "tl.device_assert, integer overflow",
        "interp",
        variables={_ASSERTIONS: "1"},
        works=(GPU, INTERPRETER),
    ),
    "attach": Mode("what a person sees in pdb", "interp:waits,attach", works=(INTERPRETER,)),
    "agree": Mode(
        "ids of experts that ranks come to a call with unlike",
        "agree",
        works=(GPU, INTERPRETER, NOTHING),
    ),
    "where": Mode("where each rank stands", "where", works=(GPU, INTERPRETER, NOTHING)),
    "consan": _instrumented(
        "races on shared memory, barriers, asynchronous copies",
        "consan",
        "racecheck",
        _lacks(_FAILS, "3.7", "3.8"),
    ),
    "iisan": _instrumented(
        "arguments of TMA that end in an illegal instruction",
        "iisan",
        "interp:bounds",
        _lacks(_UNKNOWN, "3.6"),
    ),
    "fpsan": _instrumented(
        "wrong operands, as exact integers", "fpsan", "interp", _lacks(_UNKNOWN, "3.6", "3.7")
    ),
    "gsan": _instrumented(
        "races on global memory",
        "gsan",
        "interp:race",
        _lacks(_UNKNOWN, "3.6", "3.7") | _lacks(_FOREIGN, "3.8", "3.9"),
    ),
    "memcheck": Mode("accesses outside of allocations", "interp:bounds", tool=True),
    "initcheck": Mode("reads of memory that nobody wrote", "interp:init", tool=True),
    "racecheck": Mode("races on shared memory", "interp", tool=True),
    "synccheck": Mode("barriers that not all threads reach", "interp:waits", tool=True),
}


@dataclass(frozen=True)
class Place:
    """Facts that decide which modes can work: Triton's version, what runs kernels (one of
    ``INTERPRETER``, ``GPU``, ``NOTHING``), and the tool that the process runs under."""

    version: Version
    runs: str
    tool: str = ""

    @classmethod
    def here(cls) -> Place:
        runs = INTERPRETER if is_interpreting() else GPU if _compiles() else NOTHING
        return cls(triton_version(), runs, knobs.debug_tool.get() or "")


def _compiles() -> bool:
    """True with a GPU, or a driver that stands for one."""
    return torch.cuda.is_available() or triton.runtime.driver._active is not None


_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "compile": (
        "kernels that are compiled and not run write nothing and set no flag, so a program would "
        "go on with wrong values, and its ranks would wait for ever",
        "triton_dist.testing.compile_only around the launches that you want to compile, and "
        "`triton-dist dump --diff`",
    )
}
"""Words that one may look for here: why each is no mode, and what does it."""


def checks_of(words: Iterable[str]) -> tuple[str, ...]:
    """The checks of the interpreter among ``words``, in the order of ``CHECKS``.

    Raises:
        DebugModeRefused: a word is no mode.
    """
    words, wanted = set(words), set()
    for word in words:
        name, _, check = word.partition(":")
        if word in MODES:
            continue
        if word in _ELSEWHERE:
            raise DebugModeRefused(word, *_ELSEWHERE[word])
        if name != "interp" or (check and check not in CHECKS):
            known = ["interp", *(f"interp:{each}" for each in CHECKS), *MODES]
            raise DebugModeRefused(word, "there is no such mode", f"one of {', '.join(known)}")
        wanted |= {check} if check else {*CHECKS}
    return tuple(check for check in CHECKS if check in wanted)


def check(words: Iterable[str], place: Place) -> tuple[str, ...]:
    """The checks of the interpreter among ``words``, all of which can work at ``place``.

    Raises:
        DebugModeRefused: a word is no mode, or one that would find nothing, with the reason and
            the nearest that can.
    """
    words = tuple(words)
    checks = checks_of(words)
    release = f"{place.version.major}.{place.version.minor}"
    if checks and place.runs != INTERPRETER:
        raise DebugModeRefused(
            "interp",
            "kernels are not interpreted here, and Triton decides that when it is imported",
            f"`triton-dist debug interp -- COMMAND`, or {_IN_INTERPRETER.format(','.join(words))}",
        )
    for word in words:
        mode = MODES.get(word)
        if mode is None or (place.runs in mode.works and place.runs != GPU):
            continue
        nearest = nearest_of(word, place.runs)
        if word == "attach":
            raise DebugModeRefused(word, "pdb steps through interpreted kernels only", nearest)
        if place.runs == INTERPRETER:
            raise DebugModeRefused(
                word, "it is for compiled kernels; these are interpreted", nearest
            )
        if release in mode.lacks:
            raise DebugModeRefused(word, mode.lacks[release], nearest)
        if place.runs == NOTHING:
            raise DebugModeRefused(word, "there is no GPU", nearest)
        if mode.tool and place.tool != word:
            command = f"`triton-dist debug {word} -- COMMAND`"
            raise DebugModeRefused(word, "compute-sanitizer starts the process", command)
    one_of_a_kind = [word for word in words if _INSTRUMENTATION in MODES.get(word, _NONE).variables]
    one_of_a_kind = one_of_a_kind or [word for word in words if MODES.get(word, _NONE).tool]
    if len(one_of_a_kind) > 1:
        raise DebugModeRefused(
            one_of_a_kind[1], f"{one_of_a_kind[0]} is on, and one excludes the other", "two runs"
        )
    return checks


_NONE = Mode("", "")


def nearest_of(word: str, runs: str) -> str:
    """The mode that finds the most of what ``word`` does where kernels run so."""
    nearest = MODES[word].nearest
    if nearest in MODES and runs == GPU:
        return nearest
    return _IN_INTERPRETER.format("interp" if nearest in MODES else nearest)


def variables_of(words: Iterable[str]) -> dict[str, str]:
    """Variables that modes of compiled kernels set. Nothing is tuned meanwhile: such kernels are
    others, and their times would stay in the cache."""
    set_by = {n: v for word in words if word in MODES for n, v in MODES[word].variables.items()}
    if any(MODES[word].tool or MODES[word].variables for word in words if word in MODES):
        set_by[knobs.autotune.variable] = "0"
    return set_by


@functools.cache
def activate() -> tuple[str, ...]:
    """Turn on what ``TRITON_DIST_DEBUG`` asks for, say so once, and return what the interpreter is
    to turn on; nothing is done where it is not set.

    Raises:
        DebugModeRefused: as :func:`check`.
    """
    words = knobs.debug.get()
    if not words:
        return ()
    tell = tuple(word for word in _TELL if word in words)
    place = Place.here()
    checks = check(words, place)
    changed = variables_of(words) if place.runs == GPU else {}
    for variable, value in changed.items():
        knobs.put(variable, value)
    # Triton reads these when it is imported, which was before.
    if _INSTRUMENTATION in changed:
        triton.knobs.compilation.instrumentation_mode = changed[_INSTRUMENTATION]
    if _ASSERTIONS in changed:
        triton.knobs.runtime.debug = True
    shown = [*(f"interp:{each}" for each in checks), *(word for word in words if word in MODES)]
    sets = " ".join(f"{variable}={value}" for variable, value in changed.items())
    print(
        f"triton_dist: rank {knobs.rank.get()}: debugging with {', '.join(shown)}"
        + (f"; {sets}; times mean nothing" if sets else ""),
        file=sys.stderr,
        flush=True,
    )
    if place.runs != INTERPRETER and tell:
        from triton_dist.debugging import deadlock_check, rank_status

        rank_status.install_signal_handler()
        rank_status.start()
        deadlock_check.DeadlockCheck(validators=False).start()
    return checks + tell


@functools.cache
def install_interpreter() -> None:
    """Patch Triton's interpreter and turn on the checks of ``TRITON_DIST_DEBUG``, once per process.

    Raises:
        DebugModeRefused: as :func:`check`.
    """
    interpreter.install()
    wanted = activate()
    if wanted:  # the checks are slow to import, and most processes run without
        from triton_dist.debugging import checks

        checks.install(wanted)
