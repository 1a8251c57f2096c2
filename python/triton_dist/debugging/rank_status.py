"""Status of the ranks of a job, which ``triton-dist debug where`` prints.

A client writes a request to a file in the job's folder. A thread of each rank polls for requests
and writes the rank's status to another file. A rank also reads the flags and epochs (call counters)
of other ranks from symmetric memory, so its status describes ranks that do not answer.
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
from typing import Any

import torch
import triton

from triton_dist import knobs
from triton_dist.debugging.faults import NoSuchJob
from triton_dist.debugging.kernel_location import is_user_code
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.device import current_device
from triton_dist.runtime.job import create_job_folder, is_running, job_folders
from triton_dist.runtime.symmetric import Region

_MAX_LAUNCHES, _MAX_FRAMES = 4, 12
_launches: deque[str] = deque(maxlen=_MAX_LAUNCHES)
_is_recording = False


ReadTensor = Callable[[torch.Tensor], torch.Tensor | None]
"""Function that copies a tensor to the host, or returns ``None`` if this takes too long."""


@dataclass(eq=False)
class SlotStatus:
    """Status of the memory of an op whose calls alternate between slots (double buffering).

    Attributes:
        control_words: region [slots, words], which contains the epoch of each slot.
        epoch_word: index of the word with the epoch.
        epoch_shift: lowest bit of the epoch in that word.
        num_begun: number of calls that this rank's host has begun, by slot.
        awaited: returns the flags of a slot and epoch that are awaited and not yet set.
        flags: returns the tensors of flags of a slot, each with a function from the index of a flag
            to the rank that sets the flag.
    """

    control_words: Region
    epoch_word: int
    epoch_shift: int
    num_begun: list[int]
    awaited: Callable[[int, int, ReadTensor], Iterable[dict[str, Any]]]
    flags: Callable[[int], Iterable[tuple[torch.Tensor, Callable[[int], int]]]]

    def status(self) -> dict[str, Any]:
        """Return a dict with ``name``, ``epochs`` and ``awaited``. ``epochs`` maps the name of a
        counter to its value on each rank (None: cannot be read). ``awaited`` lists the flags that a
        kernel waits for, as dicts of ``flag``, ``expected``, ``seen`` and ``writer``.

        A slot is in use if more of its calls have begun than have ended. Replays of a CUDA graph
        are not counted.
        """
        peek, peers = current_device().peek, self.control_words.peers
        copies = [peek(peer) for peer in peers]
        own = next(rank for rank, peer in enumerate(peers) if peer is self.control_words.local)
        counters: dict[str, list[int | None]] = {}
        awaited: list[dict[str, Any]] = []
        for slot, num_begun in enumerate(self.num_begun):
            row = [None if each is None else int(each[slot, self.epoch_word]) for each in copies]
            epochs = [None if word is None else word >> self.epoch_shift for word in row]
            counters[f"epoch of slot {slot}"] = epochs
            epoch = epochs[own]
            if epoch is not None and num_begun >= epoch:
                awaited += self.awaited(slot, epoch, peek)
        calls = sum(self.num_begun)
        counters["calls"] = [calls if rank == own else None for rank in range(len(peers))]
        return {
            "name": describe_address(self.control_words.local.data_ptr()).rpartition(".")[0],
            "epochs": counters,
            "awaited": awaited,
        }

    def writer_of(self, address: int) -> int | None:
        """Return the rank that sets the flag at ``address``, or ``None`` for other addresses."""
        for slot in range(len(self.num_begun)):
            for words, source_of in self.flags(slot):
                index = (address - words.data_ptr()) // words.element_size()
                if 0 <= index < words.numel():
                    return source_of(index)
        return None


_memories: weakref.WeakSet[SlotStatus] = weakref.WeakSet()


def start() -> None:
    """Start to record launches, and the memories that are created from now on."""
    global _is_recording
    _is_recording = True
    hook = triton.knobs.runtime.launch_enter_hook
    if hasattr(hook, "add"):
        hook.add(_note_compiled)


def stop() -> None:
    global _is_recording
    _is_recording = False
    hook = triton.knobs.runtime.launch_enter_hook
    if hasattr(hook, "remove"):
        hook.remove(_note_compiled)


def add(memory: SlotStatus) -> bool:
    """Include ``memory`` in the status. Return False if status is off."""
    if _is_recording:
        _memories.add(memory)
        with suppress(Exception):
            memory.status()  # allocates buffers now, because it cannot while a kernel runs
    return _is_recording


def note_launch(kernel: str, grid: tuple[int, ...]) -> None:
    _launches.append(f"{kernel} {grid}")


def _note_compiled(metadata: Any) -> None:
    with suppress(Exception):  # Triton's metadata is private: a change must not fail the launch
        _launches.append(str(metadata.data.get("name", "?")))


def writer_of(address: int) -> int | None:
    """Return the rank that sets the flag at ``address``, or ``None`` if unknown."""
    for memory in list(_memories):
        with suppress(Exception):  # the memory may be freed concurrently
            writer = memory.writer_of(address)
            if writer is not None:
                return writer
    return None


def answer_request(folder: Path, last_request: str, state: dict[str, Any]) -> str:
    """If there is a new request, write this rank's status to ``folder``. Return the last request.

    Args:
        folder: the job's folder.
        last_request: the previous request, which this rank has answered.
        state: the part of the status that is also published without a request.
    """
    try:
        request = (folder / _REQUEST_FILE).read_text(encoding="utf-8")
    except OSError:
        return last_request
    if request and request != last_request:
        # The stack of the main thread, without frames of libraries.
        frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
        lines: list[str] = []
        while frame is not None and len(lines) < _MAX_FRAMES:
            if is_user_code(frame):
                lines.append(
                    f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                )
            frame = frame.f_back
        answer = state | {"request": request, "stack": lines[::-1], "launches": list(_launches)}
        answer["memories"] = [_status_of(memory) for memory in list(_memories)]
        write_state(folder / f"where-{state['rank']}.json", answer)
    return request


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` to ``path`` atomically."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(state), encoding="utf-8")
    new.replace(path)


def _status_of(memory: SlotStatus) -> dict[str, Any]:
    try:
        return memory.status()
    except Exception as failure:  # the status of other memories is still useful
        return {"name": type(memory).__name__, "epochs": {}, "awaited": [], "failed": repr(failure)}


SIGNAL = signal.SIGUSR2
"""A rank that receives this signal prints the status of all ranks. Job schedulers and
``spawn_ranks`` use SIGUSR1."""
_REQUEST_FILE = "request"
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 5.0  # time limit for the answers of the other ranks
_write_end = -1  # of the pipe to which the signal handler writes; -1: no handler


def install_signal_handler() -> None:
    """Make ``SIGNAL`` print the status of the job's ranks on standard error. Do nothing if the
    program has its own handler.

    A Python signal handler runs only after the current call of C code, which never returns in a
    hung rank. faulthandler's handler runs immediately. It writes to a pipe, which a thread reads.
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
        os.close(_write_end)  # the reading thread then ends
        _write_end = -1


