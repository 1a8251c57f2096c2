"""Detect whether ranks share a host and a GPU, and whether they can then share memory."""

from __future__ import annotations

import ctypes
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from triton_dist.errors import DeviceUnavailable
from triton_dist.runtime.device import cuda_driver
from triton_dist.runtime.sharing import ranks_per_gpu

_COMPUTE_MODE, _MPS_ENABLED = 20, 133  # CU_DEVICE_ATTRIBUTE_…
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")


@dataclass(frozen=True)
class Place:
    """Host, container and GPU of a rank's process."""

    host: str
    machine: str
    """Boot id: equal for all containers of a machine until it reboots."""
    namespaces: tuple[str, str]
    """PID and IPC namespaces."""
    gpu: str
    """UUID of the GPU or MIG instance."""
    bus: str
    """PCI address: equal for all MIG instances of a GPU."""
    visible: tuple[str, ...]
    """UUIDs of all visible GPUs, in CUDA's order."""
    ranks_per_gpu: int = 1
    """Maximum number of ranks per GPU that this process is configured for."""
    is_exclusive: bool = False
    is_mps: bool = False
    """True if MPS runs the processes of a GPU concurrently instead of time-slicing them."""

    @classmethod
    def of(cls, ordinal: int) -> Place:
        """Return the place of this process, without creating a CUDA context."""
        cuda_driver.call("cuInit", "start", 0)
        count = ctypes.c_int()
        cuda_driver.call("cuDeviceGetCount", "count GPUs", ctypes.byref(count))
        visible = tuple(_uuid(each) for each in range(count.value))
        bus = ctypes.create_string_buffer(32)
        what = f"return the location of GPU {ordinal}"
        cuda_driver.call("cuDeviceGetPCIBusId", what, bus, 32, cuda_driver.device(ordinal))
        machine = ""
        with suppress(OSError):
            machine = _BOOT.read_text().strip()
        return cls(
            host=socket.gethostname(),
            machine=machine,
            namespaces=(_namespace("pid"), _namespace("ipc")),
            gpu=visible[ordinal],
            bus=bus.value.decode(),
            visible=visible,
            ranks_per_gpu=ranks_per_gpu(),
            is_exclusive=_attribute(_COMPUTE_MODE, ordinal) != 0,
            is_mps=_attribute(_MPS_ENABLED, ordinal) == 1,
        )

    def is_gpu_of(self, other: Place) -> bool:
        """Return whether both are on one GPU, or on MIG instances of one GPU."""
        return (self.machine, self.bus) == (other.machine, other.bus)


def share_a_gpu(places: Sequence[Place]) -> bool:
    """Return whether two or more ranks are on one GPU."""
    return len({(place.machine, place.bus) for place in places}) < len(places)


def sharing_error(
    places: Sequence[Place], global_rank: Callable[[int], object]
) -> DeviceUnavailable | None:
    """Return why ranks that share a GPU cannot share memory, or ``None`` if they can.

    The result is equal on all ranks. ``global_rank`` returns the rank to show in the message.
    """
    first = places[0]
    on_gpu = Counter((place.machine, place.bus) for place in places)
    for rank, place in enumerate(places):
        pair = f"rank {global_rank(0)} and rank {global_rank(rank)}"
        reasons = (
            (
                place.machine != first.machine,
                f"{pair} are on different hosts, {first.host} and {place.host}, but ranks that "
                "share GPUs must be on one host",
                "Start all ranks on one host, or one rank per GPU.",
            ),
            (
                place.namespaces != first.namespaces,
                f"{pair} are in containers that do not see each other's processes and memory",
                "Start all ranks in one container, or these with --ipc=host --pid=host.",
            ),
            (
                place.is_gpu_of(first) and place.gpu != first.gpu,
                f"{pair} are on different MIG instances of one GPU, which share no memory",
                "Give all ranks of the host the same instance, or the GPU without MIG.",
            ),
            (
                place.visible != first.visible,
                f"{pair} see different GPUs: {len(first.visible)} and {len(place.visible)}",
                "Give all ranks of the host the same CUDA_VISIBLE_DEVICES.",
            ),
            (
                on_gpu[place.machine, place.bus] > place.ranks_per_gpu,
                f"rank {global_rank(rank)} is not alone on its GPU, and sharing was not requested",
                "Start one rank per GPU; or let ranks share GPUs: launch.sh "
                "--share-gpus, which sets TRITON_DIST_SHARE_GPUS=1.",
            ),
            (
                place.is_exclusive,
                f"the GPU of rank {global_rank(rank)} accepts only one process: its compute mode "
                "is not 'Default'",
                "Allow several processes: nvidia-smi --compute-mode=DEFAULT.",
            ),
            (
                place.is_mps,
                f"rank {global_rank(rank)} uses its GPU through MPS, where a waiting kernel "
                "may occupy the multiprocessors that the awaited kernel needs",
                "End MPS (echo quit | nvidia-cuda-mps-control), so that ranks take turns.",
            ),
        )
        for holds, why, remedy in reasons:
            if holds:
                return DeviceUnavailable("cuda", why, remedy)
    return None


def _uuid(ordinal: int) -> str:
    uuid = cuda_driver.Uuid()
    gpu = cuda_driver.device(ordinal)
    cuda_driver.call("cuDeviceGetUuid_v2", f"name GPU {ordinal}", ctypes.byref(uuid), gpu)
    return bytes(uuid.bytes).hex()


def _attribute(attribute: int, ordinal: int) -> int:
    """Return a device attribute; 0 if this driver does not have it."""
    value = ctypes.c_int()
    status = cuda_driver.function("cuDeviceGetAttribute")(
        ctypes.byref(value), attribute, cuda_driver.device(ordinal)
    )
    return value.value if status == 0 else 0


def _namespace(kind: str) -> str:
    with suppress(OSError):
        return os.readlink(_NAMESPACES / kind)
    return ""
