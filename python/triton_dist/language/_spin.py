"""Code that a wait loop runs between two polls of a flag.

On a GPU this code counts polls. In the interpreter it lets other programs, threads and processes
run. If the wait has a limit, this code ends the wait when the limit is reached.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from triton_dist import knobs
from triton_dist._jit import jit
from triton_dist.debugging import debugger
from triton_dist.errors import InvalidArgument, WaitTimeout
from triton_dist.runtime import deadlines, waits
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.cooperative_grid import pause
from triton_dist.runtime.interpreter_program import current_program
from triton_dist.runtime.triton_compat import is_interpreting

_STR_TYPE = tl.constexpr(str)
_STR_MESSAGE = tl.constexpr(
    "wait(ptr, count, value, timeout_words=None): value is the int32 to wait for. There are no "
    "scope and semantic arguments: a wait acquires at system scope"
)
INTERPRETED = tl.constexpr(is_interpreting())
CALL_TAG_BITS = 20  # a tagged flag holds the call tag in its lowest 20 bits, and a count above
_POLLS_PER_CHECK = tl.constexpr(64)  # polls between two checks whether another thread gave up
_MAX_POLL_COUNT = tl.constexpr(1 << 30)


def _deadline_interpreted() -> float:
    return time.monotonic() + waits.interpreted_limit_seconds()


def _spin_interpreted(
    ptr: Any, seen: Any, value: Any, deadline: float, polls: int, timeout_words: Any, tagged: Any
) -> int:
    """Yield to other programs, threads and processes; return the number of polls so far.

    Return -1 if the second timeout word is set: another wait has found that ranks disagree. Raise
    ``WaitTimeout`` after the time limit.
    """
    if timeout_words is not None and _has_given_up(timeout_words):
        return -1
    debugger.stop_if_requested()
    overdue = deadlines.is_overdue(deadline, waits.interpreted_limit_seconds())
    if waits.on_poll is not None:
        waits.on_poll(ptr, seen, value, CALL_TAG_BITS if tagged else 0, polls, overdue)
    if overdue:
        latest_index = int(np.argmin((seen - value).handle.data))  # index in a block of flags
        tag_bits = CALL_TAG_BITS if tagged else 0
        raise WaitTimeout(
            rank=knobs.rank.get(),
            program=f"program {current_program()}",
            flag=describe_address(int(ptr.handle.data.flat[latest_index])),
            expected=int(value) >> tag_bits,
            seen=int(seen.handle.data.flat[latest_index]) >> tag_bits,
            seconds=waits.interpreted_limit_seconds(),
        )
    watched = waits.on_poll is not None or debugger.is_active()
    unchanged = None if watched else _unchanged_test(ptr, seen, value, deadline, timeout_words)
    pause(polls, unchanged)
    return polls + 1


def _unchanged_test(
    ptr: Any, seen: Any, value: Any, deadline: float, timeout_words: Any
) -> Callable[[], bool] | None:
    """Return a cheap function that tests whether the late flags still have the values in ``seen``.

    The test reads the memory directly; a poll through the interpreter takes 100 times as long.
    Return ``None`` if the words in memory differ from ``seen``: a flag has changed, or ``seen`` has
    only some bits of each word.
    """
    word = _word_type(ptr)
    values = seen.handle.data.ravel()
    late = values != int(value)  # excludes masked elements, which equal ``value``
    addresses = np.broadcast_to(ptr.handle.data.ravel(), late.shape)[late].tolist()
    words = [word.from_address(address) for address in addresses]
    seen_values: list[int] = values[late].tolist()

    def is_unchanged() -> bool:
        if time.monotonic() >= deadline or (
            timeout_words is not None and _has_given_up(timeout_words)
        ):
            return False
        return _values(words) == seen_values

    return is_unchanged if _values(words) == seen_values else None


def _values(words: list[Any]) -> list[int]:
    return [word.value for word in words]


def _word_type(ptr: Any) -> type[ctypes.c_int64] | type[ctypes.c_int32]:
    return ctypes.c_int64 if ptr.dtype.element_ty.primitive_bitwidth == 64 else ctypes.c_int32


def _has_given_up(timeout_words: Any) -> bool:
    """Return whether the second timeout word is set: a wait with these words has ended early."""
    word = _word_type(timeout_words)
    address = int(timeout_words.handle.data.flat[0]) + ctypes.sizeof(word)
    return bool(word.from_address(address).value)


def _yield_interpreted() -> None:
    pause()


def _reject_str_interpreted(value: Any) -> None:
    if isinstance(getattr(value, "value", value), str):
        raise InvalidArgument("wait", "an argument", value, _STR_MESSAGE.value)


@jit
def _reject_str_compiled(value):
    tl.static_assert(not isinstance(value, _STR_TYPE), _STR_MESSAGE)


@jit
def _yield_compiled():
    pass


@jit
def _deadline_compiled():
    return 0


@jit
def _spin_compiled(ptr, seen, value, deadline, polls, timeout_words, TAGGED: tl.constexpr):
    """Count a poll of the flag; return -1 when this program must stop waiting.

    All threads of the program must make the same decision. It therefore depends on a count and on
    the result of an atomic, which are equal in all threads, and not on a clock.

    If the wait has no limit, check the timeout words only at every 64th poll, because the check
    takes as long as a poll.
    """
    if timeout_words is not None:
        max_polls = tl.load(timeout_words)
        polls += 1
        gave_up = False
        if (max_polls > 0) | (polls % _POLLS_PER_CHECK == 1):
            gave_up = tl.atomic_add(timeout_words + 1, 0, sem="relaxed", scope="gpu") != 0
        if max_polls > 0:
            if (polls >= max_polls) & (gave_up == 0):
                tl.atomic_max(timeout_words + 1, 1, sem="relaxed", scope="gpu")
                gave_up = True
        else:
            polls = polls % _MAX_POLL_COUNT
        if gave_up:
            polls = -1
    return polls


wait_deadline = _deadline_interpreted if INTERPRETED.value else _deadline_compiled
yield_to_other_programs = _yield_interpreted if INTERPRETED.value else _yield_compiled
reject_str = _reject_str_interpreted if INTERPRETED.value else _reject_str_compiled
spin = _spin_interpreted if INTERPRETED.value else _spin_compiled
