"""The all-gather without a consumer: what arrives, flags, slots, a new start after a failure."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.gemm_calls import uniform
from triton_dist.debugging import races
from triton_dist.errors import InvalidArgument, WaitTimeout
from triton_dist.kernels.common.peers import flag_count, flag_value
from triton_dist.kernels.common.slots.epochs import GAVE_UP
from triton_dist.kernels.common.slots.gathered import MAX_CHUNKS, AllGatherBuffer, AllGatherMethod
from triton_dist.runtime import waits
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits

K = 8
METHODS = [method for method in AllGatherMethod if method.by_copy_engine]
SCHEDULES = [
    (method, streams, chunks)
    for method in METHODS
    for streams, chunks in ((1, 1), (2, 3), (3, MAX_CHUNKS))
]


def shard(rank, number, rows):
    return uniform(1000 * number + rank, (rows, K), torch.float32)


def arrived(buffer, gathered, rows):
    """The rows of the peers, each chunk taken when its flag has reached the epoch."""
    limit = time.monotonic() + 10
    for peer in set(range(buffer.num_ranks)) - {buffer.rank}:
        for chunk in range(-(-rows // gathered.chunk_rows)):
            flag = gathered.arrivals[peer * gathered.flags_per_rank + chunk]
            while int(flag) < int(gathered.epoch[0]):
                assert time.monotonic() < limit, (peer, chunk)
                time.sleep(1e-4)
    return gathered.rows.clone().split(rows)


def gather_by_every_schedule():
    """Several rounds of each schedule, with other rows each time, nothing in between."""
    buffer = AllGatherBuffer(7 * dist.get_world_size(), K, torch.float32, None, "test")
    numbers = []
    for number in range(2 * len(SCHEDULES)):
        method, streams, chunks = SCHEDULES[number // 2]
        rows = (7, 2, 1)[number % 3]
        gathered = buffer.start(shard(buffer.rank, number, rows), method, streams, chunks)
        assert gathered.chunk_rows == max(1, -(-rows // chunks))
        for peer, received in enumerate(arrived(buffer, gathered, rows)):
            if peer != buffer.rank:
                assert torch.equal(received, shard(peer, number, rows)), (method, streams, chunks)
        numbers.append(flag_count(int(gathered.epoch[0])))
        buffer.finish(awaited=number % 5 != 0)  # all arrived; the next call need not know
    buffer.slots.memory.barrier()
    buffer.free()
    return numbers


def test_every_shard_arrives_in_every_schedule(on_ranks):
    # Two slots in turn: each epoch is seen twice.
    epochs = [1 + number // 2 for number in range(2 * len(SCHEDULES))]
    assert on_ranks(3)(gather_by_every_schedule) == [epochs] * 3


def fail_then_start_again(method):
    """Rank 1 leaves out a whole call; after a reset all ranks begin anew."""
    buffer = AllGatherBuffer(2 * dist.get_world_size(), K, torch.float32, None, "test")
    failures = []
    for number in range(3):
        if buffer.rank == 1 and number == 1:
            continue
        try:
            gathered = buffer.start(shard(buffer.rank, number, 2), method, 1, 1)
            buffer.finish()
        except WaitTimeout as error:
            failures.append(error.flag.split("[")[0])
    time.sleep(0.5 * (buffer.rank == 1))  # ranks come to the reset at different times
    buffer.reset()
    for number in range(5, 9):
        gathered = buffer.start(shard(buffer.rank, number, 2), method, 1, 1)
        for peer, received in enumerate(arrived(buffer, gathered, 2)):
            if peer != buffer.rank:
                assert torch.equal(received, shard(peer, number, 2))
        buffer.finish()
    buffer.slots.memory.barrier()
    buffer.free()
    return failures


@pytest.mark.parametrize("method", METHODS)
def test_a_reset_brings_all_ranks_back_to_one_state(on_ranks, method):
    on_ranks(2)(fail_then_start_again, method, env={"TRITON_DIST_WAIT_TIMEOUT": "1"})


def counting_waits():
    """The waits of the host for the device from now on, in this process: a list that grows."""
    device, seen = current_device(), []
    device.synchronize = lambda seconds=None: seen.append(seconds)
    return seen


def settled_by_the_caller(method):
    """Calls with bounded waits, with and without somebody who settles; (waits of the host for the
    device after each step, whether the error names the flag, what it expects and has seen)."""
    buffer = AllGatherBuffer(2 * dist.get_world_size(), K, torch.float32, None, "test")
    peer, waits_seen = (buffer.rank + 1) % buffer.num_ranks, counting_waits()
    steps = []

    def call(number, gives_up=False):
        gathered = buffer.start(shard(buffer.rank, number, 2), method, 1, 1)
        arrived(buffer, gathered, 2)
        if gives_up:  # as a kernel on a GPU does; interpreted ones raise
            buffer.slots.epoch[GAVE_UP.value] = 1
        buffer.finish(awaited=True)
        steps.append(len(waits_seen))

    call(0)
    with bounded_waits(20.0):
        call(1)
        with waits.deferred_checks(current_device(), 20.0) as run_checks:
            call(2)
            call(3, gives_up=True)
            call(4)
            dist.barrier()  # nobody writes flags while one is taken back
            flags = buffer.slots.of_slot(0, "arrivals").local  # of call 3
            flags[peer * MAX_CHUNKS] -= flag_value(1, 0)
            with pytest.raises(WaitTimeout) as overdue:
                run_checks()
            flags[peer * MAX_CHUNKS] += flag_value(1, 0)
            dist.barrier()
            steps.append(len(waits_seen))
            call(5)
            run_checks()
            steps.append(len(waits_seen))
        with pytest.raises(WaitTimeout, match="arrived since"):
            call(6, gives_up=True)
        dist.barrier()
    buffer.reset()
    before = len(waits_seen)
    for number in range(7, 10):
        gathered = buffer.start(shard(buffer.rank, number, 2), method, 1, 1)
        for rank, received in enumerate(arrived(buffer, gathered, 2)):
            if rank != buffer.rank:
                assert torch.equal(received, shard(rank, number, 2))
        buffer.finish()
    assert len(waits_seen) == before  # production waits for nothing
    buffer.slots.memory.barrier()
    buffer.free()
    error = overdue.value
    return steps, error.flag == f"test.arrivals0[{peer * MAX_CHUNKS}]", error.expected, error.seen


@pytest.mark.parametrize("method", METHODS)
def test_the_host_waits_in_the_call_only_if_nobody_settles(spawn_ranks, method):
    # production; checked in the call; three calls and a settling, another call and its settling
    steps = [0, 1, 1, 1, 1, 2, 2, 3]
    # The call that gave up was the second in the first slot.
    assert spawn_ranks(2, settled_by_the_caller, method) == [(steps, True, 2, 1)] * 2


def released_copies():
    """Rank 1 leaves out a call of a ring. Seconds that the others' call took, which gave up."""
    ring = AllGatherMethod.RING_PUSH_1D
    buffer = AllGatherBuffer(2 * dist.get_world_size(), K, torch.float32, None, "test")
    seconds = 0.0
    with bounded_waits(20.0), waits.deferred_checks(current_device(), 20.0) as run_checks:
        begin = time.monotonic()
        if buffer.rank != 1:
            with races.expected():  # of copies that go on without what they waited for
                buffer.start(shard(buffer.rank, 0, 2), ring, 2, 2)
                buffer.slots.epoch[GAVE_UP.value] = 1
                buffer.finish()  # joins copies that wait for what rank 1 would have brought
            with pytest.raises(WaitTimeout):
                run_checks()
            seconds = time.monotonic() - begin
        dist.barrier()
        buffer.reset()
        for number in range(1, 5):
            gathered = buffer.start(shard(buffer.rank, number, 2), ring, 2, 2)
            for rank, received in enumerate(arrived(buffer, gathered, 2)):
                if rank != buffer.rank:
                    assert torch.equal(received, shard(rank, number, 2))
            buffer.finish()
            run_checks()
    buffer.slots.memory.barrier()
    buffer.free()
    return seconds


