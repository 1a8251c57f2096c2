"""Find compute-sanitizer, build its command line, and parse its reports."""

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
"""Tools that the test suite runs: they find out-of-bounds accesses and races on shared memory. The
tool initcheck is left out: it treats memory that only other processes wrote as uninitialised."""
_LAUNCHERS = ("torchrun", "launch.sh", "torch.distributed.run")
_PADDING = 4096  # unused bytes after each allocation
FINDINGS_STATUS = 88
"""Exit status of a process with findings."""
_WHEELS = ("nvidia-cuda-sanitizer-api", "nvidia-cuda-sanitizer-api-cu12")
_PROGRAM_NAME = "compute-sanitizer"
_SUMMARY = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.M)
# Begins of lines that report no finding
_NOT_FINDINGS = (" ", "COMPUTE-SANITIZER", "ERROR SUMMARY:", "RACECHECK SUMMARY:")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def not_found_message() -> str:
    return (
        f"{_PROGRAM_NAME} is neither on PATH, nor in CUDA_HOME or /usr/local/cuda, nor in a wheel: "
        f"python3 -m pip install {_WHEELS[0]}, of the same major version as torch.version.cuda."
    )


def find(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the path of compute-sanitizer in PATH, the CUDA toolkit or a wheel, or ``None``."""
    environment = knobs.environment() if environment is None else environment
    return next((path for path in _candidates(environment) if os.access(path, os.X_OK)), None)


def _candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    on_path = shutil.which(_PROGRAM_NAME, path=environment.get("PATH", ""))
    if on_path is not None:
        yield Path(on_path)
    for home in (environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield Path(home, "bin", _PROGRAM_NAME)
    for wheel in _WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield from (Path(file.locate()) for file in files if file.name == _PROGRAM_NAME)


def command(program: Path, tool: str, log: Path) -> list[str]:
    """Return the words to insert before the command of a process, to run it under ``tool``. To save
    time, the tool checks only kernels of this package (``kernel_…``)."""
    return [
        str(program), "--tool", tool, "--log-file", str(log),
        "--error-exitcode", str(FINDINGS_STATUS),
        "--target-processes", "application-only", "--report-api-errors", "no",
        "--print-limit", "20", "--kernel-regex", "kns=kernel_",
    ]  # fmt: skip


def command_prefix_with_children(program: Path, tool: str, folder: Path) -> list[str]:
    """Return the words to insert before a command, to run it and its child processes under
    ``tool``. Each process writes a log to ``folder``."""
    log = ["--log-file", str(folder / "process-%p.log")]
    return [*_tool_command(program, tool), *log, "--target-processes", "all"]


def starts_ranks(command: Sequence[str]) -> bool:
    """Return whether the command runs torchrun, directly or through launch.sh."""
    return any(Path(word).name in _LAUNCHERS for word in command)


def write_rank_python(program: Path, tool: str, folder: Path) -> Path:
    """Write a script to ``folder`` that runs this Python under ``tool``, with a log for each rank.
    torchrun starts the script instead of Python."""
    words = [*_tool_command(program, tool), "--target-processes", "application-only"]
    log = f'--log-file {shlex.quote(str(folder))}/rank-"$RANK".log'
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nexec {shlex.join(words)} {log} {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return python


def _tool_command(program: Path, tool: str) -> list[str]:
    # Without padding, an access after the end of a tensor may be within the next allocation, which
    # is no error for the tool.
    padding = ["--padding", str(_PADDING)] if tool == "memcheck" else []
    return [
        str(program), "--tool", tool, "--error-exitcode", str(FINDINGS_STATUS),
        "--report-api-errors", "no",
        "--print-limit", "100", *padding,
    ]  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The findings of the tool in one process.

    Attributes:
        count: number of errors or hazards; ``None``: the report has no summary.
        count_by_finding: how often each finding occurs, by its text (error, kernel and line).
    """

    count: int | None
    count_by_finding: Mapping[str, int]

    @property
    def is_clean(self) -> bool:
        return self.count == 0

    def __str__(self) -> str:
        if self.count is None:
            return "; ".join(["incomplete report", *self.count_by_finding])
        found = (f"{times} x {finding}" for finding, times in self.count_by_finding.items())
        return "; ".join([f"{self.count} found", *found])


def parse_report(text: str) -> Report:
    summaries = _SUMMARY.findall(text)
    count_by_finding = Counter(map(_finding_text, _findings(text)))
    return Report(int(summaries[-1]) if summaries else None, dict(count_by_finding))


def merge_reports(reports: Mapping[str, Report]) -> list[str]:
    """Return a line for each finding, with its number of occurrences in each process. ``reports``
    has the report of each process by its name."""
    found: dict[str, list[str]] = {}
    for name, report in reports.items():
        count_by_finding = dict(report.count_by_finding)
        if report.count is None:
            count_by_finding["incomplete report"] = 1
        elif report.count and not count_by_finding:
            count_by_finding["findings in an unknown format: see the report"] = report.count
        for finding, times in count_by_finding.items():
            found.setdefault(finding, []).append(f"{times} x {name}")
    return [f"{finding}: {', '.join(times)}" for finding, times in found.items()]


def _findings(text: str) -> Iterator[str]:
    """Yield the text of each finding: the error, and the kernel and line of the access."""
    for paragraph in re.split(r"^========= *$", text, flags=re.M):
        # A line of the program, not of the tool, has a text before the marker.
        parts = (line.partition("========= ") for line in paragraph.splitlines())
        lines = [message.rstrip() for before, _, message in parts if not before and message.strip()]
        first = next((line for line in lines if not line.startswith(_NOT_FINDINGS)), None)
        if first is not None:
            places = (line.strip() for line in lines if line.strip().startswith("at "))
            yield f"{first} {next(places, '')}".rstrip()


def _finding_text(line: str) -> str:
    return _ADDRESS.sub("…", line)
