"""Running code blocks, in the process that they are given."""

from __future__ import annotations

import io
import os
import runpy
import sys
import types
from contextlib import redirect_stdout
from pathlib import Path

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def run_page(path: str, blocks: list[tuple[int, str]]) -> list[str]:
    """What each block prints; they share one namespace, as in one program.

    Args:
        path: where the program is written to, so that Triton finds the source of its kernels.
        blocks: (line in the page, text) of each; errors name the lines of the page.
    """
    for variable in LAUNCHER_VARIABLES:  # nobody launched this program on ranks
        os.environ.pop(variable, None)
    lines: list[str] = []
    for first, text in blocks:
        lines += [""] * (first - 1 - len(lines)) + text.splitlines()
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.argv = [path]
    printed = []
    for first, text in blocks:
        with redirect_stdout(io.StringIO()) as output:
            code = compile("\n" * (first - 1) + text, path, "exec", dont_inherit=True)
            exec(code, vars(module))
        printed.append(output.getvalue())
    return printed


def run_program(path: str, *arguments: str) -> str:
    """What the program at ``path`` prints in this rank."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(path, run_name="__main__")
    return output.getvalue()