def test_copies_that_would_be_handed_on_are_released(on_ranks):
    assert max(on_ranks(4)(released_copies)) < 10


def test_a_freed_buffer_has_nothing_to_say():
    buffer = AllGatherBuffer(7, K, torch.float32, None, "freed")
    buffer.free()
    assert buffer.slots.timeout_words.timeout_error() is None


def test_a_gather_of_one_rank_has_nothing_to_bring():
    buffer = AllGatherBuffer(7, K, torch.float32, None, "alone")
    for method in METHODS:
        gathered = buffer.start(shard(0, 0, 5), method, 2, 2)
        assert gathered.rows.shape == (5, K)
        buffer.finish()
    buffer.free()


def test_the_workspace_is_apart_from_what_peers_write():
    buffer = AllGatherBuffer(6, K, torch.float32, None, "apart")
    before = {name: each.local.clone() for name, each in buffer.slots.memory._regions.items()}
    buffer.workspace.fill_(float("nan"))
    for region in buffer.slots.memory._regions.values():
        if region.name != "workspace":
            assert torch.equal(region.local, before[region.name]), region.name
    buffer.free()


def test_methods_print_as_they_are_typed():
    assert [repr(method) for method in AllGatherMethod] == [
        "AllGatherMethod.FULL_MESH_PUSH",
        "AllGatherMethod.RING_PUSH_1D",
        "AllGatherMethod.FUSED_PUSH",
        "AllGatherMethod.SERIAL",
    ]


@pytest.mark.parametrize("method", [AllGatherMethod.FUSED_PUSH, AllGatherMethod.SERIAL])
def test_a_transfer_without_copy_engines_is_not_started_alone(method):
    buffer = AllGatherBuffer(7, K, torch.float32, None, "fused")
    with pytest.raises(InvalidArgument, match="start_fused"):
        buffer.start(shard(0, 0, 5), method, 1, 1)
    assert buffer.slots.index == 0
    buffer.free()
