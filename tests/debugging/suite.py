"""The test suite under checks of the interpreter, file by file: what they report, and how much
longer the tests take.

python tests/debugging/suite.py [--mode MODE …] [--seconds 600] [FILE | FOLDER …]

A file and mode is a process of its own, and a line: how the tests ended, and what processor time
they and their ranks took, starts included. That is compared with the first mode's, file by file.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PLAIN = "none"
MODES = (PLAIN, "interp:race", "interp:bounds")
FOLDERS = ("kernels", "language", "distributed", "layers", "runtime", "examples", "contextual")
"""Of tests that run kernels."""
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "python"),
    "TRITON_INTERPRET": "1",
    "TRITON_DIST_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",  # as scripts/test.sh
    "CI": "1",  # pytest then prints whole reasons
}
_PR_SET_CHILD_SUBREAPER = 36
_COMPARED_FROM = 8.0  # seconds in the first mode: what takes less imports torch, and little else


class Outcome(NamedTuple):
    """How the tests of a file ended under a mode."""

    summary: str
    """pytest's last line."""
    failed: Sequence[str] = ()
    """Name and first line of the reason of each failed test. Ranks name the failed check there."""
    seconds: float = 0.0
    """Processor time; 0 if the tests did not end."""


def run(file: str, mode: str, seconds: float) -> Outcome:
    """Run the tests of ``file`` under ``mode`` for at most ``seconds``."""
    environment = {**os.environ, **ENVIRONMENT}
    if mode != PLAIN:
        environment["TRITON_DIST_DEBUG"] = mode
    words = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no"]
    before = _processor_seconds()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*words, "-m", "not chaos and not stress", file], cwd=ROOT, env=environment,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _await_orphans()
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode < 0:
        return Outcome(f"did not end in {seconds:.0f} s")
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return Outcome(lines[-1] if lines else "no output", failed, _processor_seconds() - before)


def _adopt_orphans() -> None:
    """Let processes whose parent has ended become this one's. Ranks are forked by a server that
    pytest does not wait for, and what nobody waits for is counted nowhere."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _await_orphans(seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        except ChildProcessError:
            return


def _processor_seconds() -> float:
    """Of all processes below this one that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def files_of(paths: Iterable[str]) -> list[str]:
    """Test files of ``paths``, in this order."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return [str(file.resolve().relative_to(ROOT)) for file in files]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", action="append", help="several: the first is compared with")
    parser.add_argument("--seconds", type=float, default=600.0, help="longest time of a file")
    parser.add_argument("paths", nargs="*", help="default: all that run kernels")
    options = parser.parse_args()
    _adopt_orphans()
    modes = options.mode or MODES
    times: dict[str, list[float]] = {mode: [] for mode in modes[1:]}
    bad = 0
    for file in files_of(options.paths or [f"{ROOT}/tests/{folder}" for folder in FOLDERS]):
        first = 0.0
        for mode in modes:
            outcome = run(file, mode, options.seconds)
            line = f"{mode} {file}: {outcome.summary}, {outcome.seconds:.1f} s"
            if mode not in times:
                first = outcome.seconds
            elif first >= _COMPARED_FROM and outcome.seconds:
                times[mode].append(outcome.seconds / first)
                line += f", {times[mode][-1]:.2f} x"
            print(line, flush=True)
            for name in outcome.failed:
                print(f"    {name}", flush=True)
            bad += bool(outcome.failed) or not outcome.seconds
    for mode, ratios in times.items():
        if ratios:
            print(
                f"{mode} takes {statistics.median(ratios):.2f} x the time of {modes[0]} "
                f"(median of {len(ratios)} files of {_COMPARED_FROM:.0f} s and more, "
                f"{min(ratios):.2f} to {max(ratios):.2f})"
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
