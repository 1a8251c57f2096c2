"""Symmetric memory of ranks that share GPUs: each rank maps the memory of all ranks by CUDA IPC.

torch's symmetric memory rejects two ranks on one GPU. CUDA IPC works on one GPU, and between GPUs
with peer access.

A *lease* shows the owner of memory when no other process maps the memory any more. The owner
creates a file without a name (memfd). Each process that maps the memory opens this file through
``/proc/<pid>/fd/<n>`` and holds a shared lock on it. The operating system releases the lock when
the process closes the file or ends in any way. The owner needs no message and never waits, even if
a rank has died.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist

from triton_dist.errors import DeviceUnavailable, SymmetricMemoryFull
from triton_dist.runtime.device import cuda_driver, current_device
from triton_dist.runtime.ranks import ProcessGroupRanks, SoloRank, group_for
from triton_dist.runtime.symmetric.block import Layout, SymmetricMemory

_MAX_SYNCHRONIZE_SECONDS = 10.0


class LeaseFile(NamedTuple):
    """Process and file descriptor through which other processes open the file."""

    pid: int
    fd: int


class LeaseOwner:
    """The file for memory of this process. ``release`` is called when the lease ends."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release
        self._fd = os.memfd_create("triton_dist-lease", os.MFD_CLOEXEC)
        self.file = LeaseFile(os.getpid(), self._fd)

    def end(self) -> bool:
        """Release the memory unless a process still uses it, and return whether it was released."""
        if os.getpid() != self.file.pid:  # a forked child does not own the memory
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.close(self._fd)
        self._release()
        return True


