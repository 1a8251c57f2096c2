"""Words inside kernels, between the interpreted kernels of several processes."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist.errors import WaitTimeout
from triton_dist.runtime import symmetric

SHORT = {"TRITON_DIST_WAIT_TIMEOUT": "0.5"}
LARGEST = 2**31 - 1


@triton_dist.jit
def push(source_ptr, rows_ptr, rows_table, flags_ptr, flags_table, peer, n, value, B: tl.constexpr):
    """Program p writes block p of the peer's rows, then its flag p."""
    program = tl.program_id(0)
    index = program * B + tl.arange(0, B)
    rows = dl.symm_at(rows_ptr, rows_table, peer)
    tl.store(rows + index, tl.load(source_ptr + index, mask=index < n), mask=index < n)
    dl.notify(dl.symm_at(flags_ptr, flags_table, peer) + program, value)


@triton_dist.jit
def take(rows_ptr, out_ptr, flags_ptr, count, n, value, B: tl.constexpr):
    """Copies n rows once ``count`` flags have reached ``value``."""
    token = dl.wait(flags_ptr, count, value)
    index = dl.consume_token(tl.arange(0, B), token)
    tl.store(out_ptr + index, tl.load(rows_ptr + index, mask=index < n), mask=index < n)


@triton_dist.jit
def await_flags(flags_ptr, count, value, out_ptr):
    tl.store(out_ptr, dl.wait(flags_ptr, count, value))


@triton_dist.jit
def tell(flags_ptr, flags_table, peer, value, OP: tl.constexpr):
    dl.notify(dl.symm_at(flags_ptr, flags_table, peer), value, OP)


@triton_dist.jit
def tell_oddly(flags_ptr):
    dl.notify(flags_ptr, 1, "subtract")


@triton_dist.jit
def wait_with_a_scope(flags_ptr):
    dl.wait(flags_ptr, 1, "gpu", "acquire")


@triton_dist.jit
def publish(source_ptr, out_ptr, flag_ptr, B: tl.constexpr):
    source = tl.make_tensor_descriptor(source_ptr, [B, B], [B, 1], [B, B])
    out = tl.make_tensor_descriptor(out_ptr, [B, B], [B, 1], [B, B])
    out.store([0, 0], source.load([0, 0]))
    dl.publish_tile()
    dl.notify(flag_ptr, 1)


def memory_of(n=100):
    return symmetric.allocate(
        "signals", {"rows": ((n,), torch.float32), "flags": ((8,), torch.int32)}
    )


def push_round_the_ring(rounds):
    """Each rank pushes to the next and takes what the one before pushed; nothing else orders
    them. The flag of round r is r, and the data of a round is there with it."""
    rank, size, n = dist.get_rank(), dist.get_world_size(), 100
    with memory_of() as memory, memory_of() as answers:
        rows, flags, ready = memory["rows"], memory["flags"], answers["flags"]
        received = []
        for number in range(1, rounds + 1):
            if rank == number % size:
                time.sleep(0.01)
            source = torch.arange(n, dtype=torch.float32) + 1000 * number + rank
            out = torch.zeros(n)
            push[(4,)](
                source, rows.local, rows.pointers, flags.local, flags.pointers,
                (rank + 1) % size, n, number, B=32,
            )  # fmt: skip
            take[(1,)](rows.local, out, flags.local, 4, n, number, B=128)
            received.append(out)
            # Rows may be overwritten from now on: tell who writes them.
            tell[(1,)](ready.local, ready.pointers, (rank - 1) % size, number, OP="set")
            await_flags[(1,)](ready.local, 1, number, torch.zeros(1, dtype=torch.int32))
        for number, out in enumerate(received, start=1):
            before = (rank - 1) % size
            assert torch.equal(out, torch.arange(n, dtype=torch.float32) + 1000 * number + before)
        memory.barrier()
    return len(received)


def test_data_is_there_when_its_flag_is(on_ranks):
    assert on_ranks(3)(push_round_the_ring, 4) == [4] * 3


def count_up():
    """Every rank adds 1 to a flag of rank 0, fifty times; rank 0 waits for the sum."""
    size = dist.get_world_size()
    with memory_of() as memory:
        flags, token = memory["flags"], torch.full((1,), -1, dtype=torch.int32)
        for _ in range(50):
            tell[(1,)](flags.local, flags.pointers, 0, 1, OP="add")
        if dist.get_rank() == 0:
            await_flags[(1,)](flags.local, 1, 50 * size, token)
            assert token.item() == 0
        memory.barrier()
        return int(flags.local[0])


def test_additions_of_several_ranks_add_up(on_ranks):
    assert on_ranks(3)(count_up) == [150, 0, 0]


def set_late(seconds, value):
    """Seconds that rank 0's kernel waits for a flag that rank 1 sets late."""
    with memory_of() as memory:
        flags, token = memory["flags"], torch.full((1,), -1, dtype=torch.int32)
        begin = time.monotonic()
        if dist.get_rank() == 1:
            time.sleep(seconds)
            tell[(1,)](flags.local, flags.pointers, 0, value, OP="set")
        else:
            await_flags[(1,)](flags.local, 1, 3, token)
        waited = time.monotonic() - begin
        memory.barrier()
    return waited


@pytest.mark.parametrize("value", [3, 4])
def test_a_kernel_waits_inside_until_a_peer_sets_the_flag(on_ranks, value):
    waited, _ = on_ranks(2)(set_late, 0.3, value)
    assert 0.25 < waited < 5


