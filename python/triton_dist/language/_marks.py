"""Marks: records of when a program runs a part of its kernel, for timelines."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from triton_dist._jit import jit
from triton_dist.errors import InvalidArgument
from triton_dist.language._spin import INTERPRETED
from triton_dist.runtime import marking
from triton_dist.runtime.interpreter_program import current_program_number

# One thread of every 4 warps writes the mark; $1 is the begin time. The braces scope the register
# names. Values are written as early as possible, because a producer warp has only 24 registers.
_MARK_PTX = """{{
.reg .pred is_writer;
.reg .b32 thread, lane, program, size;
.reg .b64 now, record;
mov.u64 now, %globaltimer;
mov.u32 thread, %tid.x;
and.b32 lane, thread, 127;
setp.eq.u32 is_writer, lane, 0;
mov.u64 record, {address};
@is_writer atom.global.add.u64 record, [record], 1;
setp.lt.and.u64 is_writer, record, {max_marks}, is_writer;
mad.lo.u64 record, record, {nbytes}, {address};
@is_writer st.global.u64 [record+{begin}], $1;
@is_writer st.global.u64 [record+{end}], {second};
mov.u32 program, %ctaid.z;
mov.u32 size, %nctaid.y;
mul.lo.u32 program, program, size;
mov.u32 size, %ctaid.y;
add.u32 program, program, size;
mov.u32 size, %nctaid.x;
mul.lo.u32 program, program, size;
mov.u32 size, %ctaid.x;
add.u32 program, program, size;
shr.u32 thread, thread, 7;
shl.b32 thread, thread, 8;
or.b32 thread, thread, {name};
@is_writer st.global.v2.u32 [record+{last}], {{thread, program}};
{more}mov.u32 $0, 0;
}}"""
_WORD_BYTES = 8


def _mark_index(name: Any) -> int:
    name = getattr(name, "value", name)  # unwrap a constexpr
    if name not in marking.MARK_NAMES:
        expected = f"one of {', '.join(map(repr, marking.MARK_NAMES))}"
        raise InvalidArgument("mark", "name", name, expected)
    return marking.MARK_NAMES.index(name)


class _CompiledMark:
    """Context manager that Triton compiles to the write of a mark, or to nothing."""

    __triton_builtin__ = True

    def __init__(self, name: Any, pipelined: Any = False, *, _semantic: Any) -> None:
        self._name_index, self._semantic = _mark_index(name), _semantic
        self._marks = None if getattr(pipelined, "value", pipelined) else marking.current()

    def __enter__(self) -> None:
        if self._marks is not None:
            self._begin_time = globaltimer(_semantic=self._semantic)

    def __exit__(self, *_: object) -> None:
        if self._marks is not None:
            _write(self._marks, self._name_index, [self._begin_time], self._semantic)


def _write(marks: marking.Marks, event: int, operands: list[Any], semantic: Any) -> None:
    """Emit the PTX that records a mark or the use of a flag.

    Args:
        event: index of the mark's name, or ``FLAG_SET`` or ``FLAG_AWAITED``.
        operands: [begin time] for a mark; [time, address, value] for a flag.
    """
    first, is_flag = marking.HEADER_WORDS * _WORD_BYTES, len(operands) > 1
    text = _MARK_PTX.format(
        address=marks.address,
        max_marks=marking.MAX_MARKS,
        nbytes=marking.WORDS_PER_MARK * _WORD_BYTES,
        name=event,
        begin=first,
        end=first + _WORD_BYTES,
        last=first + 2 * _WORD_BYTES,
        second="$2" if is_flag else "now",
        more=f"@is_writer st.global.u64 [record+{first + 3 * _WORD_BYTES}], $3;\n"
        if is_flag
        else "",
    )
    tl.inline_asm_elementwise(
        text, "=r" + ",l" * len(operands), operands, dtype=tl.int32, is_pure=False, pack=1,
        _semantic=semantic,
    )  # fmt: skip


class _InterpretedMark:
    def __init__(self, name: Any, pipelined: Any = False) -> None:
        self._name_index = _mark_index(name)

    def __enter__(self) -> None:
        self._marks = marking.current()
        if self._marks is not None:
            self._begin_time = time.time_ns()

    def __exit__(self, *_: object) -> None:
        if self._marks is not None:
            name, program = marking.MARK_NAMES[self._name_index], current_program_number()
            self._marks.add(marking.Mark(name, program, 0, self._begin_time, time.time_ns()))


@tl.core.builtin
def _compiled_clock(_semantic: Any = None) -> Any:
    return tl.constexpr(None) if marking.current() is None else globaltimer(_semantic=_semantic)


def _interpreted_clock() -> int | None:
    return None if marking.current() is None else time.time_ns()


@tl.core.builtin
def _write_flag(
    EVENT: Any, event_time: Any, address: Any, value: Any, _semantic: Any = None
) -> None:
    value = _semantic.cast(_semantic.to_tensor(value), tl.int64)
    marks = marking.current()
    assert marks is not None  # a clock reading exists only if marks are made
    _write(marks, EVENT.value, [event_time, address, value], _semantic)


@jit
def _note_compiled_flags(EVENT: tl.constexpr, event_time, ptr, value, mask):
    if event_time is not None:
        addresses = ptr.to(tl.int64)
        if ptr.type.is_block():
            lanes = tl.arange(0, ptr.shape[0])
            valid = lanes >= 0 if mask is None else mask
            for lane in tl.static_range(ptr.shape[0]):
                chosen = valid & (lanes == lane)
                address = tl.sum(tl.where(chosen, addresses, 0))
                _write_flag(EVENT, event_time, address, tl.sum(tl.where(chosen, value, 0)))
        else:
            _write_flag(EVENT, event_time, addresses, value)


def _note_interpreted_flags(event: Any, event_time: Any, ptr: Any, value: Any, mask: Any) -> None:
    marks = marking.current()
    if marks is None or event_time is None:
        return
    is_set, program = getattr(event, "value", event) == marking.FLAG_SET, current_program_number()
    arrays = (getattr(getattr(each, "handle", each), "data", each) for each in (value, mask))
    valid = [True if each is None else each for each in arrays]
    for address, number, chosen in np.nditer([ptr.handle.data, *valid]):
        if chosen:
            marks.add(
                marking.FlagEvent(is_set, program, 0, int(event_time), int(address), int(number))
            )


FLAG_AWAITED, FLAG_SET = tl.constexpr(marking.FLAG_AWAITED), tl.constexpr(marking.FLAG_SET)
flag_clock = _interpreted_clock if INTERPRETED.value else _compiled_clock
"""Return the time on the clock of marks, or ``None`` if no timeline requests marks."""
note_flags = _note_interpreted_flags if INTERPRETED.value else _note_compiled_flags
"""Record that flags are set or were awaited: ``note_flags(EVENT, event_time, ptr, value, mask)``.

