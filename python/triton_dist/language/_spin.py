"""What a wait does between two looks at a flag: on a GPU it counts, in the interpreter it lets
others run. Either gives up when a limit is set and reached."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import triton.language as tl

from triton_dist import knobs
from triton_dist._jit import jit
from triton_dist.errors import InvalidArgument, WaitTimeout
from triton_dist.runtime import interpreter, waits
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.triton_compat import is_interpreting

_TEXT = tl.constexpr(str)
_ARGUMENTS = tl.constexpr(
    "wait(ptr, count, value, guard=None): the int32 value to wait for, and no scope or semantic; a "
    "wait acquires, at system scope"
)
INTERPRETED = tl.constexpr(is_interpreting())


def _deadline_interpreted() -> float:
    return time.monotonic() + waits.interpreted_limit_seconds()


def _spin_interpreted(
    ptr: Any, seen: Any, value: Any, deadline: float, polls: int, guard: Any
) -> int:
    """Give other programs, threads and processes a turn; raise once a flag is overdue."""
    if time.monotonic() > deadline:
        latest = int(np.argmin((seen - value).handle.data))  # of a block
        raise WaitTimeout(
            rank=knobs.rank.get(),
            program=f"program {interpreter.current_program()}",
            flag=describe_address(int(ptr.handle.data.flat[latest])),
            expected=int(value),
            seen=int(seen.handle.data.flat[latest]),
            seconds=waits.interpreted_limit_seconds(),
        )
    interpreter.pause(polls)
    return polls + 1


def _give_turn_interpreted() -> None:
    interpreter.pause()


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
def _spin_compiled(ptr, seen, value, deadline, polls, guard):
    """Count a look at the flag; -1 when this program gives up.

    Every thread of the program must come to the same decision, so it is made from a count and from
    an atomic's result, which are the same for all, and not from a clock.
    """
    if guard is not None:
        most = tl.load(guard)
        polls += 1
        if most > 0:  # noqa: SIM102  # Triton evaluates both sides of `and`
            if (polls >= most) | (tl.atomic_add(guard + 1, 0, sem="relaxed", scope="gpu") != 0):
                tl.atomic_xchg(guard + 1, 1, sem="relaxed", scope="gpu")
                polls = -1
    return polls


wait_deadline = _deadline_interpreted if INTERPRETED.value else _deadline_compiled
give_turn_to_others = _give_turn_interpreted if INTERPRETED.value else _give_turn_compiled
refuse_text = _refuse_text_interpreted if INTERPRETED.value else _refuse_text_compiled
spin = _spin_interpreted if INTERPRETED.value else _spin_compiled
