"""Record timelines of calls on each rank, and merge the timelines of all ranks."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from triton_dist import _files, knobs
from triton_dist._warn import warn_without_raising
from triton_dist.errors import ArtefactWarning, InvalidArgument
from triton_dist.runtime.device import current_device
from triton_dist.runtime.peaks import device_peak
from triton_dist.runtime.profiling import timeline_profile
from triton_dist.runtime.ranks import Group, ProcessGroupRanks, SoloRank, group_for
from triton_dist.timelines import scopes, trace
from triton_dist.timelines.marks import KernelMarks, compile_with_marks

TOOLS = ("torch", "proton")
_PROTON_SUFFIX = "hatchet"
_WRITING_SECONDS = 600.0  # time limit for writing the timelines of all ranks
_NUM_READINGS = 5
"""Number of barriers after which clocks are read. Preemption may delay single readings."""


@contextmanager
def group_profile(
    name: str = "trace",
    do_prof: bool = True,
    group: Group = None,
    folder: str | Path = "prof",
    *,
    tool: str = "torch",
    marks: bool = False,
    merge_group: bool = True,
    keep_merged_only: bool = False,
    compress: bool = True,
) -> Iterator[None]:
    """Context manager that records its body on every rank of ``group``. Collective if ``do_prof``.

    Each call of a tuned function is a scope. Each rank writes ``<folder>/<name>/rank-<r>.json.gz``.
    Rank 0 merges these files into ``<folder>/<name>_merged.json.gz``, with all times on one clock,
    for Perfetto, chrome://tracing and ``triton-dist profile show``. If a timeline cannot be
    written, a warning is issued and the program continues.

    Args:
        name: name of the timeline.
        do_prof: ``False``: do nothing.
        group: ranks that record; default: all ranks.
        folder: folder to write to.
        tool: ``"torch"``: torch.profiler. ``"proton"``: Triton's profiler, only for GPUs. It writes
            a tree of scopes and kernels without timestamps (``….hatchet``) for ``proton-viewer``.
        marks: also record the phases of kernel programs (wait, load, multiply, store, push), except
            while the tuner measures candidates. Requires ``tool="torch"``.
        merge_group: ``False``: do not merge the timelines of the ranks.
        keep_merged_only: remove the files of the ranks after merging.
        compress: ``False``: write ``.json``.

    Raises:
        InvalidArgument: ``tool`` is unknown, does not support this process's device, or does not
            support marks. Also raised on every rank if some rank cannot write to ``folder``.
        DeviceUnavailable: another profiler of this process blocks Proton.
    """
    if not do_prof:
        yield
        return
    if tool not in TOOLS:
        raise InvalidArgument("group_profile", "tool", tool, " or ".join(map(repr, TOOLS)))
    if marks and tool != "torch":
        raise InvalidArgument("group_profile", "tool", tool, "'torch', with marks=True")
    ranks, rank_folder = group_for(group), Path(folder) / name
    pid, failure = os.getpid(), ""
    suffix = _PROTON_SUFFIX if tool == "proton" else "json.gz" if compress else "json"
    rank_file = rank_folder / f"rank-{ranks.rank}.{suffix}"
    merged = rank_folder.with_name(f"{name}_merged.{suffix}")
    if tool == "proton":
        with scopes.proton_recording(rank_file):
            yield
    else:
        _check_writable_everywhere(ranks, rank_file, merged)
        recording = Recording(rank_file, _clock_offset(ranks), marks)
        with recording.on():
            yield
        failure = recording.failure
    if os.getpid() != pid:  # a forked child that leaves the context
        return
    ranks.barrier("timelines are written", _WRITING_SECONDS)
    if ranks.is_leader and merge_group:
        files = [each for each in files_of_ranks(rank_folder, suffix) if each[0] < ranks.size]
        try:
            merge_files(files, merged)
            for _, file in files if keep_merged_only else ():
                file.unlink()
            if keep_merged_only:
                rank_folder.rmdir()
        except Exception as error:
            failure += f"timelines of ranks are not merged: {type(error).__name__}: {error}"
    if failure:
        warn_without_raising(failure, ArtefactWarning)


class Recording:
    """A recording of this rank by torch's profiler. ``stop`` writes the recording to a file.

    A forked child records nothing.

    Attributes:
        scopes: the scopes of calls.
        failure: why the recording could not be written, or "".

    Args:
        file: file to write.
        clock_offset_ns: offset from this host's clock to the clock of rank 0, in nanoseconds.
        marks: record marks, which are time spans inside kernels.
    """

    def __init__(self, file: Path, clock_offset_ns: int = 0, marks: bool = False) -> None:
        self._marks = KernelMarks() if marks else None
        make_marking = nullcontext if self._marks is None else self._marks.around_call
        self.scopes = scopes.Scopes(
            lambda name, _: torch.profiler.record_function(name), make_marking
        )
        self._file, self._clock_offset_ns = file, clock_offset_ns
        self._profile, self._pid = timeline_profile(), os.getpid()
        self.failure = ""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Context manager that records its body, and writes the recording even after an error."""
        self.start()
        try:
            with self.scopes.on():
                yield
        finally:
            self.stop()

    def start(self) -> None:
        self._file.unlink(missing_ok=True)  # an earlier recording may have left it
        self._profile.__enter__()
        if self._marks is not None:
            self._marks.read_clock()

    def stop(self) -> None:
        """End and write the recording. An error only sets ``failure``: the program continues."""
        if os.getpid() == self._pid:
            try:
                device = current_device()
                device.synchronize(_WRITING_SECONDS)
                if self._marks is not None:
                    self._marks.read_clock()
                self._profile.__exit__(None, None, None)
                self._file.parent.mkdir(parents=True, exist_ok=True)
                torch_file = self._file.with_name(
                    f"{self._file.name.partition('.json')[0]}.torch.json"
                )
                self._profile.export_chrome_trace(str(torch_file))
                try:
                    content = trace.read(torch_file)
                except ValueError as error:
                    raise ValueError(
                        f"torch wrote invalid JSON to {torch_file} ({error})"
                    ) from error
                torch_file.unlink()
                trace.annotate(content, self.scopes.calls)
                content[trace.METADATA_KEY] = {
                    "process": self._pid,
                    "host": socket.gethostname(),
                    "clock_ns": self._clock_offset_ns,
                    "device": device.name,
                    "gpu": device.facts()["gpu"],
                    "peak": asdict(device_peak()),
                }
                if self._marks is not None:
                    self._marks.add_to(content)
                trace.write(content, self._file)
            except Exception as error:
                self.failure = f"{self._file} is not written: {type(error).__name__}: {error}"


