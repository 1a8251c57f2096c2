"""What a wait does between two looks at a flag: nothing on a GPU; in the interpreter it lets others
run."""

from __future__ import annotations

import time
from typing import Any

import triton.language as tl

from triton_dist import knobs
from triton_dist._jit import jit
from triton_dist.errors import WaitTimeout
from triton_dist.runtime import interpreter
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.triton_compat import is_interpreting

INTERPRETED = tl.constexpr(is_interpreting())


def _deadline_interpreted() -> float:
    return time.monotonic() + knobs.wait_timeout.get()


def _spin_interpreted(ptr: Any, seen: Any, value: Any, deadline: float) -> None:
    """Give other programs, threads and processes a turn; raise once the flag is overdue."""
    if time.monotonic() > deadline:
        raise WaitTimeout(
            rank=knobs.rank.get(),
            program=f"program {interpreter.current_program()}",
            flag=describe_address(int(ptr.handle.data.item())),
            expected=int(value),
            seen=int(seen),
            seconds=knobs.wait_timeout.get(),
        )
    interpreter.pause()


@jit
def _deadline_compiled():
    return 0


@jit
def _spin_compiled(ptr, seen, value, deadline):
    pass


wait_deadline = _deadline_interpreted if INTERPRETED.value else _deadline_compiled
spin = _spin_interpreted if INTERPRETED.value else _spin_compiled
