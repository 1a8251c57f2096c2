"""Symmetric memory of ranks that share a GPU: what is mapped, when it is given back, what is said
where it cannot be. Memory of CPU ranks stands for the GPU's."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.runtime.exact_memory import exact_memory
from tests.runtime.fake_ipc import FakeIpc
from tests.runtime.test_symmetric import REGIONS, check_regions
from triton_dist.errors import DeviceUnavailable, RanksFailed, SymmetricMemoryFull
from triton_dist.runtime import symmetric
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.symmetric import lease
from triton_dist.runtime.symmetric.shared_gpu import SharedGpuSymmetricMemory


def every_rank_sees_every_rank(members=None):
    FakeIpc().install()
    return check_regions(members)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_reads_and_writes_every_rank(spawn_ranks, world_size):
    for rank, names in enumerate(spawn_ranks(world_size, every_rank_sees_every_rank)):
        assert names == [
            "test.flags[2]" if peer == rank else f"test.flags of rank {peer}[2]"
            for peer in range(world_size)
        ]


def come_and_go():
    """Each time one rank is late to free; the other's block stays until then."""
    driver, ranks, held = FakeIpc().install(), group_for(), []
    for late in range(4):
        memory = symmetric.allocate("test", REGIONS)
        assert isinstance(memory, SharedGpuSymmetricMemory)
        assert (len(driver.own), len(driver.opened)) == (1, 1)  # none is left of the last round
        memory.barrier()
        if ranks.rank != late % 2:
            memory.free()
            memory.free()
            held.append(len(driver.own))
            assert not driver.opened
        ranks.barrier("the first is free")
        if ranks.rank == late % 2:
            memory.free()
            assert not driver.own  # the other has closed it, so it goes at once
    ranks.barrier("all is free")
    lease.end_retired()
    assert not driver.opened
    return held, len(driver.own)


def test_a_block_is_freed_when_all_others_have_closed_it(spawn_ranks):
    assert spawn_ranks(2, come_and_go) == [([1, 1], 0)] * 2


def forget():
    """Memory that is not freed goes with its last reference; peers are closed before the own."""
    driver = FakeIpc().install()
    memory = symmetric.allocate("test", REGIONS)
    memory.barrier()
    del memory
    gc.collect()
    dist.barrier()
    lease.end_retired()
    assert not driver.own
    assert not driver.opened
    return driver.log


def test_memory_goes_with_its_last_reference(spawn_ranks):
    once = ["allocate", "export", "open_", "open_", "close", "close", "free"]
    assert spawn_ranks(3, forget) == [once] * 3


def lose_a_peer(folder):
    """Rank 1 is killed while it has the memory of rank 0 open."""
    driver = FakeIpc().install()
    memory = symmetric.allocate("test", REGIONS)
    memory.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    memory.free()
    for _ in range(100):
        lease.end_retired()
        if not driver.own:
            (folder / "freed").touch()
            return
        time.sleep(0.05)


def test_a_rank_that_was_killed_keeps_nothing(spawn_ranks, tmp_path):
    with pytest.raises(RanksFailed, match="SIGKILL"):
        spawn_ranks(2, lose_a_peer, tmp_path)
    assert (tmp_path / "freed").exists()


def fork_while_mapped():
    """A child that a rank forks keeps nothing of its peers', and gives nothing back."""
    driver = FakeIpc().install()
    memory = symmetric.allocate("test", REGIONS)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        memory.free()
        os.read(ready, 1)
        os._exit(0)
    memory.barrier()
    assert driver.opened
    memory.free()
    dist.barrier()
    lease.end_retired()
    left = len(driver.own)
    os.write(go, b"x")
    os.waitpid(child, 0)
    return left


def test_a_fork_neither_keeps_nor_frees(spawn_ranks):
    assert spawn_ranks(2, fork_while_mapped) == [0, 0]


def on_one_rank(**limits):
    """Rank 1 has a driver with ``limits``; what the ranks say, and what is left allocated."""
    driver = FakeIpc(**(limits if dist.get_rank() == 1 else {})).install()
    with pytest.raises((DeviceUnavailable, SymmetricMemoryFull)) as refused:
        symmetric.allocate("test", {"region": ((1000,), torch.uint8)})
    dist.barrier()
    lease.end_retired()
    assert not driver.own
    assert not driver.opened
    driver.capacity, driver.refuses = 1 << 30, ()
    symmetric.allocate("then", REGIONS).free()
    return type(refused.value).__name__, str(refused.value)


def too_little():
    return on_one_rank(capacity=100)


@exact_memory
def test_too_little_memory_on_one_rank_is_an_error_on_all(spawn_ranks):
    (kind, said), *others = spawn_ranks(3, too_little)
    assert others == [(kind, said)] * 2
    assert kind == "SymmetricMemoryFull"
    assert said.startswith("test, rank 1, which shares a GPU (the CUDA driver refused")
    assert "needs 1024 bytes, 100 bytes are available. Use a smaller context or fewer ranks" in said


def refused(name):
    return on_one_rank(refuses=(name,))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("allocate", "rank 1 cannot share memory: the CUDA driver refused to allocate"),
        ("export", "rank 1 cannot share memory: the CUDA driver refused to export"),
        ("open_", "rank 1 cannot map the memory of another rank: the CUDA driver refused to open"),
    ],
)
def test_what_the_driver_refuses_on_one_rank_is_an_error_on_all(spawn_ranks, name, message):
    (kind, said), *others = spawn_ranks(3, refused, name)
    assert others == [(kind, said)] * 2
    assert kind == "DeviceUnavailable"
    assert message in said


def call_an_op():
    from tests.distributed import ag_gemm_ranks

    FakeIpc().install()
    return ag_gemm_ranks.every_schedule()


def test_an_op_over_such_memory(spawn_ranks):
    assert spawn_ranks(2, call_an_op) == [16] * 2
