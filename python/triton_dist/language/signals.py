"""Flags in symmetric memory: one rank sets a flag, another rank waits for it inside its kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import triton.language as tl
from triton.language import target_info

from triton_dist._jit import jit
from triton_dist.language import _spin
from triton_dist.language._checked import only_rows_of
from triton_dist.language._marks import FLAG_AWAITED, FLAG_SET, flag_clock, mark, note_flags
from triton_dist.language._spin import (
    INTERPRETED,
    give_turn_to_others,
    reject_str,
    spin,
    wait_deadline,
)

if TYPE_CHECKING:
    constexpr: TypeAlias = tl.constexpr | str | bool  # kernels pass literals too
else:
    constexpr = tl.constexpr

SET = tl.constexpr("set")  # Triton 3.6 to 3.9 reject a plain str as default of a constexpr argument
# The lowest 20 bits of a sized flag are the lowest bits of the caller's size.
SIZE_BITS = tl.constexpr(_spin.SIZE_BITS)
_SIZE = tl.constexpr(2**20 - 1)
# Result of comparing a flag with the awaited value; of several flags, the minimum.
_DIFFERS, _LATE, _REACHED = tl.constexpr(-2), tl.constexpr(-1), tl.constexpr(0)
# Indices of the timeout words after the first two.
_SEEN, _AWAITED, _FLAG, _REPORT, _NEXT = (
    tl.constexpr(2), tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6),
)  # fmt: skip
DISAGREED = tl.constexpr(2)
"""Value of the second timeout word if a flag has a different size."""


@jit
def symm_at(ptr, table, peer):
    """Return the address of a region in ``peer``'s memory.

    Args:
        ptr: local start of the region; gives the element type.
        table: int64 [world size], ``pointers`` of the region.
        peer: rank in the group.

    Returns:
        Pointer of ``ptr``'s type.
    """
    return tl.load(table + peer).to(ptr.dtype)


@jit
def notify(ptr, value, op: constexpr = SET, mask=None):
    """Set the int32 flag at ``ptr`` to ``value`` (``op="set"``), or add ``value`` (``op="add"``).

    This is a release at system scope: a program that observes the flag with ``wait`` also observes
    all earlier stores of this program, on any GPU of the host. TMA stores need ``publish_tile``
    before the call.

    ``ptr`` may be a block of pointers, selected by ``mask``. Notifying several peers then costs as
    much as notifying one peer, because the release dominates the time.
    """
    tl.debug_barrier()  # one thread releases; the barrier orders all threads' stores before it
    with mark("notify"):
        at = flag_clock()
        if op == "set":
            tl.atomic_xchg(ptr, value, mask=mask, sem="release", scope="sys")
            note_flags(FLAG_SET, at, ptr, value, mask)
        else:
            tl.static_assert(op == "add", "notify: op is 'set' or 'add'")
            before = tl.atomic_add(ptr, value, mask=mask, sem="release", scope="sys")
            note_flags(FLAG_SET, at, ptr, before + value, mask)


@jit
def sized(count, size):
    """Return the int64 value of a flag that also carries the size of the caller's work.

    ``count`` is in the upper bits. ``size`` (int32, >= 0) modulo 2**20 is in the lowest 20 bits.
    """
    return (count.to(tl.int64) << SIZE_BITS) | (size & _SIZE)


@jit
def _status(seen, value, SIZED: tl.constexpr):
    if SIZED:
        late = ((seen | _SIZE) - value) < 0
        differs = ((seen ^ value) & _SIZE) != 0
        status = tl.where(late, _LATE, tl.where(differs, _DIFFERS, _REACHED))
    else:
        status = tl.where(seen - value < 0, _LATE, _REACHED)
    return status


@jit
def note_disagreement(timeout_words, flag, seen, value):
    """Record that a flag has another size, and end all waits of this context.

    The flag at address ``flag`` has the value ``seen`` instead of ``value``. Only the first record
    counts. The timeout words of a context form a ring. Waits with all these words end, because a
    rank that has seen the disagreement launches nothing more, so its peers would wait forever.
    """
    if tl.atomic_xchg(timeout_words + 1, DISAGREED, sem="relaxed", scope="gpu") != DISAGREED:
        tl.store(timeout_words + _SEEN, seen)
        tl.store(timeout_words + _AWAITED, value)
        tl.store(timeout_words + _FLAG, flag)
        other = tl.load(timeout_words + _NEXT)
        while (other != 0) & (other != timeout_words.to(tl.int64)):
            words = other.to(tl.pointer_type(tl.int64))
            tl.atomic_max(words + 1, 1, sem="relaxed", scope="gpu")
            other = tl.load(words + _NEXT)
        tl.store(tl.load(timeout_words + _REPORT).to(tl.pointer_type(tl.int64)), 1)


@jit
def _wait_together(ptr, count, value, timeout_words, SIZED: tl.constexpr):
    # No block is carried through the loop: Triton 3.6 aborts ("Result number is out of range").
    among = tl.arange(0, ptr.shape[0]) < count
    deadline = wait_deadline()
    polls = 0
    latest = -1
    while (latest == -1) & (polls >= 0):
        seen = tl.atomic_add(ptr, 0, mask=among, sem="acquire", scope="sys")
        seen = tl.where(among, seen, value)
        latest = tl.min(_status(seen, value, SIZED), 0)
        if latest == _LATE:
            polls = spin(ptr, seen, value, deadline, polls, timeout_words, SIZED)
        if SIZED:  # noqa: SIM102  # a constexpr: not to be joined with the runtime condition
            if latest == _DIFFERS:
                flags = ptr.to(tl.int64)
                flag = tl.max(tl.where(_status(seen, value, SIZED) == _DIFFERS, flags, 0), 0)
                other = tl.max(tl.where(flags == flag, seen, 0), 0)
                note_disagreement(timeout_words, flag, other, value)
    note_flags(FLAG_AWAITED, flag_clock(), ptr, value, among)
    tl.debug_barrier()  # a different thread acquired each flag


@jit
def _wait_in_turn(ptr, count, value, timeout_words, SIZED: tl.constexpr):
    """Wait for the flags one after another; return whether all have the same size."""
    index = 0
    agree = True
    while index < count:
        deadline = wait_deadline()
        polls = 0
        seen = tl.atomic_add(ptr + index, 0, sem="acquire", scope="sys")
        while (_status(seen, value, SIZED) == _LATE) & (polls >= 0):
            polls = spin(ptr + index, seen, value, deadline, polls, timeout_words, SIZED)
            seen = tl.atomic_add(ptr + index, 0, sem="acquire", scope="sys")
        if SIZED:
            status = _status(seen, value, SIZED)
            agree = agree & (status == _REACHED)
            if status == _DIFFERS:
                note_disagreement(timeout_words, (ptr + index).to(tl.int64), seen, value)
        note_flags(FLAG_AWAITED, flag_clock(), ptr + index, value, None)
        index += 1
    return agree


@jit
def wait(ptr, count, value, timeout_words=None, SIZED: constexpr = False):
    """Spin until each of the ``count`` int32 flags that begin at ``ptr`` has reached ``value``.

    This is an acquire at system scope. Flags count up and may wrap: they are compared by signed
    difference. An atomic add of zero lowers to ``ld.acquire.sys``; Triton 3.6 has no other way to
    express this load.

    In the interpreter, a wait has a wall-clock limit and raises ``WaitTimeout``. Compiled, it has
    no limit unless ``timeout_words`` is passed.

    Args:
        ptr: pointer to the first flag, or a block of pointers, whose first ``count`` flags are
            polled at the same time. A block is faster for many flags.
        count: number of flags.
        value: value to wait for.
        timeout_words: pointer to int32 [2]. If word 0 is positive, it is the number of polls before
            the wait gives up. Then word 1 becomes 1, all waits with these words end, and the
            results of the kernel are invalid. The host checks word 1 afterwards.
        SIZED: flags and ``value`` are int64 from ``sized``, and ``timeout_words`` points to int64
            [7]. A flag with another size ends the wait: word 1 becomes 2, words 2 to 4 become the
            flag's value, ``value`` and the flag's address, and the int64 at the address in word 5
            becomes 1. Word 6 is 0, or the address of the next timeout words of a ring, whose waits
            end too.

    Returns:
        Token (int32 0) for ``consume_token``.
    """
    reject_str(value)
    reject_str(timeout_words)
    with mark("wait"):
        if ptr.type.is_block():
            _wait_together(ptr, count, value, timeout_words, SIZED)
        else:
            _wait_in_turn(ptr, count, value, timeout_words, SIZED)
    return _token()


@jit
def _token():
    token = 0
    if not INTERPRETED and target_info.cuda_capability_geq(9, 0):
        # TMA reads through the async proxy, which the acquire of the generic proxy does not order.
        # The result is opaque to the compiler, which orders consumers of the token after the wait.
        # Triton 3.6 deletes or moves a wait in a specialised loop if nothing depends on it.
        token = tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;",
            "=r,r",
            [token],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return token


@jit
def give_turn():
    """Yield to other programs of the grid before polling their results.

    The interpreter runs one program at a time until it ends or waits. Compiled, this is a no-op.
    """
    give_turn_to_others()


@jit
def consume_token(value, token):
    """Return ``value`` (a pointer or an int) with a dependency on the ``wait`` of ``token``."""
    return value + token


@jit
def only_rows(desc, begin, end):
    """Return tensor descriptor ``desc`` and declare that only rows ``begin`` to ``end`` are used.

    The other rows of a tile are dropped later and may change while they are read. The checks of
    ``TRITON_DIST_DEBUG`` do not report them as a race, and replace them by NaN to reveal a use.
    ``end`` is excluded. Without these checks, and in compiled kernels, this is a no-op.
    """
    return only_rows_of(desc, begin, end)
