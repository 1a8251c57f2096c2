"""Flags in symmetric memory: one rank sets them, another waits for them inside its kernel."""

from __future__ import annotations

import triton.language as tl
from triton.language import target_info

from triton_dist._jit import jit
from triton_dist.language._spin import (
    INTERPRETED,
    give_turn_to_others,
    refuse_text,
    spin,
    wait_deadline,
)

SET = tl.constexpr("set")  # a bare str is no default for a constexpr argument in Triton 3.6 to 3.9


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
def _wait_together(ptr, count, value, guard):
    # Carries no block around the loop: Triton 3.6 aborts ("Result number is out of range").
    among = tl.arange(0, ptr.shape[0]) < count
    deadline = wait_deadline()
    polls = 0
    latest = -1
    while (latest < 0) & (polls >= 0):
        seen = tl.atomic_add(ptr, 0, mask=among, sem="acquire", scope="sys")
        seen = tl.where(among, seen, value)
        latest = tl.min(tl.where(seen - value < 0, -1, 0), 0)
        if latest < 0:
            polls = spin(ptr, seen, value, deadline, polls, guard)
    tl.debug_barrier()  # each flag was acquired by a thread of its own


@jit
def _wait_in_turn(ptr, count, value, guard):
    index = 0
    while index < count:
        deadline = wait_deadline()
        polls = 0
        seen = tl.atomic_add(ptr + index, 0, sem="acquire", scope="sys")
        while (seen - value < 0) & (polls >= 0):
            polls = spin(ptr + index, seen, value, deadline, polls, guard)
            seen = tl.atomic_add(ptr + index, 0, sem="acquire", scope="sys")
        index += 1


@jit
def wait(ptr, count, value, guard=None):
    """Spin until each of the ``count`` int32 flags from ``ptr`` on has reached ``value``.

    ``ptr`` may be a block of pointers: then its first ``count`` are looked at all at once, which
    saves time where they are many.

    An acquire at system scope. Flags count up and may wrap: they are compared by signed difference.
    Adding zero atomically lowers to ``ld.acquire.sys``, which stock Triton 3.6 has no other word
    for. Returns a token (int32 0) for ``consume_token``.

    Interpreted, a wait has a wall-clock limit and raises ``WaitTimeout``. Compiled, it waits for as
    long as it takes, unless ``guard`` points to int32 [2]: ``guard[0]`` > 0 is how often to look
    before giving up; then ``guard[1]`` becomes 1, all waits with this guard end at their next look,
    and what the kernel computes is of no use. The host looks at ``guard[1]`` afterwards.
    """
    refuse_text(value)
    refuse_text(guard)
    if ptr.type.is_block():
        _wait_together(ptr, count, value, guard)
    else:
        _wait_in_turn(ptr, count, value, guard)
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
