"""compute-sanitizer: its place, its command line, and its report of one process."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triton_dist import knobs

TOOLS = ("memcheck", "racecheck")
"""Accesses outside of what was allocated; races on shared memory. Not initcheck: it takes for
unwritten what another process wrote, as every flag of a peer. What nobody wrote is NaN in tests."""
_LAUNCHERS = ("torchrun", "launch.sh", "torch.distributed.run")
_PADDING = 4096  # bytes behind each allocation
FOUND = 88
"""Exit status of a process of which something was reported."""
_WHEELS = ("nvidia-cuda-sanitizer-api", "nvidia-cuda-sanitizer-api-cu12")
_NAME = "compute-sanitizer"
_SUMMARY = re.compile(
    r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.MULTILINE
)
_NO_FINDING = (" ", "COMPUTE-SANITIZER", "ERROR SUMMARY:", "RACECHECK SUMMARY:")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def missing() -> str:
    """A sentence for those who have no compute-sanitizer."""
    return (
        f"{_NAME} is neither on PATH, nor in CUDA_HOME or /usr/local/cuda, nor in a wheel: "
        f"python3 -m pip install {_WHEELS[0]}, of the same major version as torch.version.cuda."
    )


def find(environment: Mapping[str, str] | None = None) -> Path | None:
    """The program: of PATH, else of CUDA, else of a wheel."""
    environment = knobs.environment() if environment is None else environment
    return next((path for path in _places(environment) if os.access(path, os.X_OK)), None)


def _places(environment: Mapping[str, str]) -> Iterator[Path]:
    on_path = shutil.which(_NAME, path=environment.get("PATH", ""))
    if on_path is not None:
        yield Path(on_path)
    for home in (environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield Path(home, "bin", _NAME)
    for wheel in _WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield from (Path(file.locate()) for file in files if file.name == _NAME)


def command(program: Path, tool: str, log: Path) -> list[str]:
    """Words before the command of a process.

    Only kernels of ours are looked at, by their names, which is much faster.
    """
    return [
        str(program), "--tool", tool, "--log-file", str(log), "--error-exitcode", str(FOUND),
        "--target-processes", "application-only", "--report-api-errors", "no",
        "--print-limit", "20", "--kernel-regex", "kns=kernel_",
    ]  # fmt: skip


def command_of_all(program: Path, tool: str, folder: Path) -> list[str]:
    """The same for a command and all that it starts, with its log in ``folder``."""
    log = ["--log-file", str(folder / "process-%p.log")]
    return [*_command_of_any(program, tool), *log, "--target-processes", "all"]


def starts_ranks(command: Sequence[str]) -> bool:
    """True for torchrun, and for launch.sh, which starts it."""
    return any(Path(word).name in _LAUNCHERS for word in command)


def python_of_ranks(program: Path, tool: str, folder: Path) -> Path:
    """Write, into ``folder``, an interpreter for the ranks that torchrun starts: this one, under
    the tool, with a log of each rank."""
    words = [*_command_of_any(program, tool), "--target-processes", "application-only"]
    log = f'--log-file {shlex.quote(str(folder))}/rank-"$RANK".log'
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nexec {shlex.join(words)} {log} {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return python


def _command_of_any(program: Path, tool: str) -> list[str]:
    # Else what lies behind a tensor is another one, and right for the tool.
    apart = ["--padding", str(_PADDING)] if tool == "memcheck" else []
    return [
        str(program), "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no",
        "--print-limit", "100", *apart,
    ]  # fmt: skip


@dataclass(frozen=True)
class Report:
    """Findings of the tool in one process.

    Attributes:
        count: of errors or hazards; ``None``: it came to no end.
        kinds: what was found in which line of which kernel, without addresses, and how often each
            was printed.
    """

    count: int | None
    kinds: Mapping[str, int]

    @property
    def is_clean(self) -> bool:
        return self.count == 0

    def __str__(self) -> str:
        if self.count is None:
            return "; ".join(["came to no end", *self.kinds])
        found = (f"{times} x {kind}" for kind, times in self.kinds.items())
        return "; ".join([f"{self.count} found", *found])


def report_of(text: str) -> Report:
    """The report that a log file holds."""
    summaries = _SUMMARY.findall(text)
    kinds = Counter(map(_kind, _findings(text)))
    return Report(int(summaries[-1]) if summaries else None, dict(kinds))


def merged(reports: Mapping[str, Report]) -> list[str]:
    """A line for each thing that was found, with how often in which process; ``reports``: by the
    process's name."""
    found: dict[str, list[str]] = {}
    for name, report in reports.items():
        kinds = dict(report.kinds)
        if report.count is None:
            kinds["came to no end"] = 1
        elif report.count and not kinds:
            kinds["found, and not understood: see the report"] = report.count
        for kind, times in kinds.items():
            found.setdefault(kind, []).append(f"{times} x {name}")
    return [f"{kind}: {', '.join(times)}" for kind, times in found.items()]


def _findings(text: str) -> Iterator[str]:
    """First lines of paragraphs, and where that was. In one, the lines after the first are
    indented."""
    for paragraph in re.split(r"^========= *$", text, flags=re.MULTILINE):
        lines = [said for said in map(_said, paragraph.splitlines()) if said]
        first = next((line for line in lines if not line.startswith(_NO_FINDING)), None)
        if first is not None:
            places = (line.strip() for line in lines if line.strip().startswith("at "))
            yield f"{first} {next(places, '')}".rstrip()


def _said(line: str) -> str:
    """Return what the tool says in a line; of another's line: nothing."""
    prefix, _, said = line.partition("========= ")
    return "" if prefix else said.rstrip()


def _kind(line: str) -> str:
    return _ADDRESS.sub("…", line)
