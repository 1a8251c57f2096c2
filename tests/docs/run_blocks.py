"""Run code blocks in the process that calls, and compare what they print."""

from __future__ import annotations

import doctest
import io
import os
import runpy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from tests.docs.markdown import Block

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def run_page(path: str, blocks: list[tuple[int, str]]) -> list[str]:
    """What a terminal shows of each block; they share one namespace, as in one program.

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
        with _shown() as output:
            code = compile("\n" * (first - 1) + text, path, "exec", dont_inherit=True)
            exec(code, vars(module))
        printed.append(output.getvalue())
    return printed


def run_program(path: str, *arguments: str) -> str:
    """What a terminal shows of the program at ``path`` in this rank."""
    with _shown() as output:
        _run(path, *arguments)
    return output.getvalue()


def run_program_in_ascii(path: str, *arguments: str) -> str:
    """The same of a terminal that knows no other characters."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with redirect_stdout(output), redirect_stderr(output):
        _run(path, *arguments)
    return output.buffer.getvalue().decode()  # type: ignore[attr-defined]


def _run(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


@contextmanager
def _shown() -> Iterator[io.StringIO]:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
        yield output


def check_output(block: Block, printed: str) -> None:
    """Compare with the page's ``text output``, if it has one; ``...`` stands for anything."""
    if block.expected is None:
        return
    checker, example = doctest.OutputChecker(), doctest.Example(block.text, block.expected)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not checker.check_output(block.expected, printed, flags):
        pytest.fail(f"{block.id}\n{checker.output_difference(example, printed, flags)}")
