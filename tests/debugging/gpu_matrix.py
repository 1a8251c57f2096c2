"""Planted bugs x modes of GPUs, as a table: what each mode finds of each, on this GPU and Triton.

python tests/debugging/gpu_matrix.py [--seconds 140] [--json FILE]

A bug of a mode is a process of its own, as many at a time as there are processors, less two. What
is not done in time is shown as not run.
"""

from __future__ import annotations

import argparse
import json
import os
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
from triton_dist.runtime.debugging import sanitizer

PROGRAM = Path(__file__).with_name("gpu_bugs.py")
PLAIN = "none"
MODES = (PLAIN, "assert", "memcheck", "racecheck", "synccheck", "initcheck")
ENDS = "ends with an error"


def run(bug: str, mode: str, end: float) -> str:
    """What the mode reports; empty: nothing."""
    left = min(60.0, end - time.monotonic())
    if left < 5:
        return "not run"
    with tempfile.TemporaryDirectory() as reports:
        words = [sys.executable, str(PROGRAM), bug]
        if mode != PLAIN:
            debug = [sys.executable, "-m", "triton_dist", "debug", mode]
            words = [*debug, "--reports", reports, "--", *words]
        try:
            ran = subprocess.run(words, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return f"did not end in {left:.0f} s"
        texts = [path.read_text(errors="replace") for path in Path(reports).glob("*.log")]
    kinds = [kind for text in texts for kind in sanitizer.report_of(text).kinds]
    if kinds:
        return kinds[0]
    if ran.returncode == 0:
        return ""
    said = [line for line in ran.stderr.splitlines() if "rror" in line or "ssert" in line]
    return (said or [ENDS])[-1].strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    tool = sanitizer.find()
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}, torch {torch.__version__}")
    print(f"compute-sanitizer: {tool or sanitizer.missing()}")
    modes = MODES if tool else MODES[:2]
    found: dict[str, dict[str, str]] = {bug: {} for bug in BUGS}
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 4) - 2)) as pool:
        for some in (modes[:1], modes[1:]):  # the first compiles for those that come
            cells = [(bug, mode) for mode in some for bug in BUGS]
            for (bug, mode), said in zip(
                cells, pool.map(lambda c: run(*c, end), cells), strict=True
            ):
                found[bug][mode] = said
    print("| bug |" + "".join(f" {mode} |" for mode in modes))
    print("|---|" + "---|" * len(modes))
    for bug, by_mode in found.items():
        print(f"| {bug} |" + "".join(f" {by_mode[mode][:110]} |" for mode in modes))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