def files_of_ranks(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    """Return rank and path of the files that ranks wrote, sorted by rank, then by time."""
    found = [(int(f.name.split(".")[0][5:]), f) for f in folder.glob(f"rank-*.{suffix}")]
    found = [each for each in found if not each[1].name.endswith(".torch.json")]
    return sorted(found, key=lambda each: (each[0], each[1].stat().st_mtime_ns))


def merge_files(files: Sequence[tuple[int, Path]], merged: Path) -> None:
    """Merge the files of ranks into ``merged``. The files are from torch's profiler or Proton."""
    if merged.suffix == f".{_PROTON_SUFFIX}":
        scopes.merge(files, merged)
    else:
        trace.write(trace.merge([(rank, trace.read(file)) for rank, file in files]), merged)


def _check_writable_everywhere(ranks: ProcessGroupRanks | SoloRank, *files: Path) -> None:
    """Raise on every rank if some rank cannot write its files. Collective."""
    own_failure = ""
    try:
        for file in files:
            _files.check_writable(file)
    except OSError as error:
        own_failure = str(error)
    for rank, failure in enumerate(ranks.all_gather("files of timelines", own_failure)):
        if failure:
            folder = str(files[-1].parent)
            expected = f"a folder that rank {ranks.global_rank(rank)} can write to ({failure})"
            raise InvalidArgument("group_profile", "folder", folder, expected)


def _clock_offset(ranks: ProcessGroupRanks | SoloRank) -> int:
    """Return the offset from this rank's clock to the first rank's clock in ns. Collective."""
    readings = []
    for number in range(_NUM_READINGS):
        ranks.barrier(f"clock reading {number}")
        readings.append(time.time_ns())
    all_readings = ranks.all_gather("clocks", (socket.gethostname(), readings))
    return trace.clock_offsets(all_readings)[ranks.rank]


FILE_ENDING = "json.gz"
FAILURE_SUFFIX = ".failed"
"""Suffix of the file with the reason why a timeline was not written."""


class ProgramRecording:
    """A recording of calls ``first`` to ``last - 1`` of tuned functions, counted from 0. Calls
    inside other calls are recorded, but not counted.

    The recording is written when call ``last`` begins, or at the end of the process. After an
    error, the program continues and the reason is written to ``<file>.failed``. A forked child
    records nothing.
    """

    def __init__(self, file: Path, first: int, last: int, marks: bool) -> None:
        self._file, self._first, self._last, self._marks = file, first, last, marks
        self._failure_file = file.with_name(f"{file.name}{FAILURE_SUFFIX}")
        self._num_calls = 0
        self._recording: Recording | None = None
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._is_over = False
        os.register_at_fork(after_in_child=self._end)

    @contextmanager
    def wrap_call(
        self, tuned: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        if self._is_over:
            yield
            return
        is_outer = not getattr(self._thread, "is_in_call", False)
        scope = ExitStack()
        with self._errors_reported():
            scope.enter_context(self._call_scope(is_outer, tuned, args, kwargs))
        self._thread.is_in_call = True
        try:
            yield
        finally:
            self._thread.is_in_call = not is_outer
            with self._errors_reported():
                scope.close()

    def stop(self) -> None:
        with self._lock:
            recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
            if recording.failure:
                self._fail(recording.failure)

    def _call_scope(
        self, is_outer: bool, tuned: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Return a context manager for a call, and start or stop the recording before the call."""
        count = self._num_calls
        if is_outer:
            with self._lock:
                count, self._num_calls = self._num_calls, self._num_calls + 1
                if count == self._first:
                    if torch.autograd._profiler_enabled():  # torch has one profiler per process
                        raise RuntimeError("the program itself uses torch's profiler at that time")
                    recording = Recording(self._file, marks=self._marks)
                    recording.start()
                    self._recording = recording
            if count == self._last:
                self.stop()
        if self._recording is not None:
            return self._recording.scopes.wrap_call(tuned, args, kwargs)
        if is_outer and self._marks and count + 1 == self._first:
            return compile_with_marks()
        return nullcontext()

    @contextmanager
    def _errors_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        self._end()
        warn_without_raising(f"triton-dist profile: {reason}", ArtefactWarning)
        with suppress(OSError):
            self._failure_file.write_text(f"process {os.getpid()}: {reason}", encoding="utf-8")

    def _end(self) -> None:
        self._is_over, self._recording, self._lock = True, None, threading.Lock()


def install() -> None:
    """Start recording this process into the folder ``TRITON_DIST_PROFILE_DIR``."""
    folder = knobs.profile_dir.get()
    if folder is not None:
        first, last = knobs.profile_calls.get()
        file = folder / f"rank-{knobs.rank.get()}.{os.getpid()}.{FILE_ENDING}"
        program = ProgramRecording(file, first, last, knobs.profile_marks.get())
        at_exit = ExitStack()
        at_exit.callback(program.stop)
        at_exit.enter_context(scopes.wrap_calls(program.wrap_call))
        atexit.register(at_exit.close)
