"""Every environment variable that triton_dist reads: type, default and one sentence each.

The only reader of ``os.environ`` in the package. A knob is read when it is looked at, so a test or
a script may set the variable at any time; nothing on a hot path looks at one.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from triton_dist.errors import TritonDistError

T = TypeVar("T")


class InvalidKnob(TritonDistError, ValueError):
    """An environment variable whose value cannot be read."""

    def __init__(self, variable: str, value: str, expected: str) -> None:
        super().__init__(f"environment variable {variable}={value!r}, expected {expected}")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One environment variable: ``get`` gives its value, or the default when unset or empty."""

    variable: str
    default: T
    parse: Callable[[str], T]
    expected: str
    doc: str

    def get(self) -> T:
        raw = os.environ.get(self.variable, "")
        if not raw:
            return self.default
        try:
            return self.parse(raw)
        except ValueError as error:
            raise InvalidKnob(self.variable, raw, self.expected) from error


class Folder(Knob[Path]):
    """A folder, as an absolute path."""

    def get(self) -> Path:
        return _folder(str(super().get()))


@functools.cache
def _absolute(path: str) -> Path:
    try:
        return Path(os.path.abspath(path))
    except OSError:  # the working directory was removed
        return Path(path)


def _folder(raw: str) -> Path:
    """Expand ``~``, unless no home folder is known. Resolve a relative path at its first read: a
    program may change its working directory."""
    path = os.path.expanduser(raw)
    return Path(path) if path.startswith("~") else _absolute(path)


def _checked(read: Callable[[str], T], is_good: Callable[[T], bool]) -> Callable[[str], T]:
    """Return a parser that raises ``ValueError`` for a value that is not good."""

    def parse(raw: str) -> T:
        value = read(raw)
        if not is_good(value):
            raise ValueError(raw)
        return value

    return parse


def _word(raw: str) -> str:
    return raw.strip().lower()


_positive = _checked(float, lambda value: 0 < value < math.inf)
_not_negative = _checked(float, lambda value: 0 <= value < math.inf)
_count = _checked(int, lambda value: value >= 1)


def _flag(raw: str) -> bool:
    return _checked(_word, (_YES | _NO).__contains__)(raw) in _YES


def _one_of(*choices: str) -> Callable[[str], str]:
    return _checked(_word, choices.__contains__)


def _folders(raw: str) -> tuple[Path, ...]:
    return tuple(_folder(folder) for folder in raw.split(os.pathsep) if folder.strip())


def _named_folders(raw: str) -> tuple[tuple[str, Path], ...]:
    found = []
    for each in raw.split(","):
        name, separator, folder = each.strip().partition("=")
        if not (name and separator and folder):
            raise ValueError(raw)
        found.append((name, _folder(folder)))
    return tuple(found)


_YES, _NO = {"1", "true", "on", "yes"}, {"0", "false", "off", "no"}
_LEVELS = ("ttir", "ttgir", "llir", "ptx", "cubin", "sass")
_levels = _checked(
    lambda raw: tuple(word.strip() for word in raw.split(",")), frozenset(_LEVELS).issuperset
)


def _range(raw: str) -> tuple[int, int]:
    first, last = map(int, raw.split(":"))
    return _checked(lambda _: (first, last), lambda ends: 0 <= ends[0] < ends[1])(raw)


def words(raw: str) -> tuple[str, ...]:
    """Words between commas, in lower case."""
    return tuple(word.strip().lower() for word in raw.split(",") if word.strip())


def flag(variable: str, doc: str, default: bool = False) -> Knob[bool]:
    return Knob(variable, default, _flag, "0 or 1", doc)


def integer(variable: str, default: int, doc: str) -> Knob[int]:
    return Knob(variable, default, int, "an integer", doc)


def seconds(variable: str, default: float, doc: str) -> Knob[float]:
    return Knob(variable, default, _positive, "a positive number of seconds", doc)


def folder(variable: str, doc: str) -> Knob[Path | None]:
    return Knob(variable, None, _folder, "a folder", doc)


