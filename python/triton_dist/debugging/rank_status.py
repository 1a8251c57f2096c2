"""Status of the ranks of a job: what each rank publishes, and ``triton-dist debug where``.

A client writes a request file to the job's folder. A thread of each rank polls for requests and
writes the rank's status. A rank also reads flags and epochs from the peers' symmetric memory, so
its status describes ranks that do not answer.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import triton

from triton_dist import knobs
from triton_dist.debugging.faults import NoSuchJob
from triton_dist.debugging.site import is_of_program
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.device import current_device
from triton_dist.runtime.job import create_job_folder, is_running, job_folders

_MAX_LAUNCHES, _MAX_FRAMES = 4, 12
_launches: deque[str] = deque(maxlen=_MAX_LAUNCHES)
_is_on = False


class Region(Protocol):
    @property
    def local(self) -> torch.Tensor: ...
    @property
    def peers(self) -> tuple[torch.Tensor, ...]: ...


class Memory(Protocol):
    """Symmetric memory that reports the progress of ranks."""

    def status(self) -> dict[str, Any]:
        """Return ``name``, ``epochs`` and ``late``.

        ``epochs`` maps the name of a counter to its value on each rank (None: cannot be read).
        ``late`` lists awaited flags, each with ``flag``, ``expected``, ``seen`` and ``writer``.
        """

    def writer_of(self, address: int) -> int | None:
        """Return the rank that sets the flag at ``address``, or ``None`` for other addresses."""


Read = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(eq=False)
class Slots:
    """A memory whose calls alternate between slots, each with its own epoch.

    Attributes:
        epochs: region of control words [slots, words]; bits ``shift`` and above of word ``word``
            are the epoch of a slot.
        begun: number of calls that this rank's host has begun, by slot.
        late: returns the awaited flags of a slot and epoch that are not yet set.
        flags: returns the flags of a slot, with a function from index to the rank that sets it.
    """

    epochs: Region
    word: int
    shift: int
    begun: list[int]
    late: Callable[[int, int, Read], Iterable[dict[str, Any]]]
    flags: Callable[[int], Iterable[tuple[torch.Tensor, Callable[[int], int]]]]

    def status(self) -> dict[str, Any]:
        """Return the status; see :class:`Memory`.

        A slot is in use if more calls have begun than epochs have ended. Replays of a CUDA graph
        are not counted.
        """
        peek, peers = current_device().peek, self.epochs.peers
        lines = [peek(peer) for peer in peers]
        own = next(number for number, peer in enumerate(peers) if peer is self.epochs.local)
        counters: dict[str, list[int | None]] = {}
        late: list[dict[str, Any]] = []
        for slot, begun in enumerate(self.begun):
            row = [None if each is None else int(each[slot, self.word]) for each in lines]
            epochs = [None if flag is None else flag >> self.shift for flag in row]
            counters[f"epoch of slot {slot}"] = epochs
            epoch = epochs[own]
            if epoch is not None and begun >= epoch:
                late += self.late(slot, epoch, peek)
        calls = sum(self.begun)
        counters["calls"] = [calls if rank == own else None for rank in range(len(peers))]
        return {
            "name": describe_address(self.epochs.local.data_ptr()).rpartition(".")[0],
            "epochs": counters,
            "late": late,
        }

    def writer_of(self, address: int) -> int | None:
        for slot in range(len(self.begun)):
            for words, source_of in self.flags(slot):
                index = (address - words.data_ptr()) // words.element_size()
                if 0 <= index < words.numel():
                    return source_of(index)
        return None


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()


def start() -> None:
    """Start recording launches and memories that are created from now on."""
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
    """Include ``memory`` in the status; return False if status is off."""
    if _is_on:
        _memories.add(memory)
        with suppress(Exception):
            memory.status()  # allocates what it needs now, which is impossible during a kernel
    return _is_on


def note_launch(kernel: str, grid: tuple[int, ...]) -> None:
    _launches.append(f"{kernel} {grid}")


def _note_compiled(metadata: Any) -> None:
    with suppress(Exception):  # private metadata of Triton: a change must not fail the launch
        _launches.append(str(metadata.data.get("name", "?")))


def writer_of(address: int) -> int | None:
    """Return the rank that sets the flag at ``address``, or ``None`` if unknown."""
    for memory in list(_memories):
        with suppress(Exception):  # the memory may be freed concurrently
            writer = memory.writer_of(address)
            if writer is not None:
                return writer
    return None


def answer_request(folder: Path, answered: str, state: dict[str, Any]) -> str:
    """Write the status if there is a request other than ``answered``; return the last request.

    Args:
        state: the part of the status that is also published without a request.
    """
    try:
        request = (folder / "ask").read_text(encoding="utf-8")
    except OSError:
        return answered
    if request and request != answered:
        # Frames of the main thread without Python's own and its libraries' frames.
        frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
        lines: list[str] = []
        while frame is not None and len(lines) < _MAX_FRAMES:
            if is_of_program(frame):
                lines.append(
                    f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                )
            frame = frame.f_back
        known = state | {"question": request, "stack": lines[::-1], "launches": list(_launches)}
        known["memories"] = [_status_of(memory) for memory in list(_memories)]
        write_state(folder / f"where-{state['rank']}.json", known)
    return request


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` to ``path`` atomically."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(state), encoding="utf-8")
    new.replace(path)


def _status_of(memory: Memory) -> dict[str, Any]:
    try:
        return memory.status()
    except Exception as failure:  # the status of the other memories is still useful
        return {"name": type(memory).__name__, "epochs": {}, "late": [], "failed": repr(failure)}


SIGNAL = signal.SIGUSR2
"""A rank that receives this signal prints the status of all ranks. Job schedulers and
``spawn_ranks`` use SIGUSR1."""
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 5.0
_write_end = -1


def install_signal_handler() -> None:
    """Make ``SIGNAL`` print the status of the job's ranks on standard error, unless the program
    handles it.

    Python runs a signal handler only between bytecodes of the main thread, which a hung rank does
    not reach. faulthandler writes immediately: here into a pipe that a thread reads.
    """
    global _write_end
    if _write_end >= 0 or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    read_end, _write_end = os.pipe()
    faulthandler.register(SIGNAL, file=_write_end, all_threads=False)
    threading.Thread(
        target=_print_on_signal, args=(read_end,), name="triton_dist-where", daemon=True
    ).start()


def remove_signal_handler() -> None:
    global _write_end
    if _write_end >= 0:
        faulthandler.unregister(SIGNAL)
        os.close(_write_end)  # the thread reads the end of the file and exits
        _write_end = -1


def _start_in_child() -> None:
    """Replace the parent's pipe in a forked child, which does not have the reading thread."""
    if _write_end >= 0:
        remove_signal_handler()
        install_signal_handler()