def _start_in_child() -> None:
    """Replace the parent's pipe in a forked child, which does not have the reading thread."""
    if _write_end >= 0:
        remove_signal_handler()
        install_signal_handler()


os.register_at_fork(after_in_child=_start_in_child)


def _print_on_signal(read_end: int) -> None:
    while os.read(read_end, 1 << 16):  # discard the stack: the report also contains it
        print(
            f"triton_dist: rank {knobs.rank.get()} reports the status of all ranks\n"
            f"{report(create_job_folder())[0]}",
            file=sys.stderr,
            flush=True,
        )
        # faulthandler writes a stack in several parts. Discard the remaining parts.
        while select.select([read_end], [], [], 0)[0] and os.read(read_end, 1 << 16):
            pass
    os.close(read_end)


def report(folder: Path) -> tuple[str, int]:
    """Request the status of all ranks of the job with this folder. Return the report's text and the
    number of ranks that answered."""
    request = f"{os.getpid()} {time.monotonic()}"
    (folder / _REQUEST_FILE).write_text(request, encoding="utf-8")
    states: dict[int, dict[str, Any]] = {}
    answers: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + _ANSWER_SECONDS
    while True:
        states |= _read_states(folder.glob("[0-9]*.json"))
        last_answers = _read_states(folder.glob("where-*.json"))
        answers = {r: each for r, each in last_answers.items() if each["request"] == request}
        missing = [r for r, each in states.items() if r not in answers and is_running(each["pid"])]
        if (states and not missing) or time.monotonic() > end:
            break
        time.sleep(_POLL_SECONDS)
    (folder / _REQUEST_FILE).unlink(missing_ok=True)
    lines = [f"job {folder.name.rpartition('-')[2]}: {len(answers)} of {len(states)} ranks answer"]
    for rank in sorted(states):
        lines += _rank_lines(states[rank] | answers.get(rank, {}), rank in answers)
    return "\n".join(lines + _memory_lines(answers)), len(answers)


