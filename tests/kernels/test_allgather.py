"""The buffer of an all-gather without a consumer."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.gemm_calls import uniform
from triton_dist.debugging import races
from triton_dist.errors import InvalidArgument, WaitTimeout
from triton_dist.kernels.common.slots.epochs import GAVE_UP
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer, AllGatherMethod
from triton_dist.runtime import waits
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits

K = 8
SHARD = uniform(0, (5, K), torch.float32)


def test_a_gather_of_one_rank_has_nothing_to_bring():
    buffer = AllGatherBuffer(7, K, torch.float32, None, "alone")
    for method in (AllGatherMethod.FULL_MESH_PUSH, AllGatherMethod.RING_PUSH_1D):
        gathered = buffer.start(SHARD, method, 2, 2)
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
        buffer.start(SHARD, method, 1, 1)
    assert buffer.slots.index == 0
    buffer.free()


def arrived(buffer, gathered, rows):
    """Return the rows of all ranks, after the flag of each chunk has reached the epoch."""
    limit = time.monotonic() + 10
    for peer in set(range(buffer.num_ranks)) - {buffer.rank}:
        for chunk in range(-(-rows // gathered.chunk_rows)):
            flag = gathered.arrivals[peer * gathered.flags_per_rank + chunk]
            while int(flag) < int(gathered.epoch[0]):
                assert time.monotonic() < limit, (peer, chunk)
                time.sleep(1e-4)
    return gathered.rows.clone().split(rows)


def released_copies():
    """Leave out a call of a ring on rank 1. The other ranks give up, as a kernel on a GPU does.

    Returns:
        The seconds of their call, and whether its error names a flag of the all-gather.
    """
    ring = AllGatherMethod.RING_PUSH_1D
    buffer = AllGatherBuffer(2 * dist.get_world_size(), K, torch.float32, None, "test")
    seconds, named = 0.0, True
    with bounded_waits(20.0), waits.deferred_checks(current_device(), 20.0) as run_checks:
        begin = time.monotonic()
        if buffer.rank != 1:
            with races.expected():  # of copies that continue without the awaited data
                buffer.start(SHARD[:2] + buffer.rank, ring, 2, 2)
                buffer.slots.epoch[GAVE_UP.value] = 1
                buffer.finish(has_awaited_peers=True)  # joins copies that wait for data from rank 1
            with pytest.raises(WaitTimeout) as overdue:
                run_checks()
            seconds = time.monotonic() - begin
            named = overdue.value.flag.startswith("test.arrivals1[")
        dist.barrier()
        buffer.reset()
        for number in range(4):
            gathered = buffer.start(SHARD[:2] + 10 * number + buffer.rank, ring, 2, 2)
            for rank, received in enumerate(arrived(buffer, gathered, 2)):
                if rank != buffer.rank:
                    assert torch.equal(received, SHARD[:2] + 10 * number + rank)
            buffer.finish(has_awaited_peers=True)
            run_checks()
    buffer.slots.memory.barrier()
    buffer.free()
    return seconds, named


def test_copies_are_released_and_the_late_flag_is_named(on_ranks):
    for seconds, named in on_ranks(4)(released_copies):
        assert seconds < 10
        assert named
