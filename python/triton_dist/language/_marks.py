"""Marks of the time that parts of a kernel take."""

from __future__ import annotations

import time
from typing import Any

import torch
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from triton_dist._jit import jit
from triton_dist.errors import InvalidArgument
from triton_dist.language._spin import INTERPRETED
from triton_dist.runtime import marking
from triton_dist.runtime.interpreter_program import current_program_number

# One thread of each four warps writes; $1: when it began. Named registers end with the braces. What
# is not needed any more is written first: a producer warp has 24 registers.
_WRITE = """{{
.reg .pred one;
.reg .b32 thread, place, size;
.reg .b64 now, at;
mov.u64 now, %globaltimer;
mov.u32 thread, %tid.x;
and.b32 place, thread, 127;
setp.eq.u32 one, place, 0;
mov.u64 at, {address};
@one atom.global.add.u64 at, [at], 1;
setp.lt.and.u64 one, at, {most}, one;
mad.lo.u64 at, at, {nbytes}, {address};
@one st.global.u64 [at+{begin}], $1;
@one st.global.u64 [at+{end}], now;
mov.u32 place, %ctaid.z;
mov.u32 size, %nctaid.y;
mul.lo.u32 place, place, size;
mov.u32 size, %ctaid.y;
add.u32 place, place, size;
mov.u32 size, %nctaid.x;
mul.lo.u32 place, place, size;
mov.u32 size, %ctaid.x;
add.u32 place, place, size;
shr.u32 thread, thread, 7;
shl.b32 thread, thread, 8;
or.b32 thread, thread, {name};
@one st.global.v2.u32 [at+{last}], {{thread, place}};
mov.u32 $0, 0;
}}"""
_WORD = 8


def _number_of(name: Any) -> int:
    name = getattr(name, "value", name)  # of a constexpr
    if name not in marking.NAMES:
        expected = f"one of {', '.join(map(repr, marking.NAMES))}"
        raise InvalidArgument("mark", "name", name, expected)
    return marking.NAMES.index(name)


class _CompiledMark:
    """A ``with`` that Triton compiles: to nothing, unless marks are on as it does."""

    __triton_builtin__ = True

    def __init__(self, name: Any, pipelined: Any = False, *, _semantic: Any) -> None:
        self._number, self._semantic = _number_of(name), _semantic
        marks = marking.current()
        self._marks = None if getattr(pipelined, "value", pipelined) else marks

    def __enter__(self) -> None:
        if self._marks is not None:
            self._began = globaltimer(_semantic=self._semantic)

    def __exit__(self, *_: object) -> None:
        if self._marks is not None:
            first = marking.HEAD * _WORD
            text = _WRITE.format(
                address=self._marks.address,
                most=marking.MOST,
                nbytes=marking.WORDS * _WORD,
                name=self._number,
                begin=first,
                end=first + _WORD,
                last=first + 2 * _WORD,
            )
            tl.inline_asm_elementwise(
                text, "=r,l", [self._began], dtype=tl.int32, is_pure=False, pack=1,
                _semantic=self._semantic,
            )  # fmt: skip


class _InterpretedMark:
    def __init__(self, name: Any, pipelined: Any = False) -> None:
        self._number = _number_of(name)

    def __enter__(self) -> None:
        self._marks = marking.current()
        if self._marks is not None:
            self._began = time.time_ns()

    def __exit__(self, *_: object) -> None:
        if self._marks is not None:
            name, program = (
                marking.NAMES[self._number],
                current_program_number(),
            )
            self._marks.add(marking.Mark(name, program, 0, self._began, time.time_ns()))


mark: Any = _InterpretedMark if INTERPRETED.value else _CompiledMark
"""``with mark(name, pipelined=False)``: what a program does within is ``name``, one of "wait",
"load", "mma", "store" and "push" (to peers); on the timelines that ask for marks, and otherwise
nothing: the kernel is the same bit by bit. ``pipelined``: within a loop that the compiler
pipelines, which a mark would end: for the interpreter alone."""


@jit
def kernel_read_clock(out_ptr):
    """Write the clock of marks. Grid (1,)."""
    tl.store(out_ptr, globaltimer())


class Reading:
    """The clock of marks as it was when this was made, or when the device came to it."""

    def __init__(self) -> None:
        if INTERPRETED.value:
            self._interpreted = time.time_ns()
        else:
            self._word = torch.empty(1, dtype=torch.int64, device="cuda")
            kernel_read_clock[(1,)](self._word)

    def nanoseconds(self) -> int:
        return self._interpreted if INTERPRETED.value else int(self._word)
