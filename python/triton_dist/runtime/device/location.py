"""Detect which ranks share a host or a GPU, and whether ranks on a GPU can share its memory."""

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
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")


@dataclass(frozen=True)
class RankLocation:
    """Host, container and GPU of a rank's process."""

    host: str
    machine: str
    """Boot id, which is equal in all containers of a machine until the machine reboots."""
    namespaces: tuple[str, str]
    """PID and IPC namespaces."""
    gpu: str
    """UUID of the GPU or MIG instance."""
    pci_address: str
    """PCI address, which is equal for all MIG instances of a GPU."""
    visible_gpus: tuple[str, ...]
    """UUIDs of all visible GPUs, in CUDA's order."""
    ranks_per_gpu: int = 1
    """Maximum number of ranks per GPU that this process is configured for."""
    is_exclusive: bool = False
    is_mps: bool = False
    """Whether processes use the GPU through MPS, which does not time-slice their kernels."""

    @classmethod
    def of(cls, ordinal: int) -> RankLocation:
        """Return the location of this process on GPU ``ordinal``. Creates no CUDA context."""
        cuda_driver.call("cuInit", "start", 0)
        count = ctypes.c_int()
        cuda_driver.call("cuDeviceGetCount", "count GPUs", ctypes.byref(count))
        visible_gpus = tuple(_uuid(each) for each in range(count.value))
        pci_address = ctypes.create_string_buffer(32)
        action = f"return the location of GPU {ordinal}"
        cuda_driver.call(
            "cuDeviceGetPCIBusId", action, pci_address, 32, cuda_driver.device(ordinal)
        )
        machine = ""
        with suppress(OSError):
            machine = _BOOT_ID_FILE.read_text().strip()
        return cls(
            host=socket.gethostname(),
            machine=machine,
            namespaces=(_namespace("pid"), _namespace("ipc")),
            gpu=visible_gpus[ordinal],
            pci_address=pci_address.value.decode(),
            visible_gpus=visible_gpus,
            ranks_per_gpu=ranks_per_gpu(),
            is_exclusive=_attribute(_COMPUTE_MODE, ordinal) != 0,
            is_mps=_attribute(_MPS_ENABLED, ordinal) == 1,
        )

    def shares_gpu_with(self, other: RankLocation) -> bool:
        """Return whether two ranks use one GPU, or MIG instances of one GPU."""
        return (self.machine, self.pci_address) == (other.machine, other.pci_address)


def share_a_gpu(locations: Sequence[RankLocation]) -> bool:
    return len({(each.machine, each.pci_address) for each in locations}) < len(locations)


def sharing_error(
    locations: Sequence[RankLocation], global_rank: Callable[[int], object]
) -> DeviceUnavailable | None:
    """Return an error if ranks that share GPUs cannot map each other's memory, else ``None``.

    The result is equal on all ranks. ``locations`` are ordered by rank. ``global_rank`` returns the
    number for a rank in the message.
    """
    first = locations[0]
    ranks_on_gpu = Counter((location.machine, location.pci_address) for location in locations)
    for rank, location in enumerate(locations):
        pair = f"rank {global_rank(0)} and rank {global_rank(rank)}"
        reasons = (
            (
                location.machine != first.machine,
                f"{pair} are on different hosts, {first.host} and {location.host}, but ranks that "
                "share GPUs must be on one host",
                "Start all ranks on one host, or one rank per GPU.",
            ),
            (
                location.namespaces != first.namespaces,
                f"{pair} are in containers that do not see each other's processes and memory",
                "Start all ranks in one container, or all containers with --ipc=host --pid=host.",
            ),
            (
                location.shares_gpu_with(first) and location.gpu != first.gpu,
                f"{pair} are on different MIG instances of one GPU, which share no memory",
                "Give all ranks of the host the same instance, or the GPU without MIG.",
            ),
            (
                location.visible_gpus != first.visible_gpus,
                f"{pair} see different GPUs: {len(first.visible_gpus)} and "
                f"{len(location.visible_gpus)}",
                "Give all ranks of the host the same CUDA_VISIBLE_DEVICES.",
            ),
            (
                ranks_on_gpu[location.machine, location.pci_address] > location.ranks_per_gpu,
                f"rank {global_rank(rank)} is not alone on its GPU, and sharing was not requested",
                "Start one rank per GPU; or let ranks share GPUs: launch.sh "
                "--share-gpus, which sets TRITON_DIST_SHARE_GPUS=1.",
            ),
            (
                location.is_exclusive,
                f"the GPU of rank {global_rank(rank)} accepts only one process: its compute mode "
                "is not 'Default'",
                "Allow several processes: nvidia-smi --compute-mode=DEFAULT.",
            ),
            (
                location.is_mps,
                f"rank {global_rank(rank)} uses its GPU through MPS, where a waiting kernel "
                "may occupy the multiprocessors that the awaited kernel needs",
                "End MPS (echo quit | nvidia-cuda-mps-control): then GPUs are time-sliced.",
            ),
        )
        for applies, reason, remedy in reasons:
            if applies:
                return DeviceUnavailable("cuda", reason, remedy)
    return None


def _uuid(ordinal: int) -> str:
    uuid = cuda_driver.Uuid()
    gpu = cuda_driver.device(ordinal)
    cuda_driver.call("cuDeviceGetUuid_v2", f"name GPU {ordinal}", ctypes.byref(uuid), gpu)
    return bytes(uuid.bytes).hex()


def _attribute(attribute: int, ordinal: int) -> int:
    """Return a device attribute, or 0 if the driver does not support it."""
    value = ctypes.c_int()
    status = cuda_driver.function("cuDeviceGetAttribute")(
        ctypes.byref(value), attribute, cuda_driver.device(ordinal)
    )
    return value.value if status == 0 else 0


def _namespace(name: str) -> str:
    with suppress(OSError):
        return os.readlink(_NAMESPACES / name)
    return ""
