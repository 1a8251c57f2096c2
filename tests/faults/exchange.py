"""A small exchange between ranks, right or with one fault, and how often the fault is noticed.

Each rank sends every rank a row, itself included, and waits for theirs. No two rows of a run are
alike, so a row is wrong where another rank, or another call, should have it. Two slots take turns,
and flags count calls, so calls follow one another with nothing in between. In each run another rank
is late: it delays between the two halves of what is broken.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.debugging import races
from triton_dist.errors import WaitTimeout
from triton_dist.runtime import symmetric
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.triton_compat import is_interpreting
from triton_dist.runtime.waits import bounded_waits, limit_polls

RIGHT = "none"
FAULTS = (
    RIGHT,
    "store after the release",
    "missing wait",
    "missing fence",
    "wrong peer",
    "flag reset too early",
)
CALLS = 2  # of a run: one in each slot
SIZE = 2048
# Of peers that come within milliseconds; of the interpreter on a busy host.
_WAIT_SECONDS = 1.5 if is_interpreting() else 0.1


@jit
def delay(count, scratch_ptr):
    """Spend about ``count`` times the latency of an atomic."""
    for _ in range(count):
        tl.atomic_add(scratch_ptr + tl.program_id(0), 1, sem="relaxed", scope="gpu")


@jit(do_not_specialize=["epoch", "rank", "late"])
def kernel_exchange(
    x_ptr, slots_ptr, slots_table, flags_ptr, flags_table, out_ptr, timeout_ptr, scratch_ptr,
    epoch, rank, late,
    FAULT: tl.constexpr, DELAY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program p sends row p to rank p, and awaits the row that rank p sends here.

    x: [ranks, SIZE]. slots: symmetric, [2, ranks, SIZE]. flags: symmetric, int32 [ranks], of which
    number p is the last call of which the row of rank p is there. out: [ranks, SIZE].
    """
    peer = tl.program_id(0)
    place = tl.arange(0, SIZE)
    slot = (epoch % 2) * tl.num_programs(0) * SIZE
    # Only the rank that is late delays.
    count = tl.where(rank == late, DELAY, 0)
    to = peer
    if FAULT == "wrong peer":
        to = (peer + 1) % tl.num_programs(0)
    theirs = dl.symm_at(slots_ptr, slots_table, to) + slot + rank * SIZE
    flag = dl.symm_at(flags_ptr, flags_table, peer) + rank
    row = tl.load(x_ptr + peer * SIZE + place)

    if FAULT == "flag reset too early":
        delay(count, scratch_ptr)
        tl.atomic_xchg(flags_ptr + peer, 0, sem="relaxed", scope="sys")  # it may be set already
    if FAULT == "missing wait":
        delay(count, scratch_ptr)
    if FAULT == "store after the release":
        dl.notify(flag, epoch)
        delay(count, scratch_ptr)
        tl.store(theirs + place, row)
    elif FAULT == "missing fence":
        tl.store(theirs + place, row)
        delay(count, scratch_ptr)
        tl.atomic_xchg(flag, epoch, sem="relaxed", scope="sys")
    else:
        tl.store(theirs + place, row)
        if FAULT == "none" or FAULT == "wrong peer":
            delay(count, scratch_ptr)
        dl.notify(flag, epoch)
    source = slots_ptr + slot + peer * SIZE
    if FAULT != "missing wait":
        source = dl.consume_token(source, dl.wait(flags_ptr + peer, 1, epoch, timeout_ptr))
    tl.store(out_ptr + peer * SIZE + place, tl.load(source + place))


def caught(fault: str, count: int, runs: int) -> int:
    """In how many of ``runs`` a rank noticed ``fault``: a row that is not what was sent, or a wait
    in vain. Collective, the same on all ranks.

    Args:
        count: of the delay, in atomics.
    """
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device().torch_device
    regions = {"slots": ((2, size, SIZE), torch.float32), "flags": ((size,), torch.int32)}
    memory = symmetric.allocate("exchange", regions)
    slots, flags = memory["slots"], memory["flags"]
    timeout_words = torch.zeros(2, dtype=torch.int32, device=device)
    scratch = torch.zeros(size, dtype=torch.int32, device=device)
    outs = torch.empty(CALLS, size, SIZE, device=device)
    numbers = torch.arange(SIZE, dtype=torch.float32, device=device)
    noticed = torch.zeros(runs, dtype=torch.int32)

    def row(run: int, call: int, sender: int, receiver: int) -> torch.Tensor:
        return numbers + ((run * CALLS + call) * size + sender) * size + receiver

    def sent(run: int, call: int) -> torch.Tensor:
        return torch.stack([row(run, call, rank, receiver) for receiver in range(size)])

    def due(run: int, call: int) -> torch.Tensor:
        return torch.stack([row(run, call, sender, rank) for sender in range(size)])

    def launch(call: int, x: torch.Tensor, late: int) -> Launch:
        args = (
            x, slots.local, slots.pointers, flags.local, flags.pointers, outs[call], timeout_words,
            scratch, call + 1, rank, late,
        )  # fmt: skip
        options = {"FAULT": fault, "DELAY": count, "SIZE": SIZE}
        return Launch(kernel_exchange, (size,), args, options)

    launch(0, sent(0, 0), 0).compile()  # else one rank waits for another's compiler
    for run in range(runs):
        slots.local.fill_(float("nan"))
        flags.local.zero_()
        outs.fill_(float("nan"))
        with bounded_waits(_WAIT_SECONDS):
            timeout_words.copy_(torch.tensor([limit_polls(), 0]))
            rows = [sent(run, call) for call in range(CALLS)]
            current_device().synchronize()
            dist.barrier()
            # WaitTimeout is the interpreter's: the call's row is missing then.
            with suppress(WaitTimeout), races.expected():
                for call, x in enumerate(rows):
                    launch(call, x, run % size).run()
        current_device().synchronize()
        expected = torch.stack([due(run, call) for call in range(CALLS)])
        noticed[run] = not (torch.equal(outs, expected) and int(timeout_words[1]) == 0)
        dist.barrier()
    dist.all_reduce(noticed, dist.ReduceOp.MAX)
    memory.free()
    return int(noticed.sum())


def delay_count(milliseconds: float) -> int:
    """So many atomics take about so long; the same on all ranks."""
    scratch = torch.zeros(1, dtype=torch.int32, device=current_device().torch_device)
    trial = 200 if is_interpreting() else 20_000
    count = 1
    if dist.get_rank() == 0:  # alone: a GPU that is shared would be another's half of the time
        kernel_delay[(1,)](scratch, 1)
        current_device().synchronize()
        timer = current_device().timer()
        timer.start()
        kernel_delay[(1,)](scratch, trial)
        timer.stop()
        current_device().synchronize()
        count = max(1, int(trial * milliseconds / timer.milliseconds()))
    return group_for().all_gather("length of a delay", count)[0]


@jit(do_not_specialize=["count"])
def kernel_delay(scratch_ptr, count):
    delay(count, scratch_ptr)


def table(runs: int, delays: tuple[float, ...]) -> dict[str, list[int]]:
    """For each fault, in how many of ``runs`` it was noticed with each delay, in milliseconds."""
    counts = [delay_count(milliseconds) if milliseconds else 0 for milliseconds in delays]
    return {fault: [caught(fault, count, runs) for count in counts] for fault in FAULTS}
