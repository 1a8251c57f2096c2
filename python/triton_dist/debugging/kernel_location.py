"""Find the source line that an interpreted kernel executes, for messages. The search is slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import triton

from triton_dist import knobs
from triton_dist.runtime import interpreter
from triton_dist.runtime.interpreter_program import current_program

_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
# Folders of code that runs between a line of a kernel and an operation of the interpreter.
_NOT_KERNEL_PATHS = (
    str(Path(triton.__file__).parent),
    str(_PACKAGE_FOLDER / "runtime"),
    str(_PACKAGE_FOLDER / "debugging"),
    str(_PACKAGE_FOLDER / "language"),
)


# Paths of code that is neither user code nor a kernel.
_NOT_USER_CODE_PATHS = (
    *_NOT_KERNEL_PATHS,
    str(Path(os.__file__).parent),
    str(Path(torch.__file__).parent),
    "<",
)


def is_user_code(frame: FrameType) -> bool:
    """Return whether a frame belongs to user code or to a kernel, not to a library."""
    return not frame.f_code.co_filename.startswith(_NOT_USER_CODE_PATHS)


@dataclass(frozen=True)
class KernelLocation:
    """The line that a program of an interpreted kernel executes.

    Attributes:
        arguments: the kernel's arguments by name, as objects of the interpreter.
    """

    rank: int
    program: tuple[int, int, int]
    kernel: str
    file: str
    line: int
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"rank {self.rank}, program {self.program} of {self.kernel}, {self.file}:{self.line}"


def kernel_frame() -> FrameType | None:
    """Return the innermost frame of a kernel on this thread's stack, or ``None``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_KERNEL_PATHS):
        frame = frame.f_back
    return frame


def current_location() -> KernelLocation:
    """Return the innermost line of a kernel on this thread's stack, and the kernel's arguments."""
    frame: FrameType | None = sys._getframe(1)
    file, line, kernel, arguments = "?", 0, "?", {}
    while frame is not None:
        code = frame.f_code
        if file == "?" and not code.co_filename.startswith(_NOT_KERNEL_PATHS):
            file, line = code.co_filename, frame.f_lineno
        if code.co_name == "run_program" and code.co_filename == interpreter.__file__:
            kernel, arguments = frame.f_locals["executor"].fn.__name__, frame.f_locals["values"]
            break
        frame = frame.f_back
    return KernelLocation(knobs.rank.get(), current_program(), kernel, file, line, arguments)
