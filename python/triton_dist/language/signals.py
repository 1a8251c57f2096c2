"""Flags in symmetric memory: one rank sets a flag, another rank waits for it inside its kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import triton.language as tl
from triton.language import target_info

from triton_dist._jit import jit
from triton_dist.language import _spin
from triton_dist.language._debug import only_rows_of
from triton_dist.language._marks import FLAG_AWAITED, FLAG_SET, flag_clock, mark, note_flags
from triton_dist.language._spin import (
    INTERPRETED,
    reject_str,
    spin,
    wait_deadline,
    yield_to_other_programs,
)

if TYPE_CHECKING:
    constexpr: TypeAlias = tl.constexpr | str | bool  # kernels pass literals too
else:
    constexpr = tl.constexpr

SET = tl.constexpr("set")  # Triton 3.6 to 3.9 reject a plain str as default of a constexpr argument
CALL_TAG_BITS = tl.constexpr(_spin.CALL_TAG_BITS)
_CALL_TAG_MASK = tl.constexpr(2**20 - 1)  # mask of the lowest 20 bits of a tagged flag
# Result of comparing a flag with the awaited value. For several flags, the minimum counts.
_DIFFERS, _LATE, _REACHED = tl.constexpr(-2), tl.constexpr(-1), tl.constexpr(0)
# Indices of the timeout words 2 to 6, which ``wait`` describes.
_SEEN, _AWAITED, _FLAG, _HOST_WORD, _NEXT_WORDS = (
    tl.constexpr(2), tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6),
)  # fmt: skip
DISAGREED = tl.constexpr(2)
"""Value of the second timeout word if a flag has a different call tag."""


@jit
def symm_at(ptr, table, peer):
    """Return the address of a symmetric region in ``peer``'s memory.

    Args:
        ptr: start of the region on this rank, with the element type of the result.
        table: int64 [world size], address of the region on each rank (``Region.pointers``).
        peer: rank in the group.

    Returns:
        Pointer of ``ptr``'s type.
    """
    return tl.load(table + peer).to(ptr.dtype)


@jit
def notify(ptr, value, op: constexpr = SET, mask=None):
    """Set the flag at ``ptr`` to ``value`` (``op="set"``), or add ``value`` to it (``op="add"``).

    Flags are int32, or int64 if they are tagged. This is a release at system scope: a program on
    any GPU of the host that observes the flag with ``wait`` also observes all earlier stores of
    this program. TMA stores need ``publish_tile`` before the call.

    ``ptr`` may be a block of pointers, of which ``mask`` selects some. Notifying several peers in
    one call takes as long as notifying one peer, because the release dominates the time.
    """
    # One thread releases. The barrier orders the stores of all threads before this release.
    tl.debug_barrier()
    with mark("notify"):
        event_time = flag_clock()
        if op == "set":
            tl.atomic_xchg(ptr, value, mask=mask, sem="release", scope="sys")
            note_flags(FLAG_SET, event_time, ptr, value, mask)
        else:
            tl.static_assert(op == "add", "notify: op is 'set' or 'add'")
            before = tl.atomic_add(ptr, value, mask=mask, sem="release", scope="sys")
            note_flags(FLAG_SET, event_time, ptr, before + value, mask)


@jit
def tagged(count, call_tag):
    """Return the int64 value of a tagged flag, which carries a count and a call tag.

    A call tag is a number that must be equal on all ranks, such as the call's number of rows. A
    wait compares it to detect ranks that made different calls.

    ``call_tag`` (int32, >= 0) modulo 2**20 is in the lowest 20 bits, ``count`` in the bits above.
    """
    return (count.to(tl.int64) << CALL_TAG_BITS) | (call_tag & _CALL_TAG_MASK)


@jit
def _status(seen, value, TAGGED: tl.constexpr):
    if TAGGED:
        late = ((seen | _CALL_TAG_MASK) - value) < 0
        differs = ((seen ^ value) & _CALL_TAG_MASK) != 0
        status = tl.where(late, _LATE, tl.where(differs, _DIFFERS, _REACHED))
    else:
        status = tl.where(seen - value < 0, _LATE, _REACHED)
    return status


@jit
def note_disagreement(timeout_words, flag, seen, value):
    """Record that a flag has another call tag, and end all waits of the same op context.

    The flag at address ``flag`` has the value ``seen`` instead of ``value``. Only the first record
    counts. All timeout words of a context form a ring, in which each has the address of the next.
    All waits that use words of the ring end: this rank launches nothing more, so its peers would
    wait forever.
    """
    if tl.atomic_xchg(timeout_words + 1, DISAGREED, sem="relaxed", scope="gpu") != DISAGREED:
        tl.store(timeout_words + _SEEN, seen)
        tl.store(timeout_words + _AWAITED, value)
        tl.store(timeout_words + _FLAG, flag)
        other = tl.load(timeout_words + _NEXT_WORDS)
        while (other != 0) & (other != timeout_words.to(tl.int64)):
            words = other.to(tl.pointer_type(tl.int64))
            tl.atomic_max(words + 1, 1, sem="relaxed", scope="gpu")
            other = tl.load(words + _NEXT_WORDS)
        tl.store(tl.load(timeout_words + _HOST_WORD).to(tl.pointer_type(tl.int64)), 1)


@jit
def _wait_together(ptr, count, value, timeout_words, TAGGED: tl.constexpr):
    # No block is carried through the loop: Triton 3.6 aborts ("Result number is out of range").
    is_polled = tl.arange(0, ptr.shape[0]) < count
    deadline = wait_deadline()
    polls = 0
    status = -1
    while (status == -1) & (polls >= 0):
        seen = tl.atomic_add(ptr, 0, mask=is_polled, sem="acquire", scope="sys")
        seen = tl.where(is_polled, seen, value)
        status = tl.min(_status(seen, value, TAGGED), 0)
        if status == _LATE:
            polls = spin(ptr, seen, value, deadline, polls, timeout_words, TAGGED)
        if TAGGED:  # noqa: SIM102  # a constexpr: not to be joined with the runtime condition
            if status == _DIFFERS:
                flags = ptr.to(tl.int64)
                flag = tl.max(tl.where(_status(seen, value, TAGGED) == _DIFFERS, flags, 0), 0)
                other = tl.max(tl.where(flags == flag, seen, 0), 0)
                note_disagreement(timeout_words, flag, other, value)
    note_flags(FLAG_AWAITED, flag_clock(), ptr, value, is_polled)
    tl.debug_barrier()  # a different thread acquired each flag


@jit
def _wait_in_turn(ptr, count, value, timeout_words, TAGGED: tl.constexpr):
    """Wait for the flags one after another; return whether all have the call tag of ``value``."""
    index = 0
    agree = True
    while index < count:
        deadline = wait_deadline()
        polls = 0
        seen = tl.atomic_add(ptr + index, 0, sem="acquire", scope="sys")
        while (_status(seen, value, TAGGED) == _LATE) & (polls >= 0):
            polls = spin(ptr + index, seen, value, deadline, polls, timeout_words, TAGGED)
            seen = tl.atomic_add(ptr + index, 0, sem="acquire", scope="sys")
        if TAGGED:
            status = _status(seen, value, TAGGED)
            agree = agree & (status == _REACHED)
            if status == _DIFFERS:
                note_disagreement(timeout_words, (ptr + index).to(tl.int64), seen, value)
        note_flags(FLAG_AWAITED, flag_clock(), ptr + index, value, None)
        index += 1
    return agree


@jit
def wait(ptr, count, value, timeout_words=None, TAGGED: constexpr = False):
    """Spin until each of the ``count`` int32 flags that begin at ``ptr`` has reached ``value``.

    This is an acquire at system scope. Flags count up and may wrap around, so they are compared by
    signed difference. An atomic add of zero lowers to ``ld.acquire.sys``; Triton 3.6 has no other
    way to express this load.

    In the interpreter, a wait has a wall-clock limit and raises ``WaitTimeout``. A compiled wait
    has no limit unless ``timeout_words`` is passed.

    Args:
        ptr: pointer to the first flag, or a block of pointers, whose first ``count`` flags are
            polled at the same time. A block is faster for many flags.
        count: number of flags.
        value: value to wait for.
        timeout_words: pointer to int32 [2]. If word 0 is positive, it is the number of polls after
            which the wait gives up. Giving up sets word 1 to 1, ends all waits with these words,
            and leaves invalid results. The host checks word 1 after the kernel.
        TAGGED: flags and ``value`` are int64 from ``tagged``, and ``timeout_words`` points to int64
            [7]. A flag with another call tag ends the wait. Word 1 then becomes 2. Words 2 to 4
            become the flag's value, ``value`` and the flag's address. The int64 at the address in
            word 5 becomes 1. If word 6 is not 0, it is the address of further timeout words, whose
            waits end too.

    Returns:
        Token (int32 0) for ``consume_token``.
    """
    reject_str(value)
    reject_str(timeout_words)
    with mark("wait"):
        if ptr.type.is_block():
            _wait_together(ptr, count, value, timeout_words, TAGGED)
        else:
            _wait_in_turn(ptr, count, value, timeout_words, TAGGED)
    return _token()


@jit
def _token():
    token = 0
    if not INTERPRETED and target_info.cuda_capability_geq(9, 0):
        # TMA reads through the async proxy, which the acquire of the generic proxy does not order.
        # The compiler cannot compute this result, so it orders consumers of the token after the
        # wait. Triton 3.6 deletes or moves a wait in a warp-specialized loop if nothing depends on
        # it.
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

    The interpreter runs one program at a time until it ends or waits. In compiled kernels, this is
    a no-op.
    """
    yield_to_other_programs()


@jit
def consume_token(value, token):
    """Return ``value`` (a pointer or an int) with a dependency on the wait that returned ``token``.

    The compiler then keeps loads through the pointer after the wait.
    """
    return value + token


@jit
def only_rows(desc, begin, end):
    """Return tensor descriptor ``desc`` and declare that only rows ``begin`` to ``end`` are used.

    ``end`` is excluded. The other rows of a loaded tile must not be used, because peers may write
    them during the load. The checks of ``TRITON_DIST_DEBUG`` do not report these rows as a race,
    and replace them by NaN to reveal a use. Without these checks, and in compiled kernels, this
    function has no effect.
    """
    return only_rows_of(desc, begin, end)
