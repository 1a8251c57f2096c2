"""Symmetric memory of CPU ranks on one host: POSIX shared memory that every rank maps.

Each rank creates an unnamed file in /dev/shm (``O_TMPFILE``). Other ranks open the file through
``/proc/<pid>/fd/<n>``. The file disappears with the processes, even if they are killed.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
import torch.distributed as dist

from triton_dist.errors import SymmetricMemoryFull
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.symmetric.block import Layout, SymmetricMemory

SHARED_MEMORY = Path("/dev/shm")


class HostSymmetricMemory(SymmetricMemory):
    def __init__(self, layout: Layout, group: dist.ProcessGroup) -> None:
        self._ranks = group_for(group)
        own_fd = os.open(SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            available_bytes = _reserve(own_fd, layout.nbytes)
            files = layout.check_and_gather(self._ranks, (os.getpid(), own_fd, available_bytes))
            for rank, (_, _, available_bytes) in enumerate(files):
                if available_bytes is not None:
                    raise SymmetricMemoryFull(
                        f"{layout.name}, rank {self._ranks.global_rank(rank)}, {SHARED_MEMORY}",
                        layout.nbytes,
                        available_bytes,
                        f"Enlarge {SHARED_MEMORY} (mount -o remount,size=…, docker run "
                        "--shm-size=…) or use a smaller context.",
                    )
            blocks = [_map(f"/proc/{pid}/fd/{fd}", layout.nbytes) for pid, fd, _ in files]
            self._ranks.barrier("symmetric memory is mapped")
        finally:
            os.close(own_fd)
        super().__init__(layout, self._ranks.rank, blocks, self._ranks.global_rank)

    def barrier(self) -> None:
        self._ranks.barrier(f"barrier of {self.name}")


def _reserve(fd: int, nbytes: int) -> int | None:
    """Allocate the file's pages now: if /dev/shm is full, a later access would raise SIGBUS.
    Returns ``None`` on success, and the number of available bytes if /dev/shm is full."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.ftruncate(fd, 0)
        state = os.statvfs(SHARED_MEMORY)
        return state.f_bavail * state.f_frsize
    return None


def _map(path: str, nbytes: int) -> torch.Tensor:
    """Map a file and return its bytes as a uint8 tensor. The tensor keeps the mapping alive."""
    fd = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    finally:
        os.close(fd)
