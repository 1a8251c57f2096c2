"""Interface of symmetric memory, and its implementation for a single rank."""

from __future__ import annotations

import itertools
import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from triton_dist.errors import InvalidArgument, RankDisagreement, SymmetricMemoryFull
from triton_dist.runtime import addresses

T = TypeVar("T")
_ALIGNMENT = 512
"""Bytes; more than TMA (16) and a cache line (128) require. Regions never share a cache line."""
_allocation_counters: dict[tuple[str, tuple[int, ...]], Iterator[int]] = {}
"""Counters of allocations, by memory name and global ranks. They are equal on all ranks of a group,
because allocation is collective."""


@dataclass(frozen=True)
class Layout:
    """Offsets of the named regions in one allocation of ``nbytes`` bytes."""

    name: str
    nbytes: int
    regions: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]
    """Name, offset in bytes, shape and dtype of each region."""

    @classmethod
    def of(cls, name: str, regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Layout:
        offset, placed = 0, []
        for region, shape_and_dtype in regions.items():
            shape, dtype = _check_shape_and_dtype(region, shape_and_dtype)
            placed.append((region, offset, shape, dtype))
            nbytes = math.prod(shape) * dtype.itemsize
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(name, max(offset, _ALIGNMENT), tuple(placed))

    def check_and_gather(self, ranks: Any, value: T) -> list[T]:
        """Check that all ranks use this layout, and gather ``value`` from all ranks. Collective.

        Raises:
            RankDisagreement: the layouts of ranks differ.
        """
        own = ", ".join(f"{name} {list(shape)} {dtype}" for name, _, shape, dtype in self.regions)
        gathered = ranks.all_gather("symmetric allocation", (f"{self.name}: {own}", value))
        if len({layout for layout, _ in gathered}) > 1:
            by_rank = {ranks.global_rank(rank): each for rank, (each, _) in enumerate(gathered)}
            raise RankDisagreement("symmetric regions", by_rank)
        return [value for _, value in gathered]


def _check_shape_and_dtype(
    region: str, shape_and_dtype: Any
) -> tuple[tuple[int, ...], torch.dtype]:
    try:
        shape, dtype = shape_and_dtype
        sizes = tuple(map(operator.index, shape))
    except (TypeError, ValueError):
        sizes, dtype = (), None
    if not isinstance(dtype, torch.dtype) or min(sizes, default=0) < 0:
        expected = "a shape and a torch.dtype, such as ((4,), torch.int32)"
        argument = f"regions[{region!r}]"
        raise InvalidArgument("symmetric.allocate", argument, shape_and_dtype, expected)
    return sizes, dtype


@dataclass(frozen=True)
class Region:
    """A named region with equal shape and dtype on every rank.

    Attributes:
        local: this rank's tensor.
        peers: each rank's tensor, mapped in this process; ``peers[rank]`` is ``local``.
        pointers: int64 [number of ranks] on the device: addresses of ``peers``, for kernels.
    """

    name: str
    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    pointers: torch.Tensor


class SymmetricMemory(AbstractContextManager["SymmetricMemory"]):
    """Named regions in the memory of every rank of a group. Use as a context manager, or call
    ``free``. ``blocks`` are the bytes of each rank, mapped in this process."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        blocks: Sequence[torch.Tensor],
        global_rank: Callable[[int], int] = int,
    ) -> None:
        ranks = tuple(map(global_rank, range(len(blocks))))
        number = next(_allocation_counters.setdefault((layout.name, ranks), itertools.count()))
        self.name = layout.name
        self.rank = rank
        self._regions: dict[str, Region] = {}
        device = blocks[rank].device
        for name, offset, shape, dtype in layout.regions:
            nbytes = math.prod(shape) * dtype.itemsize
            peers = tuple(
                block[offset : offset + nbytes].view(dtype).view(shape) for block in blocks
            )
            pointers = torch.tensor(
                [peer.data_ptr() for peer in peers], dtype=torch.int64, device=device
            )
            self._regions[name] = Region(name, peers[rank], peers, pointers)
            for peer, view in enumerate(peers):
                owner = "" if peer == rank else f" of rank {peer}"
                addresses.register(
                    view.data_ptr(), nbytes, dtype.itemsize, f"{layout.name}.{name}{owner}", shape,
                    f"{layout.name}.{name} #{number} of rank {ranks[peer]} in {ranks}",
                )  # fmt: skip

    def __getitem__(self, region: str) -> Region:
        return self._regions[region]

    @abstractmethod
    def barrier(self) -> None:
        """Make the current stream wait until the current streams of all ranks reach this call.
        Some implementations block the host too."""

    def free(self) -> None:
        """Free the memory. Idempotent. Tensors of its regions must not be used afterwards."""
        for region in self._regions.values():
            for peer in region.peers:
                addresses.forget(peer.data_ptr())
        self._regions.clear()

    def __exit__(self, *_: object) -> None:
        self.free()


class SoloSymmetricMemory(SymmetricMemory):
    def __init__(self, layout: Layout, device: torch.device) -> None:
        try:
            block = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as failure:  # includes torch.OutOfMemoryError
            available = 0
            if device.type == "cuda":
                available = torch.cuda.mem_get_info(device)[0]
            raise SymmetricMemoryFull(
                f"{layout.name} ({failure})", layout.nbytes, available, "Use a smaller context."
            ) from failure
        super().__init__(layout, 0, [block])

    def barrier(self) -> None:
        """Return immediately: there is a single rank."""
