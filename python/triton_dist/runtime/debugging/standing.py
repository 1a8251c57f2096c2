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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import triton

from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.debugging.site import is_of_program

_MOST_LAUNCHES, _MOST_FRAMES = 4, 12
_launches: deque[str] = deque(maxlen=_MOST_LAUNCHES)
_is_on = False


class Region(Protocol):
    """A region of symmetric memory."""

    @property
    def local(self) -> torch.Tensor: ...
    @property
    def peers(self) -> tuple[torch.Tensor, ...]: ...


class Memory(Protocol):
    """Symmetric memory that can say who has come how far."""

    def standing(self) -> dict[str, Any]:
        """``name``; ``epochs``: by name of a counter, that of each rank (None: cannot be read);
        ``late``: flags that are awaited, as ``flag``, ``expected``, ``seen``, ``writer``."""
        ...

    def writer_of(self, address: int) -> int | None:
        """Rank that sets the flag at ``address``; ``None``: no flag of this memory."""
        ...


Read = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(eq=False)
class Slots:
    """A memory whose calls take turns with slots, each of which has an epoch.

    Attributes:
        epochs: region of control words [slots, words], number ``word`` of which counts from bit
            ``shift`` on.
        begun: by slot, the calls that this rank's host has begun.
        late: the flags that the use of a slot waits for in some epoch, and that are not there.
        flags: of a slot, flags, and the rank that sets the one of an index.
    """

    epochs: Region
    word: int
    shift: int
    begun: list[int]
    late: Callable[[int, int, Read], Iterable[dict[str, Any]]]
    flags: Callable[[int], Iterable[tuple[torch.Tensor, Callable[[int], int]]]]

    def standing(self) -> dict[str, Any]:
        """See :class:`Memory`. In use is a slot of which more calls have begun than epochs are
        over; that of a graph's replays is not known to be."""
        from triton_dist.runtime.device import current_device

        peek, peers = current_device().peek, self.epochs.peers
        lines = [peek(peer) for peer in peers]
        own = next(number for number, peer in enumerate(peers) if peer is self.epochs.local)
        named: dict[str, list[int | None]] = {}
        late: list[dict[str, Any]] = []
        for slot, begun in enumerate(self.begun):
            row = [None if each is None else int(each[slot, self.word]) for each in lines]
            epochs = [None if flag is None else flag >> self.shift for flag in row]
            named[f"epoch of slot {slot}"] = epochs
            epoch = epochs[own]
            if epoch is not None and begun >= epoch:
                late += self.late(slot, epoch, peek)
        calls = sum(self.begun)
        named["calls"] = [calls if rank == own else None for rank in range(len(peers))]
        return {"name": _name_of(self.epochs), "epochs": named, "late": late}

    def writer_of(self, address: int) -> int | None:
        for slot in range(len(self.begun)):
            for words, source_of in self.flags(slot):
                index = (address - words.data_ptr()) // words.element_size()
                if 0 <= index < words.numel():
                    return source_of(index)
        return None


def _name_of(region: Region) -> str:
    return describe_address(region.local.data_ptr()).rpartition(".")[0]


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
