"""The buffer of an all-gather in a world of one."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.gemm_calls import uniform
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer, AllGatherMethod

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
