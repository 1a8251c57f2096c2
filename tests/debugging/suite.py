"""Run the test suite under checks of the interpreter, file by file, and print reports and cost.

python tests/debugging/suite.py [--mode MODE …] [--seconds 600] [FILE | FOLDER …]

Each file and mode runs in its own process and prints a line: how the tests ended, and the processor
time of the tests and their ranks, starts included. The first mode's time is the baseline.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODES = ("none", "interp:race", "interp:bounds")
FOLDERS = ("kernels", "language", "distributed", "layers", "runtime", "examples", "contextual")
"""Folders of tests that run kernels."""
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "python"), "TRITON_INTERPRET": "1", "TRITON_DIST_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1",
    "CI": "1",  # pytest then prints whole reasons
}  # fmt: skip
_PR_SET_CHILD_SUBREAPER = 36
_COMPARED_FROM = 8.0  # seconds in the first mode; shorter files mostly import torch


def run(file: str, mode: str, seconds: float) -> tuple[str, list[str], float]:
    """Run the tests of ``file`` under ``mode`` for at most ``seconds``.

    Returns pytest's last line, a line for each failed test, and the processor seconds, which are 0
    if the tests did not end.
    """
    environment = {**os.environ, **ENVIRONMENT}
    if mode != MODES[0]:
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
        lines = output.read().splitlines() or ["no output"]
    if process.returncode < 0:
        return f"did not end in {seconds:.0f} s", [], 0.0
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return lines[-1], failed, _processor_seconds() - before


def _await_orphans(seconds: float = 20.0) -> None:
    """Wait for ranks. They are forked by a server that pytest does not wait for, and the time of a
    process is counted only if its parent waits for it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        except ChildProcessError:
            return


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", action="append", help="repeatable; the first is the baseline")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of a file")
    parser.add_argument("paths", nargs="*", help="default: all tests that run kernels")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopts ranks as children
    modes, bad = options.mode or MODES, 0
    times: dict[str, list[float]] = {mode: [] for mode in modes[1:]}
    for path in map(Path, options.paths or [ROOT / "tests" / folder for folder in FOLDERS]):
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            first = 0.0
            for mode in modes:
                summary, failed, seconds = run(str(file.resolve()), mode, options.seconds)
                line = f"{mode} {file}: {summary}, {seconds:.1f} s"
                if mode not in times:
                    first = seconds
                elif first >= _COMPARED_FROM and seconds:
                    times[mode].append(seconds / first)
                    line += f", {times[mode][-1]:.2f} x"
                print(line, *failed, sep="\n    ", flush=True)
                bad += bool(failed) or not seconds
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
