"""Standing of the ranks of a job, asked for from outside or, by a signal, of one of them."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from triton_dist import knobs
from triton_dist.runtime.debugging.job import made_folder, runs

SIGNAL = signal.SIGUSR2
"""Sent to a rank, it lets that rank print where all stand. SIGUSR1 is what schedulers warn with,
and what ``spawn_ranks`` asks for stacks with."""
_LOOK_SECONDS = 0.05
_ANSWER_SECONDS = 5.0
_write_end = -1


def start() -> None:
    """Let ``SIGNAL`` print where the ranks of this job stand, on standard error of this process,
    until :func:`stop`; nothing where the program has a use for that signal.

    Python would run a handler between two lines of the main thread, which a hung rank does not come
    to: faulthandler's writes at once, here into a pipe that a thread waits at.
    """
    global _write_end
    if _write_end >= 0 or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    read_end, _write_end = os.pipe()
    faulthandler.register(SIGNAL, file=_write_end, all_threads=False)
    threading.Thread(
        target=_print_when_told, args=(read_end,), name="triton_dist-where", daemon=True
    ).start()


def stop() -> None:
    global _write_end
    if _write_end >= 0:
        faulthandler.unregister(SIGNAL)
        os.close(_write_end)  # the thread reads the end, and ends
        _write_end = -1


def _start_in_child() -> None:
    """The pipe of a fork's parent is not for the child to write to, nor has it the thread."""
    global _write_end
    if _write_end >= 0:
        faulthandler.unregister(SIGNAL)
        os.close(_write_end)
        _write_end = -1
        start()


os.register_at_fork(after_in_child=_start_in_child)


def _print_when_told(read_end: int) -> None:
    while os.read(read_end, 1 << 16):  # the stack of the main thread, which the report has
        print(
            f"triton_dist: rank {knobs.rank.get()} was asked where the ranks stand\n"
            f"{report(made_folder())[0]}",
            file=sys.stderr,
            flush=True,
        )
    os.close(read_end)


def report(folder: Path) -> tuple[str, int]:
    """Ask the ranks whose place is ``folder``: what they say, and how many do."""
    question = f"{os.getpid()} {time.monotonic()}"
    (folder / "ask").write_text(question, encoding="utf-8")
    states: dict[int, dict[str, Any]] = {}
    answers: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + _ANSWER_SECONDS
    while True:
        states |= _read(folder.glob("[0-9]*.json"))
        found = _read(folder.glob("where-*.json"))
        answers = {r: each for r, each in found.items() if each["question"] == question}
        missing = [r for r, each in states.items() if r not in answers and runs(each["pid"])]
        if (states and not missing) or time.monotonic() > end:
            break
        time.sleep(_LOOK_SECONDS)
    (folder / "ask").unlink(missing_ok=True)
    lines = [f"job {folder.name.rpartition('-')[2]}: {len(answers)} of {len(states)} ranks answer"]
    for rank in sorted(states):
        lines += _of_rank(states[rank] | answers.get(rank, {}), rank in answers)
    return "\n".join(lines + _of_memories(answers)), len(answers)


def _read(paths: Iterable[Path]) -> dict[int, dict[str, Any]]:
    found = {}
    for path in paths:
        with suppress(OSError, ValueError):
            state = json.loads(path.read_text(encoding="utf-8"))
            found[int(state["rank"])] = state
    return found


def _of_rank(state: Mapping[str, Any], answers: bool) -> list[str]:
    head = f"rank {state['rank']} (process {state['pid']})"
    if not answers:
        ended = "" if runs(state["pid"]) else " has ended;"
        return [f"{head}:{ended} no answer; it was at {state['host']}"]
    lines = [f"{head}: {'waits in a kernel' if state['waits'] else 'is at ' + state['host']}"]
    for wait in state["waits"]:
        lines.append(f"  {wait['at']}: waits for {_awaited(wait)}")
    for memory in state["memories"]:
        lines += [f"  a kernel of {memory['name']} waits for {_awaited(f)}" for f in memory["late"]]
        if "failed" in memory:
            lines.append(f"  {memory['name']} cannot be looked into: {memory['failed']}")
    lines += [f"  told: {flag} by {at}" for flag, at in list(state["told"].items())[-4:]]
    if state["launches"]:
        lines.append(f"  last launches: {', '.join(state['launches'])}")
    return lines + [f"  {line}" for line in state["stack"]]


def _awaited(wait: Mapping[str, Any]) -> str:
    writer = wait.get("writer")
    by = "" if writer is None else f", which rank {writer} sets"
    return f"{wait['flag']} to reach {wait['expected']}, it is {wait['seen']}{by}"


def _of_memories(answers: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Epochs of all ranks side by side; each as its rank sees it, or else as a peer does."""
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
        common = _common(row.values())
        shown = "  ".join(
            f"rank {peer}: {epoch}{' <- differs' if epoch != common else ''}"
            for peer, epoch in sorted(row.items())
        )
        lines.append(f"{name}, {counter}: {shown}")
    return lines


def _common(epochs: Iterable[int]) -> int:
    """The epoch of most ranks; of two ranks, and where as many have either, the highest: a rank
    that is behind keeps the others waiting."""
    counted = Counter(epochs)
    return max(counted, key=lambda epoch: (counted[epoch], epoch), default=0)