device = Knob(
    "TRITON_DIST_DEVICE",
    "auto",
    _one_of("auto", "cuda", "cpu"),
    "auto, cuda or cpu",
    "Where kernels run: NVIDIA GPUs, CPU ranks in Triton's interpreter, or whichever is there.",
)
share_gpus = flag(
    "TRITON_DIST_SHARE_GPUS",
    "Put several ranks on each GPU where there are more ranks than GPUs, as launch.sh --share-gpus "
    "asks for.",
)
cache_dir = Folder(
    "TRITON_DIST_CACHE_DIR",
    Path("~/.triton_dist"),
    Path,
    "a folder",
    "Root of all that triton_dist keeps on disk; tuning records lie in its autotune/ folder. A "
    "relative path holds from the working directory in which it is first read.",
)
autotune_always_tune = flag(
    "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE",
    "Tune again although a record exists, and replace it.",
)
autotune = flag(
    "TRITON_DIST_AUTOTUNE",
    "0: never tune and look nothing up, use the first config of every space; "
    "TRITON_DIST_AUTOTUNE_FROZEN has no effect then.",
    default=True,
)
autotune_frozen = flag(
    "TRITON_DIST_AUTOTUNE_FROZEN",
    "Never tune: a call for which no record is valid raises TuningFrozen; on one rank is on all.",
)
autotune_version_check = flag(
    "TRITON_DIST_AUTOTUNE_VERSION_CHECK",
    "Strict: any difference of a recorded version, patch level included, invalidates a record.",
)
autotune_readonly_dirs: Knob[tuple[Path, ...]] = Knob(
    "TRITON_DIST_AUTOTUNE_READONLY_DIRS",
    (),
    _folders,
    f"folders separated by {os.pathsep!r}",
    "Folders laid out as TRITON_DIST_CACHE_DIR whose tuning records, and packs in packs/, are "
    "looked up after the user's own, in this order, and never written.",
)
autotune_print = flag(
    "TRITON_DIST_AUTOTUNE_PRINT",
    "Report what is tuned, each timing and the winner, as autotune_verbose=True does.",
)
autotune_log_dir = Folder(
    "TRITON_DIST_AUTOTUNE_LOG_DIR",
    Path(".autotune_logs"),
    Path,
    "a folder",
    "Where contextual_autotune writes rank-<i>.log, a line for each step; default: in the folder "
    "that the program was started in.",
)
autotune_timeout = seconds(
    "TRITON_DIST_AUTOTUNE_TIMEOUT",
    60.0,
    "Longest time that one step of a candidate may take, and that a rank waits for the others at "
    "it.",
)
autotune_meeting_timeout: Knob[float | None] = Knob(
    "TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT",
    None,
    _positive,
    "a positive number of seconds",
    "Longest time that a rank waits for the others at the first call of a key, before anything is "
    "tried; default: as long as the process group's own collectives do.",
)
compile_timeout = seconds(
    "TRITON_DIST_COMPILE_TIMEOUT",
    300.0,
    "The same for a step that compiles and launches nothing (prepare_fn).",
)
autotune_warm_start_ms: Knob[float] = Knob(
    "TRITON_DIST_AUTOTUNE_WARM_START_MS",
    30.0,
    _not_negative,
    "milliseconds, 0 or more",
    "Device time that the first call of a key may take whose neighbours (other sizes, all else "
    "alike) are tuned: their best configs race for this time, times the number of inputs that "
    "input_variants_fn returns; 0: ignore the neighbours.",
)
autotune_keys: Knob[int | None] = Knob(
    "TRITON_DIST_AUTOTUNE_KEYS",
    4096,
    _count,
    "a positive integer",
    "How many exact sizes a tuned function keeps at hand for calls that take one look-up; any "
    "other within a tuned range takes some microseconds more.",
)
compile_frozen = flag(
    "TRITON_DIST_COMPILE_FROZEN",
    "Never compile: a kernel that is neither in Triton's cache nor in a pack raises "
    "KernelNotShipped, and so does a native module that would take a C compiler.",
)
record_kernels = folder(
    "TRITON_DIST_RECORD_KERNELS",
    "Where to write each kernel that a process loads, as a pack of its own; set by triton-dist "
    "pack --kernels.",
)
autotune_grace = seconds(
    "TRITON_DIST_AUTOTUNE_GRACE",
    5.0,
    "Time from the report that a rank is stuck in a candidate to the end of its process.",
)
dump_dir = folder(
    "TRITON_DIST_DUMP_DIR",
    "Set by triton-dist dump: where each kernel that the program uses is exported to.",
)
dump_levels: Knob[tuple[str, ...]] = Knob(
    "TRITON_DIST_DUMP_LEVELS",
    _LEVELS,
    _levels,
    f"some of {','.join(_LEVELS)}",
    "Set by triton-dist dump: the levels at which they are.",
)
profile_dir = folder(
    "TRITON_DIST_PROFILE_DIR",
    "Set by triton-dist profile: where each rank writes its timeline.",
)
profile_calls: Knob[tuple[int, int]] = Knob(
    "TRITON_DIST_PROFILE_CALLS",
    (1, 1001),
    _range,
    "FIRST:LAST",
    "Set by triton-dist profile: calls of tuned functions that are on it, counted from 0, the last "
    "one excluded.",
)
profile_marks = flag(
    "TRITON_DIST_PROFILE_MARKS",
    "Set by triton-dist profile --marks: a timeline has what programs of kernels do.",
)
toolchains: Knob[tuple[tuple[str, Path], ...]] = Knob(
    "TRITON_DIST_TOOLCHAINS",
    (),
    _named_folders,
    "NAME=FOLDER,NAME=FOLDER",
    "Other installed Tritons, whose compilers a launch may name: toolchain=NAME; each folder has "
    "the package triton in it.",
)
wait_timeout = seconds(
    "TRITON_DIST_WAIT_TIMEOUT",
    30.0,
    "Longest time that one wait inside an interpreted kernel may spin.",
)
wait_gpu_clock = flag(
    "TRITON_DIST_WAIT_GPU_CLOCK",
    "Let wait_until_max_gpu_clock_or_warning wait for the GPU's top clock, instead of nothing.",
)
resident_programs: Knob[int | None] = Knob(
    "TRITON_DIST_RESIDENT_PROGRAMS",
    None,
    _count,
    "a positive integer",
    "How many programs of an interpreted kernel run at a time, as on a GPU of so many "
    "multiprocessors; default: all.",
)

