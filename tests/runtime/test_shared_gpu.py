"""Ranks that share a GPU: their location, and their symmetric memory, for which memory of CPU ranks
stands in."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.runtime.fake_ipc import FakeIpc
from tests.runtime.test_symmetric import REGIONS, check_regions, exact_memory
from triton_dist._tuning import shared
from triton_dist.errors import DeviceUnavailable, RanksFailed, SymmetricMemoryFull, TuningWarning
from triton_dist.kernels.common import libraries
from triton_dist.runtime import sharing, symmetric, waits
from triton_dist.runtime.device import cuda, cuda_driver
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.runtime.device.cuda import CudaDevice
from triton_dist.runtime.device.location import RankLocation, share_a_gpu, sharing_error
from triton_dist.runtime.ranks import SoloRank, group_for
from triton_dist.runtime.symmetric.shared_gpu import SharedGpuSymmetricMemory, end_retired


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
    end_retired()
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
    end_retired()
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
        end_retired()
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
    end_retired()
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
    end_retired()
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


ONE = RankLocation(
    "a", "boot 1", ("pid 1", "ipc 1"), "gpu 0", "0:1", ("gpu 0", "gpu 1"), ranks_per_gpu=2
)
BESIDE = replace(ONE, gpu="gpu 1", pci_address="0:2")


def named(rank):
    return rank + 10


def test_ranks_that_share_a_gpu_may():
    assert share_a_gpu([ONE, ONE])
    assert share_a_gpu([BESIDE, ONE, ONE])
    assert not share_a_gpu([ONE, BESIDE])
    assert not share_a_gpu([ONE, replace(ONE, machine="boot 2")])
    assert share_a_gpu([ONE, replace(ONE, gpu="another part")])
    assert sharing_error([ONE, BESIDE, ONE, BESIDE], named) is None


@pytest.mark.parametrize(
    ("locations", "message"),
    [
        (
            [ONE, ONE, replace(ONE, host="b", machine="boot 2")],
            "rank 10 and rank 12 are on different hosts, a and b, .* one rank per GPU",
        ),
        (
            [ONE, replace(ONE, namespaces=("pid 2", "ipc 1"))],
            "rank 10 and rank 11 are in containers that .* --ipc=host --pid=host",
        ),
        (
            [ONE, replace(ONE, namespaces=("pid 1", "ipc 2"))],
            "rank 10 and rank 11 are in containers that .* --ipc=host --pid=host",
        ),
        (
            [ONE, replace(ONE, gpu="part", visible_gpus=("part",))],
            "rank 10 and rank 11 are on different MIG instances of one GPU",
        ),
        (
            [ONE, replace(ONE, visible_gpus=("gpu 0",))],
            "rank 10 and rank 11 see different GPUs: 2 and 1. .* CUDA_VISIBLE_DEVICES",
        ),
        ([ONE, ONE, ONE], "rank 10 is not alone on its GPU, .* launch.sh --share-gpus"),
        (
            [replace(ONE, ranks_per_gpu=1)] * 2,
            "sharing was not requested. .* TRITON_DIST_SHARE_GPUS=1",
        ),
        (
            [BESIDE, ONE, replace(ONE, is_exclusive=True)],
            "GPU of rank 12 .* --compute-mode=DEFAULT",
        ),
        ([replace(ONE, is_mps=True)] * 2, "rank 10 uses its GPU through MPS.* quit"),
    ],
)
def test_what_cannot_be_shared_is_named_with_the_remedy(locations, message):
    refused = sharing_error(locations, named)
    assert refused is not None
    with pytest.raises(type(refused), match=message):
        raise refused


class Driver:
    """Two GPUs; the answers of cuda_driver.function."""

    attributes = {20: 3, 133: 1}  # noqa: RUF012

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 0

    def __call__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return getattr(self, name)(*arguments) or self.status

        return call

    def cuInit(self, flags):
        assert flags == 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = 5 + ordinal

    def cuDeviceGetCount(self, count):
        count._obj.value = 2

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid._obj.bytes[15] = device

    def cuDeviceGetPCIBusId(self, text, length, device):
        assert length == len(text)
        text.value = f"0000:{device}".encode()

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert device == 6
        value._obj.value = self.attributes[attribute]

    def cuCtxGetCurrent(self, context):
        context._obj.value = 77

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 77

    def cuMemAlloc_v2(self, address, size):
        assert size == 4 << 20
        address._obj.value = 1 << 40

    def cuMemGetInfo_v2(self, free, total):
        free._obj.value = 123

    def cuIpcGetMemHandle(self, handle, address):
        assert address == 1 << 40
        ctypes.memmove(handle, b"a\0b" + bytes(61), 64)

    def cuIpcOpenMemHandle_v2(self, address, handle, flags):
        assert bytes(handle)[:3] == b"a\0b"
        assert flags == 1
        address._obj.value = 1 << 41

    def cuIpcCloseMemHandle(self, address):
        assert address == 1 << 41

    def cuMemFree_v2(self, address):
        assert address == 1 << 40


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "function", driver)
    return driver


def test_the_driver_is_asked_without_making_a_context(driver):
    location = RankLocation.of(1)
    assert location.visible_gpus == ("00" * 15 + "05", "00" * 15 + "06")
    assert (location.gpu, location.pci_address) == (location.visible_gpus[1], "0000:6")
    assert (location.is_exclusive, location.is_mps, location.ranks_per_gpu) == (True, True, 1)
    assert all(location.namespaces)
    assert location.machine
    assert not any("Ctx" in name for name in driver.calls)


def test_attributes_that_a_driver_does_not_know_are_no(driver, monkeypatch):
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda *_: 1)
    location = RankLocation.of(0)
    assert not location.is_exclusive
    assert not location.is_mps


def test_memory_goes_through_the_driver_whole(driver):
    cuda_driver.use_gpu(0)
    address = cuda_driver.allocate((2 << 20) + 1)  # whole units: IPC shares no less
    handle = cuda_driver.export(address)
    assert len(handle) == 64
    opened = cuda_driver.open_(handle)
    assert (address, opened) == (1 << 40, 1 << 41)
    cuda_driver.close(opened)
    cuda_driver.free(address)
    assert cuda_driver.free_bytes() == 123
    driver.status = cuda_driver.OUT_OF_MEMORY
    with pytest.raises(MemoryError, match="refused to allocate 4194304 bytes: out of memory"):
        cuda_driver.allocate(4 << 20)


@pytest.mark.parametrize(
    ("ranks", "gpus", "each", "placed"),
    [
        (4, 1, 4, [0, 0, 0, 0]),
        (4, 2, 2, [0, 0, 1, 1]),
        (3, 2, 2, [0, 0, 1]),
        (5, 4, 2, [0, 0, 1, 2, 3]),
        (4, 4, 1, [0, 1, 2, 3]),
        (2, 4, 1, [0, 1]),
    ],
)
def test_where_ranks_are_put(monkeypatch, ranks, gpus, each, placed):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert sharing.ranks_per_gpu() == 1
    assert [sharing.gpu_of(rank) for rank in range(ranks)] == list(range(ranks))
    monkeypatch.setenv("TRITON_DIST_SHARE_GPUS", "1")
    assert sharing.ranks_per_gpu() == each
    assert [sharing.gpu_of(rank) for rank in range(ranks)] == placed


@pytest.fixture
def gpu(monkeypatch):
    """One H200."""
    properties = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=132, clock_rate=1, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "is_interpreting", lambda: False)
    monkeypatch.setattr(cuda, "_driver_version", lambda: "580.1")
    return CudaDevice(0)


@pytest.fixture
def four_share(monkeypatch):
    """Four ranks on it."""
    monkeypatch.setenv("TRITON_DIST_SHARE_GPUS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


RANKS = SimpleNamespace(facts=lambda: {"world_size": "4", "local_world_size": "4"}, is_leader=True)
ALONE = "cuda, NVIDIA H200, local_world_size 4, world_size 4"


def test_one_rank_a_gpu_has_the_records_that_it_had(gpu, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # more than GPUs, and not asked to share
    assert shared.hardware_of(gpu, RANKS) == ALONE
    assert gpu.facts()["gpu"] == "NVIDIA H200"


def test_records_of_a_shared_gpu_lie_apart_and_do_not_hold(gpu, four_share):
    mark = "NVIDIA H200 (shared by 4 ranks)"
    assert shared.hardware_of(gpu, RANKS) == ALONE.replace("NVIDIA H200", mark)
    assert gpu.facts()["gpu"] == mark
    assert mark in shared.hardware_of(gpu, SoloRank())  # a rank that tunes alone is not alone


def test_a_shared_gpu_has_no_libraries_that_need_one_alone(gpu, monkeypatch):
    assert gpu.has_nccl
    assert gpu.has_async_tp
    monkeypatch.setattr(libraries, "current_device", lambda: gpu)
    both = list(libraries.LibraryAlgorithm)
    assert libraries.supported_library_algorithms(libraries.ALL_GATHER_MATMUL) == both
    assert libraries.candidate_library_algorithms(libraries.ALL_GATHER_MATMUL) == both
    monkeypatch.setenv("TRITON_DIST_SHARE_GPUS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not gpu.has_nccl
    assert not gpu.has_async_tp
    # Asked for by name, the group's collective goes through the host.
    assert libraries.supported_library_algorithms(libraries.ALL_GATHER_MATMUL) == [
        libraries.LibraryAlgorithm.COLLECTIVE
    ]
    assert libraries.candidate_library_algorithms(libraries.ALL_GATHER_MATMUL) == []


def tunings(device, ranks):
    """Warnings of two tunings."""
    shared._warn_of_shared_gpus.cache_clear()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(2):
            with shared._bounded_trials(device, ranks, 1.0):
                assert waits.limit_seconds() == 1.0
    return [(each.category, str(each.message)) for each in given]


def test_the_leader_says_once_that_times_mean_little(gpu, four_share):
    ((category, text),) = tunings(gpu, RANKS)
    assert category is TuningWarning
    assert text.startswith("4 ranks share a GPU and run alternately on it")
    assert tunings(gpu, SimpleNamespace(is_leader=False)) == []


def test_others_are_not_warned(gpu, four_share, monkeypatch):
    assert tunings(CpuDevice(), RANKS) == []
    monkeypatch.delenv("TRITON_DIST_SHARE_GPUS")
    assert tunings(gpu, RANKS) == []
