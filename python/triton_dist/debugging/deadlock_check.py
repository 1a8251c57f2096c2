"""Detect deadlocks of interpreted kernels, and publish the status of each rank.

Every 0.25 s each rank writes its status to a file: the flags that its programs wait for, the flags
that they have set, and the current line of its main thread. A deadlock exists if every rank waits
in kernels, waits in a collective, or has ended, and nothing has changed for ``QUIET_SECONDS``.
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
from triton_dist.debugging.accesses import Access, Observer, Undo
from triton_dist.debugging.faults import WaitNeverEnds
from triton_dist.debugging.kernel_location import current_location, is_user_code
from triton_dist.runtime import waits
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.job import create_job_folder, is_running, job_folder

QUIET_SECONDS = 2.0  # Ranks that wait for each other this long without a change are deadlocked.
_PUBLISH_SECONDS = 0.25  # interval at which a rank writes its waits for the other ranks
_WAIT_EXPIRY_SECONDS = 0.5
"""A wait that was not polled for this time has ended. Waiting programs poll every few ms."""
_MAX_SET_FLAGS = 64  # latest flags that this rank has set and reports
_COLLECTIVE_FOLDERS = (
    f"{os.sep}torch{os.sep}distributed{os.sep}",
    f"{os.sep}runtime{os.sep}ranks{os.sep}",
)
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
_REGION_OF_RANK = re.compile(r"(.*)( of rank \d+)(\[.*\])")


def flag_name(address: int) -> str:
    """Return ``name[index] of rank r`` for a flag in the memory of rank r; equal on all ranks."""
    name = describe_address(address)
    return (
        _REGION_OF_RANK.sub(r"\1\3\2", name) if " of rank " in name else f"{name} of rank {_rank()}"
    )


def _rank() -> int:
    return knobs.rank.get()


class DeadlockCheck(Observer):
    """Record the status of this rank from memory accesses and waits, and detect deadlocks.

    Args:
        raises: raise ``WaitNeverEnds`` in a deadlock; otherwise only publish the status.
        publishes: publish the status even if there is only one rank.
    """

    def __init__(self, raises: bool = True, publishes: bool = True) -> None:
        self._raises, self._publishes = raises, publishes
        self._waits: dict[int, dict[str, Any]] = {}  # by thread
        self._set_flags: OrderedDict[str, str] = OrderedDict()
        self._last_change = self._last_check = time.monotonic()
        self._host_frame: FrameType | None = None
        self._host_since = time.monotonic()
        self._stopped = threading.Event()

    def start(self) -> Undo:
        """Start to record, publish and check. Return a function that stops this."""
        previous_hook, waits.on_poll = waits.on_poll, self.record_poll
        self._start_publisher()
        os.register_at_fork(after_in_child=self._start_publisher)

        def stop() -> None:
            waits.on_poll = previous_hook
            self._stopped.set()
            self._publisher.join()

        return stop

    def _start_publisher(self) -> None:
        if not self._stopped.is_set():
            self._began = time.time()
            self._publisher = threading.Thread(
                target=self._publish, name="triton_dist-debug", daemon=True
            )
            self._publisher.start()

    def before(self, access: Access) -> None:
        """Record the flags that ``access`` sets."""
        if access.semantic == "release":
            for address in np.asarray(access.accessed_addresses()).flat:
                flag = flag_name(int(address))
                self._set_flags[flag] = str(current_location())
                self._set_flags.move_to_end(flag)
            while len(self._set_flags) > _MAX_SET_FLAGS:
                self._set_flags.popitem(last=False)

    def record_poll(
        self, ptr: Any, seen: Any, value: Any, tag_bits: int, polls: int, is_overdue: bool
    ) -> None:
        """Record an unsuccessful poll of a flag. See ``waits.on_poll`` for the arguments.

        If the wait is for a block of flags, record the flag that is farthest behind its value.

        Raises:
            WaitNeverEnds: no rank can set the flag any more, or the wait is overdue.
        """
        farthest_behind = int(np.argmin((seen - value).handle.data))
        address = int(ptr.handle.data.flat[farthest_behind])
        expected = int(value) >> tag_bits
        found = int(seen.handle.data.flat[farthest_behind]) >> tag_bits
        thread, now = threading.get_ident(), time.monotonic()  # a thread runs one program at a time
        wait = self._waits.get(thread)
        if (
            # ``polls == 0``: a new wait, perhaps at the line of the previous wait.
            wait is None
            or polls == 0
            or (wait["address"], wait["seen"]) != (address, found)
            or now - wait["polled_at"] > _WAIT_EXPIRY_SECONDS
        ):
            wait = {"at": str(current_location()), "flag": flag_name(address), "address": address}
            wait |= {"expected": expected, "seen": found, "polled_at": now}
            wait["writer"] = rank_status.writer_of(address)
            # Replaced as a whole, because the publishing thread reads it concurrently.
            self._waits[thread], self._last_change = wait, now
        wait["polled_at"] = now
        if is_overdue or (self._raises and now - self._last_check > _PUBLISH_SECONDS):
            self._last_check = now
            states = self._states()
            if is_overdue or _is_deadlocked(states):
                message = _report(wait, states, is_overdue)
                raise WaitNeverEnds(message, _rank(), wait["flag"], expected, found)

    def _state(self) -> dict[str, Any]:
        now = time.monotonic()
        for thread, wait in list(self._waits.items()):
            if now - wait["polled_at"] > _WAIT_EXPIRY_SECONDS:
                self._waits.pop(thread, None)
                self._last_change = now
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not self._host_frame:
            self._host_frame, self._host_since = frame, now
        in_collective, line = _host_line(frame)
        in_kernel = bool(self._waits)
        return {
            "rank": _rank(),
            "as_of": now,
            "pid": os.getpid(),
            "waits": list(self._waits.values()),
            "set_flags": dict(self._set_flags),
            "host": line,
            "unchanged_since": self._last_change
            if in_kernel
            else self._host_since
            if in_collective
            else None,
        }

    def _publish(self) -> None:
        path, answered = None, ""
        while not self._stopped.wait(_PUBLISH_SECONDS):
            if knobs.world_size.get() > 1 or self._publishes:
                with suppress(OSError, RuntimeError):  # changed concurrently: publish next time
                    folder, state = create_job_folder(), self._state()
                    path = folder / f"{_rank()}.json"
                    rank_status.write_state(path, state)
                    answered = rank_status.answer_request(folder, answered, state)
        if path is not None:
            with suppress(OSError):
                path.unlink()

    def _states(self) -> dict[int, dict[str, Any] | None]:
        """Return the status of each rank by its global rank; ``None``: unknown."""
        states: dict[int, dict[str, Any] | None] = dict.fromkeys(range(knobs.world_size.get()))
        for rank in states:
            with suppress(OSError, ValueError):
                path = job_folder() / f"{rank}.json"
                if rank != _rank() and path.stat().st_mtime >= self._began - _WAIT_EXPIRY_SECONDS:
                    states[rank] = json.loads(path.read_text(encoding="utf-8"))
        return states | {_rank(): self._state()}


def _host_line(frame: FrameType | None) -> tuple[bool, str]:
    """Return whether ``frame`` is in a collective, and its innermost line of user code."""
    in_collective = False
    while frame is not None:
        file = frame.f_code.co_filename
        in_collective = in_collective or any(part in file for part in _COLLECTIVE_FOLDERS)
        if is_user_code(frame) and not file.startswith(_PACKAGE_FOLDER):
            return in_collective, f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return in_collective, "?"


def _is_deadlocked(states: dict[int, dict[str, Any] | None]) -> bool:
    """Return whether all ranks were blocked during a common period of ``QUIET_SECONDS``. A rank's
    last published status may be old, so it is not sufficient that each status is blocked."""
    since: list[float] = []
    until: list[float] = []
    for state in states.values():
        if state is None:
            return False
        if is_running(state["pid"]):
            if state["unchanged_since"] is None:
                return False
            since.append(state["unchanged_since"])
            until.append(state["as_of"])
    return min(until) - max(since) >= QUIET_SECONDS


def _report(
    wait: dict[str, Any], states: dict[int, dict[str, Any] | None], is_overdue: bool
) -> str:
    reason = "TRITON_DIST_WAIT_TIMEOUT has expired" if is_overdue else "no rank can set it any more"
    lines = [
        f"{wait['at']}: waits for {rank_status.describe_wait(wait)}: {reason}. Status of the ranks:"
    ]
    set_at = {
        flag: location
        for state in states.values()
        if state
        for flag, location in state["set_flags"].items()
    }
    for rank, state in states.items():
        if state is None:
            lines.append(f"  rank {rank}: status unknown; the rank may be on another host")
        elif not is_running(state["pid"]):
            lines.append(f"  rank {rank}: has ended")
        elif not state["waits"]:
            lines.append(f"  rank {rank}: is not waiting in a kernel, but is at {state['host']}")
        for each in (state or {}).get("waits", ()):
            setter = set_at.get(each["flag"])
            last = f"last set by {setter}" if setter else "never set"
            lines.append(f"  {each['at']}: waits for {rank_status.describe_wait(each)}, {last}")
    awaited = {each["flag"] for state in states.values() if state for each in state["waits"]}
    unawaited = [
        f"  {flag}: set by {location}" for flag, location in set_at.items() if flag not in awaited
    ]
    if unawaited:
        lines += ["Flags that were set but are not awaited:", *unawaited]
    return "\n".join(lines)