debug: Knob[tuple[str, ...]] = Knob(
    "TRITON_DIST_DEBUG",
    (),
    words,
    "modes separated by commas",
    "What to check kernels for: interp (or interp:bounds, interp:init, interp:waits, interp:race), "
    "assert, agree, or a mode of Triton or of compute-sanitizer; refused where it could find "
    "nothing. "
    "attach and where: let triton-dist debug look into the job.",
)
debug_tool: Knob[str | None] = Knob(
    "TRITON_DIST_DEBUG_TOOL",
    None,
    str,
    "a tool of compute-sanitizer",
    "The tool that this process runs under; set by triton-dist debug.",
)
traceback: Knob[str] = Knob(
    "TRITON_DIST_TRACEBACK",
    "folded",
    _one_of("folded", "full"),
    "folded or full",
    "full: tracebacks of failed ranks show all frames, those inside triton_dist and Triton too.",
)

# What launchers set (torchrun, scripts/launch.sh); not ours to name, ours to read in one place.
rank = integer("RANK", 0, "Rank of this process in the world.")
local_rank = integer("LOCAL_RANK", 0, "Rank of this process on its host.")
world_size = integer("WORLD_SIZE", 1, "Number of processes in the world.")
local_world_size = integer("LOCAL_WORLD_SIZE", 1, "Number of processes on this host.")
error_file: Knob[Path | None] = Knob(
    "TORCHELASTIC_ERROR_FILE",
    None,
    Path,
    "a file",
    "Where a rank writes the exception that ends it, for torchrun.",
)
triton_interpret = flag(
    "TRITON_INTERPRET",
    "Triton's own switch: kernels decorated while it is 1 are interpreted, on the CPU.",
)


def is_set(variable: str) -> bool:
    """True if ``variable`` is in the environment at all."""
    return variable in os.environ


def get_bool_env(variable: str, default: bool = False) -> bool:
    """Any variable as a flag, for scripts; ``default`` when unset."""
    return flag(variable, "", default).get()


def get_int_env(variable: str, default: int) -> int:
    """Any variable as an integer, for scripts; ``default`` when unset."""
    return integer(variable, default, "").get()


def put(variable: str, value: str) -> None:
    """Set ``variable`` for this process and its children."""
    os.environ[variable] = value


@contextmanager
def having(variable: str, value: str) -> Iterator[None]:
    """Within, the environment has this value; then what it had before."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before


def environment() -> dict[str, str]:
    """A copy of the whole environment, for a process that is about to be started."""
    return dict(os.environ)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Make ``environment`` the whole environment of this process and its children."""
    os.environ.clear()
    os.environ.update(environment)


# The first read, before the program can change its working directory.
for _each in (cache_dir, autotune_readonly_dirs, autotune_log_dir):
    _each.get()