def wait_in_vain(value):
    with memory_of() as memory:
        flags = memory["flags"].local
        flags[:] = torch.tensor([5, 5, 5, 2, 5, 5, 5, 5])
        begin = time.monotonic()
        with pytest.raises(WaitTimeout) as overdue:
            await_flags[(2, 3)](flags, 8, value, torch.zeros(1, dtype=torch.int32))
        error = overdue.value
        memory.barrier()
    fields = error.rank, error.flag, error.expected, error.seen
    return fields, str(error), time.monotonic() - begin


def test_an_overdue_wait_says_who_waits_for_what(on_ranks):
    for rank, (fields, message, waited) in enumerate(on_ranks(2)(wait_in_vain, 3, env=SHORT)):
        assert fields == (rank, "signals.flags[3]", 3, 2)
        # All programs of the grid wait; which is the first to give up, the machine decides.
        waits = rf"rank {rank}, program \([01], [012], 0\): waited 0\.5 s for flag"
        assert re.match(waits, message)
        assert "TRITON_DIST_WAIT_TIMEOUT" in message
        assert 0.45 < waited < 10


@pytest.mark.parametrize(
    ("seen", "value", "reached"),
    [
        (0, 0, True),
        (1, 0, True),
        (0, 1, False),
        (-1, 0, False),
        (LARGEST, LARGEST, True),
        (-LARGEST - 1, LARGEST, True),  # one further: wrapped around
        (LARGEST, -LARGEST - 1, False),
        (-LARGEST + 4, LARGEST - 3, True),
        (LARGEST - 3, -LARGEST + 4, False),
    ],
)
def test_flags_may_wrap_around(monkeypatch, seen, value, reached):
    monkeypatch.setenv("TRITON_DIST_WAIT_TIMEOUT", "0.05")
    flags, token = torch.tensor([seen], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    if reached:
        await_flags[(1,)](flags, 1, value, token)
        assert token.item() == 0
    else:
        with pytest.raises(WaitTimeout):
            await_flags[(1,)](flags, 1, value, token)
    assert flags.item() == seen  # looking does not change it


@triton_dist.jit
def await_block(flags_ptr, count, value, timeout_ptr, B: tl.constexpr):
    dl.wait(flags_ptr + tl.arange(0, B), count, value, timeout_ptr)


@pytest.mark.parametrize(
    ("seen", "value", "late"),
    [
        ([3, 4, 5, 3, 0, 0, 0, 0], 3, None),
        ([3, 4, 5, 2, 0, 0, 0, 0], 3, 3),
        ([3, 1, 5, 2, 0, 0, 0, 0], 3, 1),  # the latest one is named
        ([-LARGEST - 1] * 8, LARGEST, None),  # wrapped around
        ([-LARGEST, LARGEST, 1 - LARGEST, -LARGEST, 0, 0, 0, 0], -LARGEST, 1),
    ],
)
def test_the_first_flags_of_a_block_are_awaited_at_once(monkeypatch, seen, value, late):
    monkeypatch.setenv("TRITON_DIST_WAIT_TIMEOUT", "0.05")
    with memory_of() as memory:
        flags = memory["flags"].local
        flags[:] = torch.tensor(seen, dtype=torch.int32)
        if late is None:
            await_block[(1,)](flags, 4, value, None, B=8)
        else:
            with pytest.raises(WaitTimeout) as overdue:
                await_block[(1,)](flags, 4, value, None, B=8)
            assert overdue.value.flag == f"signals.flags[{late}]"
            assert (overdue.value.expected, overdue.value.seen) == (value, seen[late])
        assert flags.tolist() == seen


@triton_dist.jit
def broadcast_all(flags_ptr, flags_table, num_ranks, value, OP: tl.constexpr):
    peer = tl.arange(0, 8)
    last = num_ranks - 1
    flags = dl.symm_at(flags_ptr, flags_table, tl.minimum(peer, last))
    dl.notify(flags + 2, value, OP, mask=peer < num_ranks)


def all_broadcast_all():
    rank, size = dist.get_rank(), dist.get_world_size()
    with memory_of() as memory:
        flags = memory["flags"]
        for operation in ("add", "set"):
            broadcast_all[(1,)](flags.local, flags.pointers, size, 5 + rank, OP=operation)
            memory.barrier()
            if operation == "add":
                total = int(flags.local[2])
                memory.barrier()
        return total, int(flags.local[2]), int(flags.local.count_nonzero())


def test_all_ranks_are_told_at_once(on_ranks):
    for total, last, count in on_ranks(3)(all_broadcast_all):
        assert total == 5 + 6 + 7
        assert last in (5, 6, 7)
        assert count == 1


def test_no_flags_are_there_at_once():
    token = torch.ones(1, dtype=torch.int32)
    await_flags[(1,)](torch.zeros(1, dtype=torch.int32), 0, 9, token)
    assert token.item() == 0


def test_a_published_tile_and_its_flag():
    source, out = torch.randn(16, 16), torch.zeros(16, 16)
    flag = torch.zeros(1, dtype=torch.int32)
    publish[(1,)](source, out, flag, B=16)
    assert torch.equal(out, source)
    assert flag.item() == 1


def test_a_notify_that_is_neither_set_nor_add_is_refused():
    flags = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Exception, match="notify: op is 'set' or 'add'"):
        tell_oddly[(1,)](flags)
    assert flags.item() == 0


def test_kernels_here_are_interpreted():
    """Where they are not, the tests above would need a GPU."""
    assert not isinstance(push, triton.JITFunction)


def test_a_scope_in_place_of_the_value_is_refused():
    """Other languages of this kind take them there."""
    with pytest.raises(Exception, match=r"an argument is 'gpu', expected wait\(ptr, count, value"):
        wait_with_a_scope[(1,)](torch.ones(1, dtype=torch.int32))
