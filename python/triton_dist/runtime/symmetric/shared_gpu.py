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


class LeaseOffer(NamedTuple):
    """Process and file descriptor through which other processes open the file."""

    pid: int
    fd: int


class LeaseOwner:
    """The file for memory of this process. ``release`` is called when the lease ends."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release
        self._fd = os.memfd_create("triton_dist-lease", os.MFD_CLOEXEC)
        self.offer = LeaseOffer(os.getpid(), self._fd)

    def end(self) -> bool:
        """Release the memory unless a process still uses it, and return whether it was released."""
        if os.getpid() != self.offer.pid:  # a forked child does not own the memory
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

    def __init__(self, offer: LeaseOffer) -> None:
        self._fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # a forked child may keep the file open
        os.close(self._fd)


_retired: list[LeaseOwner] = []


def retire(lease: LeaseOwner) -> None:
    """End ``lease``, now or in a later ``end_retired``, once no process uses its memory."""
    _retired.append(lease)
    end_retired()


def end_retired() -> None:
    """End all retired leases that are no longer in use."""
    _retired[:] = [lease for lease in _retired if not lease.end()]


os.register_at_fork(after_in_child=_retired.clear)


class _Offer(NamedTuple):
    """What other ranks need to map a rank's memory, or the reason why the rank has no memory."""

    handle: bytes = b""
    lease: LeaseOffer = LeaseOffer(0, 0)
    refusal: str = ""
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
            offers = self._ranks.all_gather(
                "shared GPU memory", self._offer(layout.nbytes, cleanup)
            )
            _raise_refusal(layout, offers, self._ranks)
            closing = cleanup.enter_context(ExitStack())  # closes before the own block is released
            addresses, refusal = self._open(offers, closing)
            # Every rank zeroes its block before this step. Afterwards all blocks may be used.
            refusals = self._ranks.all_gather("shared GPU memory is mapped", refusal)
            for rank, refusal in enumerate(refusals):
                if refusal:
                    raise DeviceUnavailable(
                        str(device),
                        f"rank {self._ranks.global_rank(rank)} cannot map the memory of another "
                        f"rank: {refusal}",
                        "Start all ranks in one container as one user, or start one rank per GPU.",
                    )
            self._release = weakref.finalize(self, _release, cleanup.pop_all(), os.getpid())
        self._release.atexit = False  # the driver frees memory of a process that ends or is killed
        blocks = [_tensor(address, layout.nbytes, device) for address in addresses]
        super().__init__(layout, self._ranks.rank, blocks, self._ranks.global_rank)

    def _offer(self, nbytes: int, cleanup: ExitStack) -> _Offer:
        """Allocate this rank's block and return what other ranks need to map it."""
        try:
            self._own = _allocate(nbytes)
        except MemoryError as failure:
            return _Offer(refusal=str(failure), free_bytes=cuda_driver.free_bytes())
        except RuntimeError as failure:
            return _Offer(refusal=str(failure))
        own = self._own
        try:
            leased = LeaseOwner(lambda: cuda_driver.free(own))
        except OSError as failure:
            cuda_driver.free(own)
            return _Offer(refusal=str(failure))
        cleanup.callback(retire, leased)
        try:
            handle = cuda_driver.export(own)
        except RuntimeError as failure:
            return _Offer(refusal=str(failure))
        _tensor(own, nbytes, self._device).zero_()
        current_device().synchronize()
        return _Offer(handle, leased.offer)

    def _open(self, offers: Sequence[_Offer], closing: ExitStack) -> tuple[list[int], str]:
        """Map all blocks. Return their addresses and "", or no addresses and the error's text."""
        addresses = []
        for rank, offer in enumerate(offers):
            if rank == self._ranks.rank:
                addresses.append(self._own)
                continue
            try:
                closing.callback(LeaseHolder(offer.lease).close)
                address = cuda_driver.open_(offer.handle)
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


def _raise_refusal(
    layout: Layout, offers: Sequence[_Offer], ranks: ProcessGroupRanks | SoloRank
) -> None:
    for rank, offer in enumerate(offers):
        if offer.free_bytes is not None:
            raise SymmetricMemoryFull(
                f"{layout.name}, rank {ranks.global_rank(rank)}, which shares a GPU "
                f"({offer.refusal})",
                layout.nbytes,
                offer.free_bytes,
                "Use a smaller context or fewer ranks, or free GPU memory.",
            )
        if offer.refusal:
            raise DeviceUnavailable(
                "cuda",
                f"rank {ranks.global_rank(rank)} cannot share memory: {offer.refusal}",
                "Use Linux with a driver and container that allow CUDA IPC, or start one rank per "
                "GPU.",
            )


def _tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a uint8 tensor over the memory at ``address``. The tensor does not own the memory."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
