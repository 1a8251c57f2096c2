"""The all-gather without a consumer: what arrives, flags, slots, a new start after a failure."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.gemm_calls import uniform
from triton_dist.errors import InvalidArgument, WaitTimeout
from triton_dist.kernels.common.peers import flag_count
from triton_dist.kernels.common.slots.gathered import MAX_CHUNKS, AllGatherBuffer, AllGatherMethod

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
