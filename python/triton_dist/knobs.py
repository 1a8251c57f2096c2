"""Define all environment variables that triton_dist reads, with type, default and description.

A *knob* is one environment variable. Only this module reads ``os.environ``. ``Knob.get`` reads the
variable at each call, so a test or a script may set the variable at any time. Code that runs at
each launch reads no knob.
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
    """An environment variable has a value that cannot be parsed."""

    def __init__(self, variable: str, value: str, expected: str) -> None:
        super().__init__(f"environment variable {variable}={value!r}, expected {expected}")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """An environment variable."""

    variable: str
    default: T
    parse: Callable[[str], T]
    """Converts the text of the variable. Raises ``ValueError`` for an invalid text."""
    expected: str
    doc: str

    def get(self) -> T:
        """Return the value; the default if the variable is unset or empty.

        Raises:
            InvalidKnob: the value cannot be parsed.
        """
        raw = os.environ.get(self.variable, "")
        if not raw:
            return self.default
        try:
            return self.parse(raw)
        except ValueError as error:
            raise InvalidKnob(self.variable, raw, self.expected) from error


class Folder(Knob[Path]):
    """Knob whose value is a folder. ``get`` returns an absolute path."""

    def get(self) -> Path:
        return _folder(str(super().get()))


@functools.cache
def _absolute(path: str) -> Path:
    try:
        return Path(os.path.abspath(path))
    except OSError:  # the working directory was removed
        return Path(path)


def _folder(raw: str) -> Path:
    """Return ``raw`` as an absolute path, with ``~`` expanded if the home folder is known.

    A relative path is made absolute at its first use and stays the same afterwards, because a
    program may change its working directory.
    """
    path = os.path.expanduser(raw)
    return Path(path) if path.startswith("~") else _absolute(path)


def _checked(read: Callable[[str], T], is_good: Callable[[T], bool]) -> Callable[[str], T]:
    """Return a parser that raises ``ValueError`` for a value that ``is_good`` rejects."""

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


def _flag_or_prior(raw: str) -> bool | str:
    return "prior" if _word(raw) == "prior" else _flag(raw)


def _one_of(*choices: str) -> Callable[[str], str]:
    return _checked(_word, choices.__contains__)


def _folders(raw: str) -> tuple[Path, ...]:
    return tuple(_folder(folder) for folder in raw.split(os.pathsep) if folder.strip())


def _named_folders(raw: str) -> tuple[tuple[str, Path], ...]:
    folders = []
    for each in raw.split(","):
        name, separator, folder = each.strip().partition("=")
        if not (name and separator and folder):
            raise ValueError(raw)
        folders.append((name, _folder(folder)))
    return tuple(folders)


_YES, _NO = {"1", "true", "on", "yes"}, {"0", "false", "off", "no"}
_LEVELS = ("ttir", "ttgir", "llir", "ptx", "cubin", "sass")
_levels = _checked(
    lambda raw: tuple(word.strip() for word in raw.split(",")), frozenset(_LEVELS).issuperset
)


def _range(raw: str) -> tuple[int, int]:
    first, last = map(int, raw.split(":"))
    return _checked(lambda _: (first, last), lambda ends: 0 <= ends[0] < ends[1])(raw)


def words(raw: str) -> tuple[str, ...]:
    """Return the comma-separated words of ``raw`` in lower case."""
    return tuple(word.strip().lower() for word in raw.split(",") if word.strip())


def flag(variable: str, doc: str, default: bool = False) -> Knob[bool]:
    return Knob(variable, default, _flag, "0 or 1", doc)


def integer(variable: str, default: int, doc: str) -> Knob[int]:
    return Knob(variable, default, int, "an integer", doc)


def seconds(variable: str, default: float, doc: str) -> Knob[float]:
    return Knob(variable, default, _positive, "a positive number of seconds", doc)


def text(variable: str, doc: str) -> Knob[str | None]:
    return Knob(variable, None, str, "a text", doc)


def folder(variable: str, doc: str) -> Knob[Path | None]:
    return Knob(variable, None, _folder, "a folder", doc)


device = Knob(
    "TRITON_DIST_DEVICE",
    "auto",
    _one_of("auto", "cuda", "cpu"),
    "auto, cuda or cpu",
    "Where kernels run: NVIDIA GPUs (cuda), CPU ranks in Triton's interpreter (cpu), or "
    "whichever is available (auto).",
)
share_gpus = flag(
    "TRITON_DIST_SHARE_GPUS",
    "Put several ranks on each GPU if there are more ranks than GPUs. launch.sh --share-gpus "
    "sets it.",
)
cache_dir = Folder(
    "TRITON_DIST_CACHE_DIR",
    Path("~/.triton_dist"),
    Path,
    "a folder",
    "Root of all files that triton_dist keeps; tuning records are in its autotune/ folder. A "
    "relative path is resolved from the working directory at the first read.",
)
autotune_always_tune = flag(
    "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE",
    "Tune again even if a record exists, and replace the record.",
)
autotune: Knob[bool | str] = Knob(
    "TRITON_DIST_AUTOTUNE",
    True,
    _flag_or_prior,
    "0, 1 or prior",
    "0: use the first config of every space, without tuning or reading records. prior: a call "
    "whose key has no record uses the config that prior_fn predicts to be the fastest, without "
    "measuring; set on one rank, it applies to all ranks. With 0 or prior, "
    "TRITON_DIST_AUTOTUNE_FROZEN has no effect on calls.",
)
autotune_frozen = flag(
    "TRITON_DIST_AUTOTUNE_FROZEN",
    "Never tune: a call without a valid record raises TuningFrozen. Set on one rank, it applies "
    "to all ranks.",
)
autotune_version_check = flag(
    "TRITON_DIST_AUTOTUNE_VERSION_CHECK",
    "Invalidate a record if any recorded version differs, including the patch level.",
)
autotune_readonly_dirs: Knob[tuple[Path, ...]] = Knob(
    "TRITON_DIST_AUTOTUNE_READONLY_DIRS",
    (),
    _folders,
    f"folders separated by {os.pathsep!r}",
    "Folders with the layout of TRITON_DIST_CACHE_DIR, in order of search. Their tuning records "
    "and the packs in their packs/ folders are used if TRITON_DIST_CACHE_DIR has no valid record. "
    "They are never written.",
)
autotune_remote = text(
    "TRITON_DIST_AUTOTUNE_REMOTE",
    "Store of tuning records that machines share: redis://, rediss://, or any URL that fsspec "
    "supports, such as s3:// or file://. A key without a valid record is looked up there before "
    "it is tuned, and new records are published there.",
)
autotune_remote_timeout = seconds(
    "TRITON_DIST_AUTOTUNE_REMOTE_TIMEOUT",
    2.0,
    "Time limit for one request to the remote store. If the store does not answer, this process "
    "does not use it again.",
)
autotune_remote_readonly = flag(
    "TRITON_DIST_AUTOTUNE_REMOTE_READONLY",
    "Read from the remote store only: publish no records and take no leases.",
)
autotune_remote_ttl = seconds(
    "TRITON_DIST_AUTOTUNE_REMOTE_TTL", 30 * 86400.0, "Time after which a published record expires."
)
autotune_remote_lease = Knob(
    "TRITON_DIST_AUTOTUNE_REMOTE_LEASE",
    0.0,
    _not_negative,
    "seconds, 0 or more",
    "If several jobs need a key of tune.autotune at the same time, one job tunes it. The other "
    "jobs wait at most this time for the record, and then tune themselves. 0: every job tunes.",
)
autotune_remote_key = text(
    "TRITON_DIST_AUTOTUNE_REMOTE_KEY",
    "Key of the HMAC-SHA256 that signs each published record. Records with a wrong or missing "
    "signature are not used.",
)
autotune_print = flag(
    "TRITON_DIST_AUTOTUNE_PRINT",
    "Print each tuning, each timing and the winner, like autotune_verbose=True.",
)
autotune_log_dir = Folder(
    "TRITON_DIST_AUTOTUNE_LOG_DIR",
    Path(".autotune_logs"),
    Path,
    "a folder",
    "Where contextual_autotune writes rank-<i>.log, one line per step of a tuning. The default is "
    "relative to the folder in which the program was started.",
)
autotune_timeout = seconds(
    "TRITON_DIST_AUTOTUNE_TIMEOUT",
    60.0,
    "Time limit for one step of a trial, such as one measurement of a config, and for the wait "
    "for other ranks at the end of the step.",
)
autotune_meeting_timeout: Knob[float | None] = Knob(
    "TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT",
    None,
    _positive,
    "a positive number of seconds",
    "Time limit for the wait for other ranks at the first call of a key, before anything is "
    "tried. Default: the timeout of the process group.",
)
compile_timeout = seconds(
    "TRITON_DIST_COMPILE_TIMEOUT",
    300.0,
    "Time limit for one step that only compiles, such as prepare_fn.",
)
autotune_warm_start_ms: Knob[float] = Knob(
    "TRITON_DIST_AUTOTUNE_WARM_START_MS",
    30.0,
    _not_negative,
    "milliseconds, 0 or more",
    "Limit of device time for the tuning of a new size (sizes= of autotune) after neighbouring "
    "sizes were tuned. Only the best configs of the neighbouring sizes then race. With "
    "input_variants_fn the limit is multiplied by the number of inputs. 0: race all candidates.",
)
autotune_keys: Knob[int | None] = Knob(
    "TRITON_DIST_AUTOTUNE_KEYS",
    4096,
    _count,
    "a positive integer",
    "Number of exact sizes whose configs a tuned function caches. A call with another size of a "
    "tuned range takes some microseconds more.",
)
compile_frozen = flag(
    "TRITON_DIST_COMPILE_FROZEN",
    "Never compile: a kernel that is neither in Triton's cache nor in a pack raises "
    "KernelNotShipped. A native module that needs a C compiler raises it too.",
)
record_kernels = folder(
    "TRITON_DIST_RECORD_KERNELS",
    "Folder in which to write a pack for each kernel that a process loads; set by triton-dist "
    "pack --kernels.",
)
autotune_grace = seconds(
    "TRITON_DIST_AUTOTUNE_GRACE",
    5.0,
    "Time between the message that a rank is stuck in a tried config and the end of the rank's "
    "process.",
)
dump_dir = folder(
    "TRITON_DIST_DUMP_DIR",
    "Where to export each kernel that the program uses; set by triton-dist dump.",
)
dump_levels: Knob[tuple[str, ...]] = Knob(
    "TRITON_DIST_DUMP_LEVELS",
    _LEVELS,
    _levels,
    f"some of {','.join(_LEVELS)}",
    "Levels of each kernel to export; set by triton-dist dump.",
)
profile_dir = folder(
    "TRITON_DIST_PROFILE_DIR", "Where each rank writes its timeline; set by triton-dist profile."
)
profile_calls: Knob[tuple[int, int]] = Knob(
    "TRITON_DIST_PROFILE_CALLS",
    (1, 1001),
    _range,
    "FIRST:LAST",
    "Calls of tuned functions to profile, from FIRST to LAST - 1, counted from 0; set by "
    "triton-dist profile.",
)
profile_marks = flag(
    "TRITON_DIST_PROFILE_MARKS",
    "Record marks inside kernels in the timeline; set by triton-dist profile --marks.",
)
toolchains: Knob[tuple[tuple[str, Path], ...]] = Knob(
    "TRITON_DIST_TOOLCHAINS",
    (),
    _named_folders,
    "NAME=FOLDER,NAME=FOLDER",
    "Other Triton installations that a launch may select with toolchain=NAME. Each folder "
    "contains the package triton.",
)
wait_timeout = seconds(
    "TRITON_DIST_WAIT_TIMEOUT", 30.0, "Time limit for one wait inside an interpreted kernel."
)
wait_gpu_clock = flag(
    "TRITON_DIST_WAIT_GPU_CLOCK",
    "Make wait_until_max_gpu_clock_or_warning wait for the GPU's top clock; otherwise it does "
    "nothing.",
)
resident_programs: Knob[int | None] = Knob(
    "TRITON_DIST_RESIDENT_PROGRAMS",
    None,
    _count,
    "a positive integer",
    "Number of programs of an interpreted kernel that run concurrently, like the number of "
    "multiprocessors of a GPU. Default: all programs.",
)

debug: Knob[tuple[str, ...]] = Knob(
    "TRITON_DIST_DEBUG",
    (),
    words,
    "modes separated by commas",
    "Checks of kernels: interp (or one of interp:bounds, interp:init, interp:waits, interp:race), "
    "assert, agree, a mode of Triton, or a tool of compute-sanitizer. The modes attach (stop "
    "kernels in pdb) and where (show what a hanging job waits for) find nothing by themselves. "
    "A mode that cannot work on this machine is refused.",
)
debug_tool: Knob[str | None] = Knob(
    "TRITON_DIST_DEBUG_TOOL",
    None,
    str,
    "a tool of compute-sanitizer",
    "The compute-sanitizer tool that this process runs under; set by triton-dist debug.",
)
traceback: Knob[str] = Knob(
    "TRITON_DIST_TRACEBACK",
    "folded",
    _one_of("folded", "full"),
    "folded or full",
    "full: tracebacks of failed ranks show all frames, including frames inside triton_dist and "
    "Triton.",
)

# Variables of launchers (torchrun, scripts/launch.sh) and of Triton.
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
    "Triton's variable: kernels that are decorated while it is 1 run in the interpreter on the "
    "CPU.",
)


def is_set(variable: str) -> bool:
    """Return whether ``variable`` is in the environment."""
    return variable in os.environ


def get_bool_env(variable: str, default: bool = False) -> bool:
    """Return ``variable`` as a flag, or ``default`` if it is unset. For test scripts."""
    return flag(variable, "", default).get()


def get_int_env(variable: str, default: int) -> int:
    """Return ``variable`` as an integer, or ``default`` if it is unset. For test scripts."""
    return integer(variable, default, "").get()


def put(variable: str, value: str) -> None:
    """Set ``variable`` for this process and its children."""
    os.environ[variable] = value


@contextmanager
def with_value(variable: str, value: str) -> Iterator[None]:
    """Context manager that sets ``variable`` to ``value`` and restores the previous value."""
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
    """Return a copy of the environment, for a process that is about to be started."""
    return dict(os.environ)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process and its children."""
    os.environ.clear()
    os.environ.update(environment)


# Resolve relative paths now, before the program can change its working directory.
for _each in (cache_dir, autotune_readonly_dirs, autotune_log_dir):
    _each.get()
