"""Run the tests of each mutant on a broken copy of the tree, and print those that survive.

    python tests/mutants/run.py                 all, one after another
    python tests/mutants/run.py --jobs 8        so many at a time
    python tests/mutants/run.py -k "row mask"   those whose invariant says so

The exit status is the number of survivors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants.table import MUTANTS, Mutant  # noqa: E402

_COPIED = ("python", "tests", "benchmarks", "examples", "scripts", "docs", "pyproject.toml")
_FAILED = 1  # what pytest ends with if a test failed; another number is no answer


def survives(mutant: Mutant, seconds: float) -> str:
    """Break a copy and run its tests; returns what is wrong, empty if a test failed."""
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        copy = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        broken = copy / "python" / "triton_dist" / mutant.path
        text = broken.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            return f"{text.count(mutant.old)} places in {mutant.path} are to be broken, not one"
        broken.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        return _verdict(mutant, copy, seconds)


def _verdict(mutant: Mutant, copy: Path, seconds: float) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(_paths(copy)), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if not any(test.startswith("tests/compile") for test in mutant.tests):
        environment |= {"TRITON_INTERPRET": "1", "TRITON_DIST_DEVICE": "cpu"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    selected = ["-m", "not chaos and not stress and not gpu", *mutant.tests]
    try:
        done = subprocess.run(
            [*command, *selected],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no test failed within {seconds:.0f} s"
    if done.returncode == _FAILED or done.returncode < 0:  # or it crashed: an address of nobody
        return ""
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]]
    return f"pytest ended with {done.returncode}: {last[0]}"


def _paths(copy: Path) -> list[str]:
    """The copy, then whatever else is on the path, but this tree."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in others if path and not Path(path).resolve().is_relative_to(ROOT)]
    return [str(copy / "python"), str(copy), *kept]


def main() -> int:
    """Print a line for each mutant, and return how many survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for each")
    parser.add_argument("-k", dest="part", default="", help="part of the invariant's text")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.part in mutant.invariant]
    begin = time.monotonic()

    def run(mutant: Mutant) -> str:
        verdict = survives(mutant, options.seconds)
        took = f"{time.monotonic() - begin:5.0f} s"
        print(f"{took}  {'SURVIVED' if verdict else 'killed  '}  {mutant.invariant}", flush=True)
        return verdict

    with ThreadPoolExecutor(options.jobs) as threads:
        verdicts = list(threads.map(run, chosen))
    survivors = [(m, verdict) for m, verdict in zip(chosen, verdicts, strict=True) if verdict]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} broken invariants are noticed")
    for mutant, verdict in survivors:
        print(f"survived: {mutant.invariant} ({mutant.path}): {verdict}")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main())
