"""Work of a wait between two looks at a flag: on a GPU it counts, in the interpreter it lets
others run. Either gives up when a limit is set and reached."""

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

_TEXT = tl.constexpr(str)
_ARGUMENTS = tl.constexpr(
    "wait(ptr, count, value, guard=None): the int32 value to wait for, and no scope or semantic; a "
    "wait acquires, at system scope"
)
INTERPRETED = tl.constexpr(is_interpreting())
SIZE_BITS = 20
_LOOKS = tl.constexpr(64)
_MOST_COUNTED = tl.constexpr(1 << 30)


def _deadline_interpreted() -> float:
    return time.monotonic() + waits.interpreted_limit_seconds()


def _spin_interpreted(
    ptr: Any, seen: Any, value: Any, deadline: float, polls: int, timeout_words: Any, sized: Any
) -> int:
    """Give other programs, threads and processes a turn; -1 once a wait with this guard has noted
    a disagreement. Raise once a flag is overdue."""
    if timeout_words is not None and _gave_up(timeout_words):
        return -1
    debugger.stop_if_asked()
    overdue = deadlines.is_overdue(deadline, waits.interpreted_limit_seconds())
    if waits.on_look is not None:
        waits.on_look(ptr, seen, value, SIZE_BITS if sized else 0, polls, overdue)
    if overdue:
        latest = int(np.argmin((seen - value).handle.data))  # of a block
        places = SIZE_BITS if sized else 0
        raise WaitTimeout(
            rank=knobs.rank.get(),
            program=f"program {current_program()}",
            flag=describe_address(int(ptr.handle.data.flat[latest])),
            expected=int(value) >> places,
            seen=int(seen.handle.data.flat[latest]) >> places,
            seconds=waits.interpreted_limit_seconds(),
        )
    watched = waits.on_look is not None or debugger.is_active()
    unchanged = None if watched else _unchanged(ptr, seen, value, deadline, timeout_words)
    pause(polls, unchanged)
    return polls + 1


def _unchanged(
    ptr: Any, seen: Any, value: Any, deadline: float, timeout_words: Any
) -> Callable[[], bool] | None:
    """A test of whether a wait would find what it has ``seen``, on the words themselves: a look
    takes the interpreter a hundred times as long. ``None`` where they are something else already,
    or where a part of them is the flag."""
    word = _word(ptr)
    values = seen.handle.data.ravel()
    late = values != int(value)  # so never what a mask leaves out
    addresses = np.broadcast_to(ptr.handle.data.ravel(), late.shape)[late].tolist()
    words = [word.from_address(address) for address in addresses]
    before: list[int] = values[late].tolist()

    def holds() -> bool:
        if time.monotonic() >= deadline or (timeout_words is not None and _gave_up(timeout_words)):
            return False
        return _values(words) == before

    return holds if _values(words) == before else None


def _values(words: list[Any]) -> list[int]:
    return [word.value for word in words]


def _word(ptr: Any) -> type[ctypes.c_int64] | type[ctypes.c_int32]:
    return ctypes.c_int64 if ptr.dtype.element_ty.primitive_bitwidth == 64 else ctypes.c_int32


def _gave_up(timeout_words: Any) -> bool:
    """True once the second word of a guard is set."""
    word = _word(timeout_words)
    address = int(timeout_words.handle.data.flat[0]) + ctypes.sizeof(word)
    return bool(word.from_address(address).value)


def _give_turn_interpreted() -> None:
    pause()


def _refuse_text_interpreted(value: Any) -> None:
    if isinstance(getattr(value, "value", value), str):
        raise InvalidArgument("wait", "an argument", value, _ARGUMENTS.value)


@jit
def _refuse_text_compiled(value):
    tl.static_assert(not isinstance(value, _TEXT), _ARGUMENTS)


@jit
def _give_turn_compiled():
    pass


@jit
def _deadline_compiled():
    return 0


@jit
def _spin_compiled(ptr, seen, value, deadline, polls, timeout_words, SIZED: tl.constexpr):
    """Count a look at the flag; -1 when this program gives up.

    Every thread of the program must come to the same decision, so it is made from a count and from
    an atomic's result, which are the same for all, and not from a clock.

    Without a limit, only every 64th look is also one at what other programs have noted, since it
    takes as long as the one at the flag.
    """
    if timeout_words is not None:
        most = tl.load(timeout_words)
        polls += 1
        gave_up = False
        if (most > 0) | (polls % _LOOKS == 1):
            gave_up = tl.atomic_add(timeout_words + 1, 0, sem="relaxed", scope="gpu") != 0
        if most > 0:
            if (polls >= most) & (gave_up == 0):
                tl.atomic_max(timeout_words + 1, 1, sem="relaxed", scope="gpu")
                gave_up = True
        else:
            polls = polls % _MOST_COUNTED
        if gave_up:
            polls = -1
    return polls


wait_deadline = _deadline_interpreted if INTERPRETED.value else _deadline_compiled
give_turn_to_others = _give_turn_interpreted if INTERPRETED.value else _give_turn_compiled
refuse_text = _refuse_text_interpreted if INTERPRETED.value else _refuse_text_compiled
spin = _spin_interpreted if INTERPRETED.value else _spin_compiled
