"""Memory that CPU ranks map from one another with the words of CUDA IPC, without a GPU.

``install`` puts it where the driver's calls are, in this process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field

from triton_dist.runtime import symmetric
from triton_dist.runtime.device import cuda_driver
from triton_dist.runtime.symmetric.shared_gpu import SharedGpuSymmetricMemory


@dataclass
class FakeIpc:
    """What one process has allocated and opened, by address."""

    capacity: int = 1 << 40
    refuses: tuple[str, ...] = ()
    """Functions that the driver refuses."""
    own: dict[int, int] = field(default_factory=dict)
    opened: dict[int, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    _maps: dict[int, tuple[mmap.mmap, ctypes.c_char]] = field(default_factory=dict)

    def install(self) -> FakeIpc:
        for name in ("allocate", "free", "export", "open_", "close", "free_bytes"):
            setattr(cuda_driver, name, self._watched(name))
        cuda_driver.use_gpu = lambda ordinal: None
        symmetric.HostSymmetricMemory = lambda layout, group: SharedGpuSymmetricMemory(
            layout, symmetric.current_device().torch_device, group
        )
        return self

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.capacity:
            raise MemoryError("the CUDA driver refused to allocate: out of memory")
        fd = os.memfd_create("fake GPU memory")
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, b"\xff" * min(nbytes, 4096), 0)  # as it comes, not zero
        address = self._map(fd, nbytes)
        self.own[address] = fd
        return address

    def free_bytes(self) -> int:
        return self.capacity

    def free(self, address: int) -> None:
        os.close(self.own.pop(address))
        self._unmap(address)

    def export(self, address: int) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self.own[address]}".encode()

    def open_(self, handle: bytes) -> int:
        fd = os.open(handle.decode(), os.O_RDWR)
        try:
            address = self._map(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        self.opened[address] = handle.decode()
        return address

    def close(self, address: int) -> None:
        del self.opened[address]
        self._unmap(address)

    def _watched(self, name):
        def call(*arguments):
            self.log.append(name)
            if name in self.refuses:
                raise RuntimeError(f"the CUDA driver refused to {name}: not supported (801)")
            return getattr(self, name)(*arguments)

        return call

    def _map(self, fd: int, nbytes: int) -> int:
        memory = mmap.mmap(fd, nbytes)
        first = ctypes.c_char.from_buffer(memory)
        self._maps[ctypes.addressof(first)] = memory, first
        return ctypes.addressof(first)

    def _unmap(self, address: int) -> None:
        memory, first = self._maps.pop(address)
        del first
        memory.close()
