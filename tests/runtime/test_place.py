"""The place of a rank: what the driver tells of it, and what ranks can share."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from triton_dist.runtime import sharing
from triton_dist.runtime.device import cuda_driver, cuda_ipc
from triton_dist.runtime.device.place import Place, refusal, share_a_gpu

ONE = Place("a", "boot 1", ("pid 1", "ipc 1"), "gpu 0", "0:1", ("gpu 0", "gpu 1"), ranks_per_gpu=2)
BESIDE = replace(ONE, gpu="gpu 1", bus="0:2")


def named(rank):
    return rank + 10


def test_ranks_that_share_a_gpu_may():
    assert share_a_gpu([ONE, ONE])
    assert share_a_gpu([BESIDE, ONE, ONE])
    assert not share_a_gpu([ONE, BESIDE])
    assert not share_a_gpu([ONE, replace(ONE, machine="boot 2")])
    assert share_a_gpu([ONE, replace(ONE, gpu="another part")])
    assert refusal([ONE, BESIDE, ONE, BESIDE], named) is None


@pytest.mark.parametrize(
    ("places", "message"),
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
            [ONE, replace(ONE, gpu="part", visible=("part",))],
            "rank 10 and rank 11 are on different MIG instances of one GPU",
        ),
        (
            [ONE, replace(ONE, visible=("gpu 0",))],
            "rank 10 and rank 11 see different GPUs, .* 2, the latter 1 .* CUDA_VISIBLE_DEVICES",
        ),
        ([ONE, ONE, ONE], "rank 10 is not alone on its GPU, .* launch.sh --share-gpus"),
        (
            [replace(ONE, ranks_per_gpu=1)] * 2,
            "sharing was not asked for. .* TRITON_DIST_SHARE_GPUS=1",
        ),
        (
            [BESIDE, ONE, replace(ONE, is_exclusive=True)],
            "GPU of rank 12 .* --compute-mode=DEFAULT",
        ),
        ([replace(ONE, is_mps=True)] * 2, "rank 10 uses its GPU through MPS.* quit"),
    ],
)
def test_what_cannot_be_shared_is_named_with_the_remedy(places, message):
    refused = refusal(places, named)
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
    place = Place.of(1)
    assert place.visible == ("00" * 15 + "05", "00" * 15 + "06")
    assert (place.gpu, place.bus) == (place.visible[1], "0000:6")
    assert (place.is_exclusive, place.is_mps, place.ranks_per_gpu) == (True, True, 1)
    assert all(place.namespaces)
    assert place.machine
    assert not any("Ctx" in name for name in driver.calls)


def test_attributes_that_a_driver_does_not_know_are_no(driver, monkeypatch):
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda *_: 1)
    place = Place.of(0)
    assert not place.is_exclusive
    assert not place.is_mps


def test_memory_goes_through_the_driver_whole(driver):
    cuda_ipc.use_gpu(0)
    address = cuda_ipc.allocate((2 << 20) + 1)  # whole units: IPC shares no less
    handle = cuda_ipc.export(address)
    assert len(handle) == 64
    opened = cuda_ipc.open_(handle)
    assert (address, opened) == (1 << 40, 1 << 41)
    cuda_ipc.close(opened)
    cuda_ipc.free(address)
    assert cuda_ipc.free_bytes() == 123
    driver.status = cuda_driver.OUT_OF_MEMORY
    with pytest.raises(MemoryError, match="refused to allocate 4194304 bytes: out of memory"):
        cuda_ipc.allocate(4 << 20)


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