def _read_states(paths: Iterable[Path]) -> dict[int, dict[str, Any]]:
    states = {}
    for path in paths:
        with suppress(OSError, ValueError):
            state = json.loads(path.read_text(encoding="utf-8"))
            states[int(state["rank"])] = state
    return states


def _rank_lines(state: Mapping[str, Any], answers: bool) -> list[str]:
    head = f"rank {state['rank']} (process {state['pid']})"
    if not answers:
        ended = "" if is_running(state["pid"]) else " has ended;"
        return [f"{head}:{ended} no answer; it was at {state['host']}"]
    lines = [f"{head}: {'waits in a kernel' if state['waits'] else 'is at ' + state['host']}"]
    for wait in state["waits"]:
        lines.append(f"  {wait['at']}: waits for {describe_wait(wait)}")
    for memory in state["memories"]:
        lines += [
            f"  a kernel of {memory['name']} waits for {describe_wait(flag)}"
            for flag in memory["awaited"]
        ]
        if "failed" in memory:
            lines.append(f"  {memory['name']} cannot be read: {memory['failed']}")
    lines += [f"  has set: {flag} at {at}" for flag, at in list(state["set_flags"].items())[-4:]]
    if state["launches"]:
        lines.append(f"  last launches: {', '.join(state['launches'])}")
    return lines + [f"  {line}" for line in state["stack"]]


def describe_wait(wait: Mapping[str, Any]) -> str:
    writer = wait.get("writer")
    by = "" if writer is None else f", which rank {writer} sets,"
    return f"{wait['flag']}{by} to reach {wait['expected']}, it is {wait['seen']}"


def _memory_lines(answers: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a line per counter with its value on each rank. If several ranks have read a value,
    use the one that the rank has read from its own memory."""
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
        # The most frequent epoch. In a tie the highest, because other ranks wait for slower ranks.
        counted = Counter(row.values())
        common = max(counted, key=lambda epoch: (counted[epoch], epoch), default=0)
        values = "  ".join(
            f"rank {peer}: {epoch}{' <- differs' if epoch != common else ''}"
            for peer, epoch in sorted(row.items())
        )
        lines.append(f"{name}, {counter}: {values}")
    return lines


def folder_of(job: str | None, pattern: str) -> Path:
    """Return the folder of ``job``, or of the only job that has a file matching ``pattern``.

    Raises:
        NoSuchJob: no job matches, or ``job`` is ``None`` and several jobs match.
    """
    folders = job_folders(pattern)
    if job is None and len(folders) == 1:
        return next(iter(folders.values()))
    if job not in folders:
        raise NoSuchJob(job, sorted(folders))
    return folders[job]
