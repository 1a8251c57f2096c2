"""Kernels with one mistake each, in memory that has room for it.

The line that a report must name ends with ``# here: <bug>``.
"""

from __future__ import annotations

import functools
import os
import re
import runpy
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import triton.language as tl

from triton_dist import jit, knobs
from triton_dist import language as dl
from triton_dist.debugging import deadlock_check, races
from triton_dist.debugging.checks import checking
from triton_dist.debugging.faults import KernelFault
from triton_dist.errors import WaitTimeout
from triton_dist.runtime import deadlines, symmetric
from triton_dist.runtime.device import current_device

FLOATS = ((16,), torch.float32)


def line_of(bug: str) -> int:
    """Where the mistake stands."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if re.search(rf"# here: {bug}$", text))
    return line


@jit
def kernel_load(x, y, n):
    offsets = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(y, tl.sum(tl.load(x + offsets, mask=offsets < n), 0))  # here: load


def load():
    kernel_load[(2,)](torch.zeros(64)[:30], torch.zeros(1), 31)


@jit
def kernel_store(x):
    tl.store(x + tl.arange(0, 16) - 1, 1.0)  # here: store


def store():
    kernel_store[(1,)](torch.zeros(32)[8:24])


@jit
def kernel_block(x, n):
    rows = tl.make_tensor_descriptor(x, [n, 8], [8, 1], [8, 8])
    rows.store([0, 0], tl.zeros([8, 8], tl.float32))  # here: block


def block():
    kernel_block[(1,)](torch.zeros(16, 8)[:6], 8)


@jit
def kernel_neighbour(ptr, table, peer):
    tl.store(dl.symm_at(ptr, table, peer) + 8 + tl.arange(0, 16), 1.0)  # here: neighbour


def neighbour():
    # 512 bytes each: behind the one is the other, in the same allocation.
    regions = {"one": ((128,), torch.float32), "other": ((128,), torch.float32)}
    with symmetric.allocate("bugs", regions) as memory:
        last, table = memory["one"].local[112:], memory["one"].pointers + 112 * 4
        kernel_neighbour[(1,)](
            last, table, dist.get_world_size() - 1 if dist.is_initialized() else 0
        )


@jit
def kernel_unwritten(x, y):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, 16)), 0))  # here: unwritten


def unwritten():
    kernel_unwritten[(1,)](torch.empty(16), torch.zeros(1))


@jit
def kernel_assertion(n):
    tl.device_assert(n < 16, "n is too large")  # here: assertion


def assertion():
    kernel_assertion[(1,)](16)


@jit
def kernel_epoch(flag):
    dl.notify(flag, 1)
    dl.wait(flag, 1, 2)  # here: epoch


def epoch():
    with symmetric.allocate("bugs", {"flag": ((1,), torch.int32)}) as memory:
        kernel_epoch[(1,)](memory["flag"].local)


@jit
def kernel_reset(flag, done):
    if tl.program_id(0) == 0:
        dl.notify(flag, 1)
        dl.wait(done, 1, 1)
    elif tl.program_id(0) == 1:
        dl.wait(flag, 1, 1)
        tl.atomic_xchg(flag, 0)
        dl.notify(done, 1)
    else:
        dl.wait(done, 1, 1)
        dl.wait(flag, 1, 1)  # here: reset


def reset():
    with symmetric.allocate(
        "bugs", {"flag": ((1,), torch.int32), "done": ((1,), torch.int32)}
    ) as m:
        kernel_reset[(3,)](m["flag"].local, m["done"].local)


@jit
def kernel_either(flag, FIRST: tl.constexpr):
    if FIRST:
        dl.wait(flag, 1, 1)  # here: first
    else:
        dl.wait(flag, 1, 1)  # here: second


@jit
def kernel_circle(flag, table, peer):
    dl.wait(flag, 1, 1)  # here: circle
    dl.notify(dl.symm_at(flag, table, peer), 1)


def circle():
    with symmetric.allocate("bugs", {"flag": ((1,), torch.int32)}) as memory:
        flag = memory["flag"]
        kernel_circle[(1,)](flag.local, flag.pointers, 1 - dist.get_rank())


@jit
def kernel_told(flag, table, rank, peer, TELL: tl.constexpr):
    if TELL:
        dl.notify(dl.symm_at(flag, table, peer), 1)
    if rank == 0:
        dl.wait(flag, 1, 1)  # here: told


def _from_leader(peer: int, tell: bool) -> None:
    with symmetric.allocate("bugs", {"flag": ((1,), torch.int32)}) as memory:
        flag, rank = memory["flag"], dist.get_rank()
        kernel_told[(1,)](flag.local, flag.pointers, rank, peer, tell and rank == 1)
        if rank == 1:
            dist.barrier()  # as a program that goes on, to where the others do not come


def missing_notify():
    _from_leader(0, False)


def wrong_peer():
    _from_leader(1, True)


@jit(do_not_specialize=["rank", "epoch"])
def kernel_swap(
    inbox, inboxes, flag, flags, out, rank, epoch, TELL: tl.constexpr, WAIT: tl.constexpr
):
    offsets = tl.arange(0, 4)
    if rank == 1:
        tl.store(dl.symm_at(inbox, inboxes, 0) + offsets, epoch * 1.0)  # here: reuse
        if TELL:
            dl.notify(dl.symm_at(flag, flags, 0), epoch)
        else:
            tl.atomic_xchg(dl.symm_at(flag, flags, 0), epoch, sem="relaxed", scope="sys")
    else:
        if WAIT:
            dl.wait(flag, 1, epoch)
        tl.store(out + offsets, tl.load(inbox + offsets))  # here: swap


def swap(tell: bool = True, wait: bool = True, lined_up: bool = True) -> None:
    """Two epochs, in each of which rank 1 stores and rank 0 loads; right by default."""
    regions = {"inbox": ((4,), torch.float32), "flag": ((1,), torch.int32)}
    with symmetric.allocate("bugs", regions) as memory:
        inbox, flag, out = memory["inbox"], memory["flag"], torch.zeros(4)
        rank, race = dist.get_rank(), None
        for epoch in (1, 2):
            for turn in (1, 0):
                try:
                    if turn == rank:
                        kernel_swap[(1,)](
                            inbox.local, inbox.pointers, flag.local, flag.pointers, out, rank,
                            epoch, tell, wait,
                        )  # fmt: skip
                except KernelFault as error:
                    race = error
                if any_fails(race is not None):
                    if race is not None:
                        raise race
                    return
            if lined_up:
                memory.barrier()


@jit
def kernel_take(inbox, flag, out, WAIT: tl.constexpr):
    if WAIT:
        dl.wait(flag, 1, 1)
    offsets = tl.arange(0, 4)
    tl.store(out + offsets, tl.load(inbox + offsets))  # here: take


def copies(pulls: bool, late: bool = False, wait: bool = True, reused: bool = False) -> None:
    """A copy stream of rank 1, or of rank 0 if it ``pulls``, fills the inbox of rank 0, whose
    kernel loads that; right by default.

    Args:
        late: the copy comes behind the flag that tells of it.
        reused: it comes once more, and nothing says that rank 0 has loaded.
    """
    boxes = dict.fromkeys(("outbox", "inbox"), ((4,), torch.float32))
    with symmetric.allocate("bugs", boxes | {"flag": ((1,), torch.int32)}) as memory:
        inbox, flag, rank = memory["inbox"].peers[0], memory["flag"].peers[0], dist.get_rank()
        source = memory["outbox"].peers[1] if pulls else torch.ones(4)
        stream = current_device().copy_stream()

        def copy() -> None:
            if late:
                stream.write_flag(flag, 0, 1)
            stream.copy(inbox, source)  # here: copy
            if not late:
                stream.write_flag(flag, 0, 1)
            done = threading.Event()  # no check sees that this waits for the stream
            stream._steps.put(done.set)
            done.wait()

        def take() -> None:
            kernel_take[(1,)](inbox, flag, torch.zeros(4), wait)

        steps = [(0 if pulls else 1, copy), (0, take)]
        try:
            for turn, step in steps + steps[:1] * reused:
                try:
                    if turn == rank:
                        step()
                finally:
                    dist.distributed_c10d.barrier()  # which no check sees
            stream.join_current()  # raises what a copy did
        finally:
            stream.close()


@jit
def kernel_neighbours(box, flag, out, TELL: tl.constexpr, WAIT: tl.constexpr):
    """Program 0 stores what program 1 loads, which tells it back by a flag in own memory."""
    offsets = tl.arange(0, 4)
    if tl.program_id(0) == 0:
        tl.store(box + offsets, 1.0)  # here: program
        dl.notify(flag, 1)
        dl.wait(flag + 1, 1, 1)
        tl.store(box + offsets, 2.0)  # here: again
    else:
        if WAIT:
            dl.wait(flag, 1, 1)
        tl.store(out + offsets, tl.load(box + offsets))  # here: programs
        if TELL:
            dl.notify(flag + 1, 1)
        else:
            tl.atomic_xchg(flag + 1, 1, sem="relaxed")


def neighbours(tell: bool = True, wait: bool = True) -> None:
    """Two programs of each rank, in memory of its own; right by default."""
    with symmetric.allocate("bugs", {"inbox": ((4,), torch.float32)}) as memory:
        if dist.get_rank() == 0:
            flags = torch.zeros(2, dtype=torch.int32)
            kernel_neighbours[(2,)](memory["inbox"].local, flags, torch.zeros(4), tell, wait)


@jit(do_not_specialize=["rank"])
def kernel_tile(inbox, inboxes, flag, flags, out, rank, PUBLISH: tl.constexpr):
    theirs = dl.symm_at(inbox, inboxes, 0)
    tile = tl.make_tensor_descriptor(theirs, [4, 4], [4, 1], [4, 4])
    if rank == 1:
        tile.store([0, 0], tl.full([4, 4], 1.0, tl.float32))  # here: tma
        if PUBLISH:
            dl.publish_tile()
        dl.notify(dl.symm_at(flag, flags, 0), 1)
    else:
        dl.wait(flag, 1, 1)
        tl.store(out + tl.arange(0, 16), tl.load(inbox + tl.arange(0, 16)))  # here: tile


def tiles(publish: bool) -> None:
    """Rank 1 stores a tile by TMA where rank 0 loads it; complete before the flag or not."""
    regions = {"inbox": ((4, 4), torch.float32), "flag": ((1,), torch.int32)}
    with symmetric.allocate("bugs", regions) as memory:
        inbox, flag, rank = memory["inbox"], memory["flag"], dist.get_rank()
        for turn in (1, 0):
            try:
                if rank == turn:
                    kernel_tile[(1,)](
                        inbox.local, inbox.pointers, flag.local, flag.pointers, torch.zeros(16),
                        rank, publish,
                    )  # fmt: skip
            finally:
                dist.distributed_c10d.barrier()  # which no check sees


@jit(do_not_specialize=["rank"])
def kernel_reach(inbox, inboxes, out, rank, SAY: tl.constexpr):
    rows = tl.make_tensor_descriptor(inbox, [8, 4], [4, 1], [8, 4])
    if rank == 1:
        theirs = dl.symm_at(inbox, inboxes, 0) + 16
        tl.store(theirs + tl.arange(0, 16), 1.0)
    else:
        if SAY:
            rows = dl.only_rows(rows, 0, 4)
        block = rows.load([0, 0])  # here: reach
        tl.store(out + tl.arange(0, 8), tl.sum(block, 1))


def reach(say: bool) -> None:
    """Rank 0 loads rows 0 to 8, of which rank 1 stores the last four meanwhile."""
    with symmetric.allocate("bugs", {"inbox": ((8, 4), torch.float32)}) as memory:
        inbox, out, rank = memory["inbox"], torch.ones(8), dist.get_rank()
        for turn in (1, 0):
            try:
                if rank == turn:
                    kernel_reach[(1,)](inbox.local, inbox.pointers, out, rank, say)
            finally:
                dist.distributed_c10d.barrier()  # which no check sees
        # What is said to be unused is of no use.
        if rank == 0 and not (out[:4].eq(0).all() and out[4:].isnan().all()):
            raise KernelFault(f"rows were {out.tolist()}")


def any_fails(this: bool) -> bool:
    """True if one of the ranks fails. A meeting that no check sees, so it orders nothing."""
    fails = torch.tensor(int(this))
    dist.distributed_c10d.all_reduce(fails)
    return bool(fails)


BUGS: dict[str, tuple[Callable[[], None], str, str]] = {
    "load": (load, "bounds", "OutOfBounds"),
    "store": (store, "bounds", "OutOfBounds"),
    "block": (block, "bounds", "OutOfBounds"),
    "neighbour": (neighbour, "bounds", "OutOfBounds"),
    "unwritten": (unwritten, "init", "UninitialisedRead"),
    "assertion": (assertion, "any", "KernelAssertion"),
    "epoch": (epoch, "waits", "WaitNeverEnds"),
    "reset": (reset, "waits", "WaitNeverEnds"),
}
"""Of one rank: what runs it, the check that finds it, and the error."""
BUGS_OF_RANKS = {"circle": circle, "missing notify": missing_notify, "wrong peer": wrong_peer}
RACES = {
    "none": (swap, ""),
    "missing release": (functools.partial(swap, tell=False), "swap"),
    "missing wait": (functools.partial(swap, wait=False), "swap"),
    "epoch reused": (functools.partial(swap, lined_up=False), "reuse"),
    "push": (functools.partial(copies, pulls=False), ""),
    "pull": (functools.partial(copies, pulls=True), ""),
    "push, missing wait": (functools.partial(copies, pulls=False, wait=False), "take"),
    "pull, missing wait": (functools.partial(copies, pulls=True, wait=False), "take"),
    "push behind its flag": (functools.partial(copies, pulls=False, late=True), "take"),
    "push reused": (functools.partial(copies, pulls=False, reused=True), "copy"),
    "programs": (neighbours, ""),
    "programs, missing wait": (functools.partial(neighbours, wait=False), "programs"),
    "programs, missing release": (functools.partial(neighbours, tell=False), "again"),
    "tile": (functools.partial(tiles, publish=True), ""),
    "tile behind its flag": (functools.partial(tiles, publish=False), "tile"),
    "rows that are used": (functools.partial(reach, say=True), ""),
    "rows beyond": (functools.partial(reach, say=False), "reach"),
}
"""What runs it, and the line that the report of one of two ranks names."""


def found(bug: Callable[[], None], *checks: str, quiet: float) -> tuple[str, str]:
    """Type and text of the error that ``checks`` raise; of none: empty."""
    deadlock_check.QUIET_SECONDS = quiet
    with checking(*checks):
        try:
            bug()
        except (KernelFault, WaitTimeout) as error:
            return type(error).__name__, str(error)
    return "", ""


def on_each_rank() -> dict[str, tuple[str, str]]:
    """What is found of the bugs that take two ranks. The ranks go on together."""
    told = {}
    with checking("waits"):  # around all: a rank that has its report still says where it is
        for name, bug in BUGS_OF_RANKS.items():
            told[name] = found(bug, quiet=0.5)
            if name != "circle" and dist.get_rank() == 0:
                dist.barrier()  # where the other one waits
            dist.barrier()
    told["neighbour"] = found(neighbour, "bounds", quiet=0.5)
    return told


def races_of_each_rank() -> dict[str, tuple[str, str]]:
    """What is found of races. A rank that found one still comes to where the other one waits."""
    told = {}
    for name, (bug, _) in RACES.items():
        told[name] = found(bug, "race", quiet=0.5)
        dist.barrier()
    with races.expected() as met:
        kind, _ = found(functools.partial(swap, wait=False), "race", quiet=0.5)
    told["meant"] = kind, "\n".join(met)
    return told


def stands_still(folder: str) -> list[tuple[str, str]]:
    """What ends two hangs, for who asks meanwhile where the ranks are: a ``notify`` is missing;
    and then, a rank does not come to a call. A hang ends once ``folder`` has a file "1", then "2".
    """
    from triton_dist.kernels.nvidia import ag_gemm, create_ag_gemm_context

    rank = dist.get_rank()
    knobs.put(knobs.wait_timeout.variable, "100")
    with checking("where"):
        ends = [found(overdue_with(f"{folder}/1", missing_notify), quiet=0.5)]
        if rank == 0:
            dist.barrier()  # where rank 1 is meanwhile
        with create_ag_gemm_context(32, 32, 16, torch.float32, rank, 2) as ctx:

            def call() -> None:
                ag_gemm(torch.zeros(16, 16), torch.zeros(16, 16), ctx, autotune=False)

            call()
            second = overdue_with(f"{folder}/2", call)
            ends.append(found(second, quiet=0.5) if rank == 0 else ("", ""))
            dist.barrier()  # where rank 1 is meanwhile
            ctx.reset()
    return ends


def overdue_with(path: str, call: Callable[[], None]) -> Callable[[], None]:
    """``call``, whose waits are overdue once there is a file ``path``."""

    def run() -> None:
        by_time = deadlines.is_overdue
        deadlines.is_overdue = lambda *limits: by_time(*limits) or os.path.exists(path)
        try:
            call()
        finally:
            deadlines.is_overdue = by_time

    return run


def stands_in_pdb(program: str) -> list[float]:
    """What ``main`` of a program gives, whose kernels stop for who attaches."""
    knobs.put(knobs.wait_timeout.variable, "0.3")
    with checking("attach", "where"):
        return runpy.run_path(program)["main"]()