class LeaseHolder:
    """Shared lock on the file for another process's memory, held until ``close``."""

    def __init__(self, file: LeaseFile) -> None:
        self._fd = os.open(f"/proc/{file.pid}/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # a forked child may keep the file open
        os.close(self._fd)


_retired: list[LeaseOwner] = []  # leases that end when no process uses their memory


def retire(lease: LeaseOwner) -> None:
    """End ``lease``, now or in a later ``end_retired``, once no process uses its memory."""
    _retired.append(lease)
    end_retired()


def end_retired() -> None:
    """End all retired leases that are no longer in use."""
    _retired[:] = [lease for lease in _retired if not lease.end()]


os.register_at_fork(after_in_child=_retired.clear)


class _ExportedBlock(NamedTuple):
    """What other ranks need to map a rank's memory, or the reason why the rank has no memory."""

    handle: bytes = b""
    lease: LeaseFile = LeaseFile(0, 0)
    error: str = ""
    free_bytes: int | None = None
    """Free bytes of the GPU, if they are too few."""


class SharedGpuSymmetricMemory(SymmetricMemory):
    """A block of memory for every rank, allocated by the CUDA driver API.

    ``free`` closes the mapped blocks of other ranks. It releases the rank's own block if all other
    ranks have closed that block or ended. Otherwise a later allocation releases it.
    """

    def __init__(self, layout: Layout, device: torch.device, group: dist.ProcessGroup) -> None:
        self._ranks, self._device = group_for(group), device
        layout.check_and_gather(self._ranks, None)
        cuda_driver.use_gpu(device.index)
        end_retired()  # all ranks are here, so they have closed all memory freed before
        with ExitStack() as cleanup:
            self._own = 0
            exported_blocks = self._ranks.all_gather(
                "shared GPU memory", self._export_block(layout.nbytes, cleanup)
            )
            _raise_first_error(layout, exported_blocks, self._ranks)
            closing = cleanup.enter_context(ExitStack())  # closes before the own block is released
            addresses, error = self._map_blocks(exported_blocks, closing)
            # Every rank zeroes its block before this step. Afterwards all blocks may be used.
            errors = self._ranks.all_gather("shared GPU memory is mapped", error)
            for rank, error in enumerate(errors):
                if error:
                    raise DeviceUnavailable(
                        str(device),
                        f"rank {self._ranks.global_rank(rank)} cannot map the memory of another "
                        f"rank: {error}",
                        "Start all ranks in one container as one user, or start one rank per GPU.",
                    )
            self._release = weakref.finalize(self, _release, cleanup.pop_all(), os.getpid())
        self._release.atexit = False  # the driver frees memory of a process that ends or is killed
        blocks = [_tensor(address, layout.nbytes, device) for address in addresses]
        super().__init__(layout, self._ranks.rank, blocks, self._ranks.global_rank)

    def _export_block(self, nbytes: int, cleanup: ExitStack) -> _ExportedBlock:
        """Allocate this rank's block and return what other ranks need to map it."""
        try:
            self._own = _allocate(nbytes)
        except MemoryError as failure:
            return _ExportedBlock(error=str(failure), free_bytes=cuda_driver.free_bytes())
        except RuntimeError as failure:
            return _ExportedBlock(error=str(failure))
        own = self._own
        try:
            leased = LeaseOwner(lambda: cuda_driver.free(own))
        except OSError as failure:
            cuda_driver.free(own)
            return _ExportedBlock(error=str(failure))
        cleanup.callback(retire, leased)
        try:
            handle = cuda_driver.export(own)
        except RuntimeError as failure:
            return _ExportedBlock(error=str(failure))
        _tensor(own, nbytes, self._device).zero_()
        current_device().synchronize()
        return _ExportedBlock(handle, leased.file)

    def _map_blocks(
        self, exported_blocks: Sequence[_ExportedBlock], closing: ExitStack
    ) -> tuple[list[int], str]:
        """Map all blocks. Return their addresses and "", or no addresses and the error's text."""
        addresses = []
        for rank, block in enumerate(exported_blocks):
            if rank == self._ranks.rank:
                addresses.append(self._own)
                continue
            try:
                closing.callback(LeaseHolder(block.lease).close)
                address = cuda_driver.open_(block.handle)
            except (OSError, RuntimeError, MemoryError) as failure:
                return [], str(failure)
            closing.callback(cuda_driver.close, address)  # runs before the lease is closed
            addresses.append(address)
        return addresses, ""

    def barrier(self) -> None:
        """Block the host until the queued work of all ranks' devices has finished."""
        current_device().synchronize()
        self._ranks.barrier(f"barrier of {self.name}")

    def free(self) -> None:
        if self._release.alive:
            super().free()
            self._release()


def _release(mapped: ExitStack, pid: int) -> None:
    """Unmap and release memory after the work that this process queued on the GPU."""
    if os.getpid() != pid:  # a forked child has mapped nothing
        return
    try:
        current_device().synchronize(_MAX_SYNCHRONIZE_SECONDS)
    except (TimeoutError, RuntimeError):
        # A kernel failed, or waits for a rank that has ended. The driver frees memory at exit.
        return
    mapped.close()


def _allocate(nbytes: int) -> int:
    try:
        return cuda_driver.allocate(nbytes)
    except MemoryError:
        torch.cuda.empty_cache()  # return memory that torch's caching allocator holds
        return cuda_driver.allocate(nbytes)


def _raise_first_error(
    layout: Layout, exported_blocks: Sequence[_ExportedBlock], ranks: ProcessGroupRanks | SoloRank
) -> None:
    for rank, block in enumerate(exported_blocks):
        if block.free_bytes is not None:
            raise SymmetricMemoryFull(
                f"{layout.name}, rank {ranks.global_rank(rank)}, which shares a GPU "
                f"({block.error})",
                layout.nbytes,
                block.free_bytes,
                "Use a smaller context or fewer ranks, or free GPU memory.",
            )
        if block.error:
            raise DeviceUnavailable(
                "cuda",
                f"rank {ranks.global_rank(rank)} cannot share memory: {block.error}",
                "Use Linux with a driver and container that allow CUDA IPC, or start one rank per "
                "GPU.",
            )


def _tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a uint8 tensor over the memory at ``address``. The tensor does not own the memory."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