os.register_at_fork(after_in_child=_start_in_child)


def _print_on_signal(read_end: int) -> None:
    while os.read(read_end, 1 << 16):  # discard the stack, which the report contains too
        print(
            f"triton_dist: rank {knobs.rank.get()} reports the status of all ranks\n"
            f"{report(create_job_folder())[0]}",
            file=sys.stderr,
            flush=True,
        )
        # faulthandler writes a stack in several parts. The rest must not start another report.
        while select.select([read_end], [], [], 0)[0] and os.read(read_end, 1 << 16):
            pass
    os.close(read_end)


def report(folder: Path) -> tuple[str, int]:
    """Request the status of the ranks of ``folder``; return the text and the number of answers."""
    request = f"{os.getpid()} {time.monotonic()}"
    (folder / "ask").write_text(request, encoding="utf-8")
    states: dict[int, dict[str, Any]] = {}
    answers: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + _ANSWER_SECONDS
    while True:
        states |= _read(folder.glob("[0-9]*.json"))
        found = _read(folder.glob("where-*.json"))
        answers = {r: each for r, each in found.items() if each["question"] == request}
        missing = [r for r, each in states.items() if r not in answers and is_running(each["pid"])]
        if (states and not missing) or time.monotonic() > end:
            break
        time.sleep(_POLL_SECONDS)
    (folder / "ask").unlink(missing_ok=True)
    lines = [f"job {folder.name.rpartition('-')[2]}: {len(answers)} of {len(states)} ranks answer"]
    for rank in sorted(states):
        lines += _rank_lines(states[rank] | answers.get(rank, {}), rank in answers)
    return "\n".join(lines + _memory_lines(answers)), len(answers)


def _read(paths: Iterable[Path]) -> dict[int, dict[str, Any]]:
    found = {}
    for path in paths:
        with suppress(OSError, ValueError):
            state = json.loads(path.read_text(encoding="utf-8"))
            found[int(state["rank"])] = state
    return found


def _rank_lines(state: Mapping[str, Any], answers: bool) -> list[str]:
    head = f"rank {state['rank']} (process {state['pid']})"
    if not answers:
        ended = "" if is_running(state["pid"]) else " has ended;"
        return [f"{head}:{ended} no answer; it was at {state['host']}"]
    lines = [f"{head}: {'waits in a kernel' if state['waits'] else 'is at ' + state['host']}"]
    for wait in state["waits"]:
        lines.append(f"  {wait['at']}: waits for {_describe_wait(wait)}")
    for memory in state["memories"]:
        lines += [
            f"  a kernel of {memory['name']} waits for {_describe_wait(f)}" for f in memory["late"]
        ]
        if "failed" in memory:
            lines.append(f"  {memory['name']} cannot be read: {memory['failed']}")
    lines += [f"  has set: {flag} at {at}" for flag, at in list(state["told"].items())[-4:]]
    if state["launches"]:
        lines.append(f"  last launches: {', '.join(state['launches'])}")
    return lines + [f"  {line}" for line in state["stack"]]


def _describe_wait(wait: Mapping[str, Any]) -> str:
    writer = wait.get("writer")
    by = "" if writer is None else f", which rank {writer} sets"
    return f"{wait['flag']} to reach {wait['expected']}, it is {wait['seen']}{by}"


def _memory_lines(answers: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a line per counter with the epochs of all ranks, preferring the value that a rank read
    itself."""
    seen: dict[tuple[str, str], dict[int, int]] = {}
    for rank, answer in sorted(answers.items()):
        for memory in answer["memories"]:
            for counter, epochs in memory["epochs"].items():
                row = seen.setdefault((memory["name"], counter), {})
                for peer, epoch in enumerate(epochs):
                    if epoch is not None and (peer == rank or peer not in row):
                        row[peer] = epoch
    lines = []
    for (name, counter), row in seen.items():
        # The most frequent epoch; on a tie the highest, because a rank that is behind makes the
        # other ranks wait.
        counted = Counter(row.values())
        common = max(counted, key=lambda epoch: (counted[epoch], epoch), default=0)
        shown = "  ".join(
            f"rank {peer}: {epoch}{' <- differs' if epoch != common else ''}"
            for peer, epoch in sorted(row.items())
        )
        lines.append(f"{name}, {counter}: {shown}")
    return lines


def folder_of(job: str | None, pattern: str) -> Path:
    """Return the folder of ``job``, or of the only job that has a file matching ``pattern``.

    Raises:
        NoSuchJob: no job matches, or ``job`` is ``None`` and several jobs match.
    """
    found = job_folders(pattern)
    if job is None and len(found) == 1:
        return next(iter(found.values()))
    if job not in found:
        raise NoSuchJob(job, sorted(found))
    return found[job]
