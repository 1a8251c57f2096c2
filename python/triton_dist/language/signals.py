"""Flags in symmetric memory: one rank sets them, another waits for them inside its kernel."""

from __future__ import annotations

import triton.language as tl
from triton.language import target_info

from triton_dist._jit import jit
from triton_dist.language import _spin
from triton_dist.language._checked import only_rows_of
from triton_dist.language._marks import mark
from triton_dist.language._spin import (
    INTERPRETED,
    give_turn_to_others,
    refuse_text,
    spin,
    wait_deadline,
)

SET = tl.constexpr("set")  # a bare str is no default for a constexpr argument in Triton 3.6 to 3.9
# Of a flag that carries a size, its lowest bits are in the lowest of the flag.
SIZE_BITS = tl.constexpr(_spin.SIZE_BITS)
_SIZE = tl.constexpr(2**20 - 1)
# How a flag stands to what is awaited; the lowest of several decides.
_DIFFERS, _LATE, _REACHED = tl.constexpr(-2), tl.constexpr(-1), tl.constexpr(0)
# Words of a guard behind the first two.
_SEEN, _AWAITED, _FLAG, _REPORT, _NEXT = (
    tl.constexpr(2), tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6),
)  # fmt: skip
DISAGREED = tl.constexpr(2)
"""In a guard's second word: a flag came with another size."""


@jit
def symm_at(ptr, table, peer):
    """``peer``'s copy of the region that starts at ``ptr``.

    ``ptr``: the local start of a region, for its element type. ``table``: int64 [world size], the
    region's ``pointers``. Returns a pointer of ``ptr``'s type into ``peer``'s memory.
    """
    return tl.load(table + peer).to(ptr.dtype)


@jit
def notify(ptr, value, op: tl.constexpr = SET, mask=None):
    """Write int32 ``value`` to the flag at ``ptr`` (``op="set"``), or add it (``op="add"``).

    A release at system scope: who sees the flag by ``wait`` sees all that this program stored
    before, on any GPU of the host. Not for TMA stores: see ``publish_tile``.

    ``ptr`` may be a block of pointers, of which those in ``mask`` are written at once: several
    peers are told for the price of one, since it is the release before that takes its time.
    """
    tl.debug_barrier()  # the release is one thread's; all threads' stores come before it
    if op == "set":
        tl.atomic_xchg(ptr, value, mask=mask, sem="release", scope="sys")
    else:
        tl.static_assert(op == "add", "notify: op is 'set' or 'add'")
        tl.atomic_add(ptr, value, mask=mask, sem="release", scope="sys")


@jit
def sized(count, size):
    """The int64 that a flag is set to, and awaited at, which also says of what size the caller's
    work is: ``count`` above, ``size`` (int32, from 0 on) modulo 2**20 in the lowest 20 bits."""
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
    """Let all waits with the guards of this ring end, and the host know why: the flag at address
    ``flag`` is ``seen`` and was awaited at ``value``. The first of a context that notes is heard.

    All, since a rank that has heard of it launches no more, and peers may have launched what waits
    for that with the other guards.
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
    # Carries no block around the loop: Triton 3.6 aborts ("Result number is out of range").
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
    tl.debug_barrier()  # each flag was acquired by a thread of its own


@jit
def _wait_in_turn(ptr, count, value, timeout_words, SIZED: tl.constexpr):
    """True if all have come with the same size."""
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
        index += 1
    return agree


@jit
def wait(ptr, count, value, timeout_words=None, SIZED: tl.constexpr = False):
    """Spin until each of the ``count`` int32 flags from ``ptr`` on has reached ``value``.

    ``ptr`` may be a block of pointers: then its first ``count`` are looked at all at once, which
    saves time where they are many.

    An acquire at system scope. Flags count up and may wrap: they are compared by signed difference.
    Adding zero atomically lowers to ``ld.acquire.sys``, which stock Triton 3.6 has no other word
    for. Returns a token (int32 0) for ``consume_token``.

    Interpreted, a wait has a wall-clock limit and raises ``WaitTimeout``. Compiled, it waits for as
    long as it takes, unless ``timeout_words`` points to int32 [2]: ``timeout_words[0]`` > 0 is how
    often to look before giving up; then ``timeout_words[1]`` becomes 1, all waits with this guard
    end soon, and what the kernel computes is of no use. The host looks at ``timeout_words[1]``
    afterwards.

    ``SIZED``: flags and ``value`` are int64 of ``sized``, and ``timeout_words`` points to int64
    [7]. A flag that was set with another size ends the wait: then ``timeout_words[1]`` becomes 2,
    ``timeout_words[2:5]`` the flag's value, ``value`` and the flag's address, and the int64 at
    address ``timeout_words[5]`` 1. ``timeout_words[6]``: 0, or the address of the next guard of a
    ring, whose waits end, too.
    """
    refuse_text(value)
    refuse_text(timeout_words)
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
        # The result is opaque to the compiler, so what consumes the token stays behind the wait:
        # Triton 3.6 deletes or moves a wait in a specialised loop when nothing depends on it.
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
    """Let other programs of the grid get on, before a look at what they have done.

    Interpreted, one program runs at a time, until it ends or waits; compiled, this is nothing.
    """
    give_turn_to_others()


@jit
def consume_token(value, token):
    """``value`` (a pointer or an int), made to depend on the ``wait`` that gave ``token``."""
    return value + token


@jit
def only_rows(desc, begin, end):
    """``desc``, a tensor descriptor, of whose loads only rows ``begin`` to ``end`` of the tensor
    are used: what a tile has beyond them is dropped later, and may change while it is read.

    For the checks of ``TRITON_DIST_DEBUG``, which do not take it for a race then, and put NaN
    there, so that it shows if it is used. Otherwise, and compiled, this is nothing.
    """
    return only_rows_of(desc, begin, end)
