"""Waits of interpreted kernels that nobody is left to end, and where every rank stands.

Each rank tells the others of its host every quarter of a second what its programs wait for, whom
they told, and at which line its main thread is: in a file, since whoever waits answers no message.
A wait can never end once every rank waits in kernels, waits for the others in a collective, or has
ended, and nothing has moved for ``QUIET_SECONDS``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from triton_dist import knobs
from triton_dist.debugging import rank_status
from triton_dist.debugging.accesses import Access, Undo
from triton_dist.debugging.faults import WaitNeverEnds
from triton_dist.debugging.site import is_of_program, site
from triton_dist.runtime import waits
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.job import job_folder, made_folder, runs

QUIET_SECONDS = 2.0
_TELL_SECONDS = 0.25
_FRESH_SECONDS = 0.5  # a program that waits looks again within milliseconds
_MOST_TOLD = 64
_COLLECTIVES = (
    f"{os.sep}torch{os.sep}distributed{os.sep}",
    f"{os.sep}runtime{os.sep}ranks{os.sep}",
)
_PACKAGE = str(Path(__file__).resolve().parents[1])
_OF_RANK = re.compile(r"(.*)( of rank \d+)(\[.*\])")


def flag_at(address: int) -> str:
    """``name[index] of rank r``: the same on every rank."""
    name = describe_address(address)
    return _OF_RANK.sub(r"\1\3\2", name) if " of rank " in name else f"{name} of rank {_rank()}"


def _rank() -> int:
    return knobs.rank.get()


class DeadlockCheck:
    """Notes of this rank, as an observer of accesses and of waits.

    Args:
        judges: whether to raise where nobody is left to set a flag, or only to tell.
        tells: whether somebody may ask where a rank that has no others stands.
    """

    def __init__(self, validators: bool = True, tells: bool = True) -> None:
        self._validators, self._tells = validators, tells
        self._waits: dict[int, dict[str, Any]] = {}  # by thread
        self._from_leader: OrderedDict[str, str] = OrderedDict()
        self._moved = self._judged = time.monotonic()
        self._host: FrameType | None = None
        self._host_since = time.monotonic()
        self._over = threading.Event()

    def start(self) -> Undo:
        """Note, tell and judge, until undone."""
        before, waits.on_look = waits.on_look, self.look
        self._start_to_tell()
        os.register_at_fork(after_in_child=self._start_to_tell)

        def stop() -> None:
            waits.on_look = before
            self._over.set()
            self._teller.join()

        return stop

    def _start_to_tell(self) -> None:
        """A thread ends with a fork, and goes on in the child as another."""
        if not self._over.is_set():
            self._began = time.time()
            self._teller = threading.Thread(
                target=self._tell, name="triton_dist-debug", daemon=True
            )
            self._teller.start()

    def before(self, access: Access) -> None:
        """Note a flag that is set."""
        if access.semantic == "release":
            for address in np.asarray(access.touched()).flat:
                flag = flag_at(int(address))
                self._from_leader[flag] = str(site())
                self._from_leader.move_to_end(flag)
            while len(self._from_leader) > _MOST_TOLD:
                self._from_leader.popitem(last=False)

    def after(self, access: Access, values: Any) -> None:
        """Nothing: it does not matter what a flag was."""

    def look(self, ptr: Any, seen: Any, value: Any, places: int, looks: int, overdue: bool) -> None:
        """Note a look at a flag in vain, after ``looks`` of the same wait; the lowest of a block.

        Raises:
            WaitNeverEnds: nobody is left to set it, or the wait is ``overdue``.
        """
        latest = int(np.argmin((seen - value).handle.data))
        address = int(ptr.handle.data.flat[latest])
        expected, found = int(value) >> places, int(seen.handle.data.flat[latest]) >> places
        thread, now = threading.get_ident(), time.monotonic()  # it runs one program at a time
        wait = self._waits.get(thread)
        # A wait may be for what the last one was for, at the same line: it is another all the same.
        if (
            wait is None
            or looks == 0
            or (wait["address"], wait["seen"]) != (address, found)
            or now - wait["looked"] > _FRESH_SECONDS
        ):
            wait = {"at": str(site()), "flag": flag_at(address), "address": address}
            wait |= {"expected": expected, "seen": found, "looked": now}
            wait["writer"] = rank_status.writer_of(address)
            self._waits[thread], self._moved = wait, now  # whole, for the thread that tells
        wait["looked"] = now
        if overdue or (self._validators and now - self._judged > _TELL_SECONDS):
            self._judged = now
            states = self._states()
            if overdue or _nobody_is_left(states):
                message = _report(wait, states, overdue)
                raise WaitNeverEnds(message, _rank(), wait["flag"], expected, found)

    def _state(self) -> dict[str, Any]:
        now = time.monotonic()
        for thread, wait in list(self._waits.items()):
            if now - wait["looked"] > _FRESH_SECONDS:
                self._waits.pop(thread, None)
                self._moved = now
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not self._host:
            self._host, self._host_since = frame, now
        collective, line = _host_line(frame)
        in_kernel = bool(self._waits)
        return {
            "rank": _rank(),
            "as_of": now,
            "pid": os.getpid(),
            "waits": list(self._waits.values()),
            "told": dict(self._from_leader),
            "host": line,
            "stands_since": self._moved if in_kernel else self._host_since if collective else None,
        }

    def _tell(self) -> None:
        path, answered = None, ""
        while not self._over.wait(_TELL_SECONDS):
            if knobs.world_size.get() > 1 or self._tells:
                with suppress(OSError, RuntimeError):  # or changed meanwhile: the next time
                    folder, state = made_folder(), self._state()
                    path = folder / f"{_rank()}.json"
                    rank_status.write_state(path, state)
                    answered = rank_status.answer_if_asked(folder, answered, state)
        if path is not None:
            with suppress(OSError):
                path.unlink()

    def _states(self) -> dict[int, dict[str, Any] | None]:
        """By rank of the world; ``None``: nothing is known of it."""
        states: dict[int, dict[str, Any] | None] = dict.fromkeys(range(knobs.world_size.get()))
        for rank in states:
            with suppress(OSError, ValueError):
                path = job_folder() / f"{rank}.json"
                if rank != _rank() and path.stat().st_mtime >= self._began - _FRESH_SECONDS:
                    states[rank] = json.loads(path.read_text(encoding="utf-8"))
        return states | {_rank(): self._state()}


def _host_line(frame: FrameType | None) -> tuple[bool, str]:
    """True if a collective is waited for; and the innermost line outside of torch and of us."""
    collective = False
    while frame is not None:
        file = frame.f_code.co_filename
        collective = collective or any(part in file for part in _COLLECTIVES)
        if is_of_program(frame) and not file.startswith(_PACKAGE):
            return collective, f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return collective, "?"


def _is_gone(state: dict[str, Any]) -> bool:
    return not runs(state["pid"])


def _nobody_is_left(states: dict[int, dict[str, Any] | None]) -> bool:
    """True if all have been seen to stand still over the same ``QUIET_SECONDS``: what a rank told
    before another one came to its wait may be over."""
    since: list[float] = []
    until: list[float] = []
    for state in states.values():
        if state is None:
            return False
        if not _is_gone(state):
            if state["stands_since"] is None:
                return False
            since.append(state["stands_since"])
            until.append(state["as_of"])
    return min(until) - max(since) >= QUIET_SECONDS


def _report(wait: dict[str, Any], states: dict[int, dict[str, Any] | None], overdue: bool) -> str:
    why = "after the limit of TRITON_DIST_WAIT_TIMEOUT" if overdue else "nobody is left to set it"
    lines = [f"{wait['at']}: waits for {_awaited(wait)}: {why}. Where the ranks stand:"]
    told = {flag: at for state in states.values() if state for flag, at in state["told"].items()}
    for rank, state in states.items():
        if state is None:
            lines.append(f"  rank {rank}: nothing is known of it; it may be on another host")
        elif _is_gone(state):
            lines.append(f"  rank {rank}: has ended")
        elif not state["waits"]:
            lines.append(f"  rank {rank}: is in no wait of a kernel, but at {state['host']}")
        for each in (state or {}).get("waits", ()):
            teller = told.get(each["flag"])
            last = f"last set by {teller}" if teller else "set by nobody"
            lines.append(f"  {each['at']}: waits for {_awaited(each)}, {last}")
    awaited = {each["flag"] for state in states.values() if state for each in state["waits"]}
    others = [f"  {flag}: set by {at}" for flag, at in told.items() if flag not in awaited]
    return "\n".join(
        lines + ["Flags that were set and that nobody waits for:"] * bool(others) + others
    )


def _awaited(wait: dict[str, Any]) -> str:
    return f"{wait['flag']} to reach {wait['expected']}, it is {wait['seen']}"
