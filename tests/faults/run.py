"""Faults of an exchange: in how many of 100 runs is each noticed?

python tests/faults/run.py                  2 ranks, which share the GPU if there is but one
python tests/faults/run.py --device cpu     in the interpreter
python tests/faults/run.py --ranks 4 --runs 20 --delays 0,1,5
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

from triton_dist.testing import spawn_ranks  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--delays", default="0,5", help="milliseconds (default: %(default)s)")
    options = parser.parse_args()
    delays = tuple(map(float, options.delays.split(",")))
    begin = time.monotonic()
    from tests.faults import exchange

    tables = spawn_ranks(
        options.ranks, exchange.table, options.runs, delays,
        device=options.device, share_gpus=options.device == "cuda", timeout=1000,
    )  # fmt: skip
    print(f"{options.ranks} ranks, {options.device}, {options.runs} runs each")
    print(f"{'fault':<26}" + "".join(f"{f'{each:g} ms late':>12}" for each in delays))
    for fault, counts in tables[0].items():
        print(f"{fault:<26}" + "".join(f"{count:>12}" for count in counts))
    print(f"{time.monotonic() - begin:.0f} s")
    return int(any(tables[0][exchange.RIGHT]))


if __name__ == "__main__":
    sys.exit(main())
