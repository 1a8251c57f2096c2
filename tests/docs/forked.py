"""Programs that are compiled, each in a child of a process that has imported the package: with an
interpreter of its own, each would import it for three seconds.

Reads a path from each line of standard input; says on standard output how that program ended, and
leaves what it printed, and what it tuned, beside it.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

import torch  # noqa: F401
import triton  # noqa: F401

import triton_dist.testing.compile_only
import triton_dist.tune  # noqa: F401


def printed_by(program: Path) -> Path:
    return program.with_suffix(".printed")


def _run(program: Path) -> int:
    """The status of the program."""
    file = os.open(printed_by(program), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["HOME"] = str(program.parent / "home")
    sys.argv = [str(program)]
    sys.path.insert(0, str(program.parent))
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_run(Path(line.rstrip("\n"))))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