Timelines draw an arrow from the program that sets a flag to the program that waits for it.
``event_time`` is a result of ``flag_clock``, which must be called within a mark. If ``event_time``
is ``None``, nothing is compiled. ``ptr`` is a pointer or a block of pointers. ``mask`` selects
pointers of the block; ``None`` selects all. ``value`` is the new value of the flag, or the awaited
value.
"""


class MarkType(Protocol):
    """Type of ``mark``: Triton passes ``_semantic``, kernels do not."""

    def __call__(self, name: Any, pipelined: Any = False) -> AbstractContextManager[None]: ...


mark: MarkType = _InterpretedMark if INTERPRETED.value else _CompiledMark  # type: ignore[assignment]
"""``with mark(name, pipelined=False)``: record the time of the block on timelines.

``name`` is "wait", "load", "mma", "store", "push" (store to peers) or "notify" (set a flag). If no
timeline requests marks, the compiled kernel is bit-identical to a kernel without marks.
``pipelined``: the block is inside a loop that the compiler pipelines. A compiled mark would prevent
the pipelining, so only the interpreter records this block.
"""


@jit
def kernel_read_clock(out_ptr):
    """Store the GPU's global timer, which is the clock of marks. Grid (1,)."""
    tl.store(out_ptr, globaltimer())


class ClockReading:
    """A reading of the clock of marks.

    In the interpreter, the clock is read on creation. On a GPU, a kernel on the current stream
    reads the clock.
    """

    def __init__(self) -> None:
        if INTERPRETED.value:
            self._interpreted = time.time_ns()
        else:
            self._word = torch.empty(1, dtype=torch.int64, device="cuda")
            kernel_read_clock[(1,)](self._word)

    def nanoseconds(self) -> int:
        return self._interpreted if INTERPRETED.value else int(self._word)
