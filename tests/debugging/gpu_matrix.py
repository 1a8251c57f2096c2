"""Planted bugs x modes of GPUs, as a table: what each mode finds of each, on this GPU and Triton.

python tests/debugging/gpu_matrix.py [--seconds 140] [--json FILE]

A bug of a mode is a process of its own, as many at a time as there are processors, less two. What
is not done in time is shown as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton

from tests.debugging.gpu_bugs import BUGS
from triton_dist.debugging import sanitizer

PROGRAM = Path(__file__).with_name("gpu_bugs.py")
PLAIN = "none"
MODES = (PLAIN, "assert", "memcheck", "racecheck", "synccheck", "initcheck")
ENDS = "ends with an error"
SECONDS = {PLAIN: 25.0, "assert": 25.0}
"""Longest time of a bug without a tool; a tool makes all slower."""
_SLOWEST = 50.0


def run(bug: str, mode: str, end: float) -> str:
    """What the mode reports; empty: nothing."""
    left = min(SECONDS.get(mode, _SLOWEST), end - time.monotonic())
    if left < 5:
        return "not run"
    with tempfile.TemporaryDirectory() as reports, tempfile.TemporaryFile("w+") as said:
        words = [sys.executable, str(PROGRAM), bug]
        if mode != PLAIN:
            debug = [sys.executable, "-m", "triton_dist", "debug", mode]
            words = [*debug, "--reports", reports, "--", *words]
        process = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the program below it, too
            process.wait()
            return f"did not end in {left:.0f} s"
        texts = [path.read_text(errors="replace") for path in Path(reports).glob("*.log")]
        said.seek(0)
        lines = said.read().splitlines()
    kinds = [kind for text in texts for kind in sanitizer.parse_report(text).count_by_finding]
    if kinds:
        return kinds[0]
    if status == 0:
        return ""
    telling = [line for line in lines if "Assertion `" in line] or [
        line for line in lines if "rror: " in line
    ]
    return (telling or [ENDS])[-1].strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    tool = sanitizer.find()
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}, torch {torch.__version__}")
    print(f"compute-sanitizer: {tool or sanitizer.not_found_message()}")
    modes = MODES if tool else MODES[:2]
    found: dict[str, dict[str, str]] = {bug: {} for bug in BUGS}
    cells = [(bug, mode) for mode in modes for bug in BUGS]
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 4) - 2)) as pool:
        reports = pool.map(lambda cell: run(*cell, end), cells)
        for (bug, mode), said in zip(cells, reports, strict=True):
            found[bug][mode] = said
    print("| bug |" + "".join(f" {mode} |" for mode in modes))
    print("|---|" + "---|" * len(modes))
    for bug, by_mode in found.items():
        print(f"| {bug} |" + "".join(f" {by_mode[mode][-110:]} |" for mode in modes))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
