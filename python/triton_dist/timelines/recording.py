"""Recording a region on this rank, and putting the ranks' recordings together."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.device import current_device
from triton_dist.runtime.peaks import device_peak
from triton_dist.runtime.profiling import timeline_profile
from triton_dist.runtime.ranks import Group, ProcessGroupRanks, SoloRank, group_for
from triton_dist.timelines import trace
from triton_dist.timelines.marks import KernelMarks
from triton_dist.timelines.scopes import Scopes

TOOLS = ("torch", "proton")
_WRITING_SECONDS = 600.0
_READINGS = 5
"""Meetings after which clocks are read; each may be late by some rank's scheduler."""


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
    """Trace the region on every rank of ``group``, with calls of tuned functions as scopes.

    Each rank writes ``<folder>/<name>/rank-<r>.json.gz``; rank 0 then writes all ranks together, on
    one clock, to ``<folder>/<name>_merged.json.gz``: for Perfetto, chrome://tracing and
    ``triton-dist profile show``. Collective when ``do_prof``.

    Args:
        tool: ``"torch"``: torch's profiler. ``"proton"``: Triton's, on GPUs; what it writes is a
            tree of scopes and kernels, ``….hatchet``, for ``proton-viewer``, and has no times of
            day.
        marks: show inside kernels of the calls what programs wait for, load, multiply, store and
            push; not of those that tuning tries. For ``"torch"``.
        merge_group: ``False``: do not put the ranks together.
        keep_merged_only: remove the files of the ranks once they are together.
        compress: ``False``: write ``.json``.

    Raises:
        InvalidArgument: no such tool, or one that finds nothing on this process's device, or has
            no marks.
        DeviceUnavailable: another profiler of this process keeps Proton from the driver.
    """
    if not do_prof:
        yield
        return
    if tool not in TOOLS:
        expected = " or ".join(map(repr, TOOLS))
        raise InvalidArgument("group_profile", "tool", tool, expected)
    if marks and tool != "torch":
        raise InvalidArgument("group_profile", "tool", tool, "'torch', with marks=True")
    ranks, parts = group_for(group), Path(folder) / name
    own = f"rank-{ranks.rank}"
    if tool == "proton":
        from triton_dist.timelines import proton

        ending = proton.ENDING
        with proton.recorded(parts / f"{own}.{ending}"):
            yield
    else:
        ending = "json.gz" if compress else "json"
        with recorded(parts / f"{own}.{ending}", _clock_of(ranks), marks):
            yield
    ranks.barrier("timelines are written", _WRITING_SECONDS)
    if ranks.is_leader and merge_group:
        files = files_of_ranks(parts, ending)
        merge_files(files, Path(folder) / f"{name}_merged.{ending}")
        if keep_merged_only:
            for file in files.values():
                file.unlink()
            parts.rmdir()


class Recording:
    """This rank's recording by torch's profiler, from ``start`` to ``stop``, which writes it.

    Attributes:
        scopes: of calls, for whoever observes these.

    Args:
        clock_ns: from this host's clock to that of rank 0.
        marks: with marks inside kernels.
    """

    def __init__(self, file: Path, clock_ns: int = 0, marks: bool = False) -> None:
        self._marks = KernelMarks() if marks else None
        marked = nullcontext if self._marks is None else self._marks.around_call
        self.scopes = Scopes(lambda name, _: torch.profiler.record_function(name), marked)
        self._file, self._clock_ns = file, clock_ns
        self._profile = timeline_profile()

    def start(self) -> None:
        self._profile.__enter__()
        if self._marks is not None:
            self._marks.read_clock()

    def stop(self) -> None:
        device = current_device()
        device.synchronize()
        if self._marks is not None:
            self._marks.read_clock()
        self._profile.__exit__(None, None, None)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        plain = self._file.with_name(f".{self._file.name}.json")
        self._profile.export_chrome_trace(str(plain))
        content = trace.read(plain)
        plain.unlink()
        trace.annotate(content, self.scopes.calls)
        content[trace.SCOPE] = {
            "host": socket.gethostname(),
            "clock_ns": self._clock_ns,
            "device": device.name,
            "gpu": device.facts()["gpu"],
            "peak": asdict(device_peak()),
        }
        if self._marks is not None:
            self._marks.add_to(content)
        trace.write(content, self._file)


@contextmanager
def recorded(file: Path, clock_ns: int = 0, marks: bool = False) -> Iterator[None]:
    """Record the region into ``file``, also when it raises; arguments as of ``Recording``."""
    recording = Recording(file, clock_ns, marks)
    recording.start()
    try:
        with recording.scopes.on():
            yield
    finally:
        recording.stop()


def files_of_ranks(folder: Path, ending: str) -> dict[int, Path]:
    """Files that ranks have written, by rank."""
    found = {int(f.name.split(".")[0][5:]): f for f in folder.glob(f"rank-*.{ending}")}
    return dict(sorted(found.items()))


def merge_files(files: Mapping[int, Path], merged: Path) -> None:
    """Put the files of ranks together."""
    if merged.suffix == ".hatchet":
        from triton_dist.timelines import proton

        proton.merge(files, merged)
    else:
        trace.write(trace.merge({r: trace.read(file) for r, file in files.items()}), merged)


def _clock_of(ranks: ProcessGroupRanks | SoloRank) -> int:
    """Nanoseconds from this rank's clock to that of the first. Collective."""
    readings = []
    for number in range(_READINGS):
        ranks.barrier(f"clock reading {number}")
        readings.append(time.time_ns())
    everyone = ranks.gather("clocks", (socket.gethostname(), readings))
    return trace.offsets(everyone)[ranks.rank]
