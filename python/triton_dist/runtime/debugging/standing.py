"""Answers to ``triton-dist debug where``: where this rank stands, also while its GPU spins.

Who asks leaves a file in the job's folder; each rank looks for it every quarter of a second, on a
thread that no kernel holds up, and writes what it knows. What only kernels know, flags and epochs,
is read from symmetric memory, the peers' too: one rank that answers says much of those that do not.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import triton

from triton_dist.runtime.debugging.site import is_of_program

_MOST_LAUNCHES, _MOST_FRAMES = 4, 12
_launches: deque[str] = deque(maxlen=_MOST_LAUNCHES)
_is_on = False


class Memory(Protocol):
    """Symmetric memory that can say who has come how far."""

    def standing(self) -> dict[str, Any]:
        """``name``; ``epochs``: by name of a counter, that of each rank (None: cannot be read);
        ``late``: flags that are awaited, as ``flag``, ``expected``, ``seen``, ``writer``."""
        ...

    def writer_of(self, address: int) -> int | None:
        """Rank that sets the flag at ``address``; ``None``: no flag of this memory."""
        ...


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()


def start() -> None:
    """Note launches, and memories that are made from now on."""
    global _is_on
    _is_on = True
    hook = triton.knobs.runtime.launch_enter_hook
    if hasattr(hook, "add"):
        hook.add(_note_compiled)


def stop() -> None:
    global _is_on
    _is_on = False
    hook = triton.knobs.runtime.launch_enter_hook
    if hasattr(hook, "remove"):
        hook.remove(_note_compiled)


def add(memory: Memory) -> bool:
    """Let ``memory`` be asked; False where nobody will ask."""
    if _is_on:
        _memories.add(memory)
        with suppress(Exception):
            memory.standing()  # now: what it needs for that may not be made beside a kernel
    return _is_on


def note_launch(kernel: str, grid: tuple[int, ...]) -> None:
    _launches.append(f"{kernel} {grid}")


def _note_compiled(metadata: Any) -> None:
    with suppress(Exception):  # whatever a version has there, a launch must not fail for it
        _launches.append(str(metadata.data.get("name", "?")))


def writer_of(address: int) -> int | None:
    """Rank that sets the flag at ``address``, as far as a memory knows."""
    for memory in list(_memories):
        with suppress(Exception):  # it may be freed meanwhile
            writer = memory.writer_of(address)
            if writer is not None:
                return writer
    return None


def answer_if_asked(folder: Path, answered: str, state: dict[str, Any]) -> str:
    """Write ``state``, and what else is known, if there is a question other than ``answered``;
    returns the last question."""
    try:
        question = (folder / "ask").read_text(encoding="utf-8")
    except OSError:
        return answered
    if question and question != answered:
        known = state | {"question": question, "stack": _stack(), "launches": list(_launches)}
        known["memories"] = [_standing_of(memory) for memory in list(_memories)]
        path = folder / f"where-{state['rank']}.json"
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(known), encoding="utf-8")
        new.replace(path)
    return question


def _standing_of(memory: Memory) -> dict[str, Any]:
    try:
        return memory.standing()
    except Exception as failure:  # the others' standing is worth as much
        return {"name": type(memory).__name__, "epochs": {}, "late": [], "failed": repr(failure)}


def _stack() -> list[str]:
    """Lines of the main thread, the innermost last: the program's, and those of kernels."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        if is_of_program(frame):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines[::-1]
