"""Looks into a job that runs, for ``triton-dist debug``: pdb of a rank, and where all stand."""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

_LOOK_SECONDS = 0.05
_ANSWER_SECONDS = 5.0


def attach(rank: int, job: str | None, seconds: float) -> int:
    """Talk with the pdb of a rank, from standard input to standard output; waits ``seconds`` for
    the rank to stop.

    Raises:
        NoSuchJob: there is no such job, or several.
        TimeoutError: the rank does not stop.
    """
    from triton_dist.runtime.debugging import stops
    from triton_dist.runtime.debugging.faults import NoSuchJob
    from triton_dist.runtime.debugging.job import folder_of

    end = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                try:
                    folder = folder_of(job, stops.socket_of(Path(), rank).name)
                except NoSuchJob:  # none of which it stands
                    folder = folder_of(job, "*")
                    stops.request_of(folder, rank).touch()
                connection.connect(str(stops.socket_of(folder, rank)))
            except (NoSuchJob, OSError) as failure:
                if time.monotonic() < end:
                    time.sleep(_LOOK_SECONDS)
                    continue
                if isinstance(failure, NoSuchJob):
                    raise
                stops.request_of(folder, rank).unlink(missing_ok=True)
                raise TimeoutError(
                    f"rank {rank} did not stop within {seconds:g} s: it has come to no "
                    "dl.breakpoint and stands in no dl.wait of an interpreted kernel"
                ) from None
            stops.request_of(folder, rank).unlink(missing_ok=True)
            _talk(connection, sys.stdin.buffer, sys.stdout.buffer)
            return 0


def _talk(connection: socket.socket, typed: BinaryIO, shown: BinaryIO) -> None:
    """Pass on what is typed and what is said, until the rank goes on."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        with suppress(OSError):  # a file needs no waiting, and cannot be waited for
            selector.register(typed, selectors.EVENT_READ)
        if len(selector.get_map()) == 1:
            connection.sendall(typed.read())
            connection.shutdown(socket.SHUT_WR)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    said = connection.recv(1 << 16)
                    if not said:
                        return
                    shown.write(said)
                    shown.flush()
                elif line := os.read(typed.fileno(), 1 << 16):
                    connection.sendall(line)
                else:
                    selector.unregister(typed)
                    connection.shutdown(socket.SHUT_WR)


def where(job: str | None) -> int:
    """Print where the ranks of a job stand.

    Raises:
        NoSuchJob: there is no such job, or several.
    """
    from triton_dist.runtime.debugging.job import folder_of, runs

    folder = folder_of(job, "[0-9]*.json")
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
        lines += _of_rank(states[rank] | answers.get(rank, {}), rank in answers, runs)
    print("\n".join(lines + _of_memories(answers)))
    return 0 if answers else 1


def _read(paths: Iterable[Path]) -> dict[int, dict[str, Any]]:
    found = {}
    for path in paths:
        with suppress(OSError, ValueError):
            state = json.loads(path.read_text(encoding="utf-8"))
            found[int(state["rank"])] = state
    return found


def _of_rank(state: Mapping[str, Any], answers: bool, runs: Any) -> list[str]:
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
