"""Memory of ops that sum products over ranks: how row blocks are cut, where their tiles go, slots
that hold a partial sum from every rank with the flags that say which tiles, or chunks, of them are
there, and the base of the contexts that own them.

A slot has, on each rank, of the output's dtype where nothing else is said:
    partials [source rank, slot_stride], partial sums of this rank's row block [rows, N]: written by
        the source's GEMM or copy engines.
    arrivals int64 [tile or chunk, source rank], their flags: by the same.
    deferred int32 [SMs], deferred tiles: by this rank's kernels.
and what ``row_blocks.py`` and ``reduced.py`` say, of one op each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import triton

from triton_dist.kernels.common.context import (
    B,
    Check,
    GEMMContext,
    agree_to_create,
    group_checks,
    int_checks,
    kernel_checks,
)
from triton_dist.runtime.ranks import Group, process_group_of

Scatter = Literal["tile", "row_block", "add", "all"]
# Rows of which the row blocks of an all-reduce are multiples: those of the smallest tile.
_ROW_BLOCK_ROWS = 16
# The smallest tile that tl.dot multiplies: there are never more tiles than of this size.
_SMALLEST_TILE = 16
# Elements of which partial sums are whole multiples, so that each starts aligned, whatever N is.
_PART_ALIGNMENT = 128
MAX_CHUNKS = 16
"""Most chunks in which a row block can be pushed."""


class Slot(NamedTuple):
    """Memory to which tiles go, and in which those of the own row block arrive: what kernels take,
    see ``scatter/kernel.py``."""

    partials: Any
    stride: Any
    targets: Any
    flags: Any
    arrivals: Any
    epoch: Any
    deferred: Any


class Out(NamedTuple):
    """Memory to which sums go, and what is added to them."""

    c: Any
    bias: Any
    sums: Any
    sum_flags: Any


@dataclass(frozen=True)
class Scattering:
    """Memory where tiles go and arrive, and what is summed in the end (see ``scattered_gemm``).
    sums, sum_flags: of ``"all"`` alone."""

    scatter: Scatter
    rank: int
    num_ranks: int
    slot: Slot
    sums: torch.Tensor | None = None
    sum_flags: torch.Tensor | None = None

    def rows(self, M: int) -> int:
        """Rows of a row block of a product of M rows."""
        return row_block_rows(M, self.num_ranks) if self.scatter == "all" else M // self.num_ranks

    def regions(self, C: torch.Tensor, bias: torch.Tensor | None) -> tuple[Slot, Out]:
        """Memory, as kernels take it."""
        return self.slot, Out(C, bias, self.sums, self.sum_flags)


@dataclass(frozen=True)
class Chunks:
    """A row block of ``rows`` rows of tiles in chunks of ``tiles_m`` each, the last maybe less.

    group_size_m: GROUP_SIZE_M with which chunks are complete one after another.
    """

    tiles_m: int
    group_size_m: int
    rows: tuple[int, ...]
    """Rows of each chunk."""
    tiles: tuple[int, ...]
    """Tiles of each chunk."""


def chunks_of_row_block(config: triton.Config, rows: int, N: int, num_chunks: int) -> Chunks:
    """[rows, N] in at most ``num_chunks`` chunks: whole groups of GROUP_SIZE_M rows of tiles, or
    one smaller group each, because the tiles of a group are complete at the same time."""
    tile = config.kwargs
    tiles_m = int(triton.cdiv(rows, tile["BLOCK_SIZE_M"]))
    tiles_n = int(triton.cdiv(N, tile["BLOCK_SIZE_N"]))
    each = int(triton.cdiv(tiles_m, num_chunks))
    group = min(tile["GROUP_SIZE_M"], each)
    each = int(triton.cdiv(each, group)) * group
    spans = [(first, min(first + each, tiles_m)) for first in range(0, tiles_m, each)]
    block = tile["BLOCK_SIZE_M"]
    return Chunks(
        each,
        group,
        tuple(min(end * block, rows) - first * block for first, end in spans),
        tuple((end - first) * tiles_n for first, end in spans),
    )


def row_block_rows(M: int, num_ranks: int) -> int:
    """Rows of each row block of an all-reduce of M rows, but for the last ones, which may be short
    or empty."""
    return int(triton.cdiv(M, num_ranks * _ROW_BLOCK_ROWS)) * _ROW_BLOCK_ROWS


def tiles_of_row_block(config: triton.Config, rows: int, N: int) -> int:
    """Tiles of [rows, N]."""
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    return int(triton.cdiv(rows, block_m) * triton.cdiv(N, block_n))


def room_for(rows: int, N: int) -> tuple[int, int]:
    """(elements from one partial sum of [rows, N] to the next, most tiles of one)."""
    stride = -(-rows * N // _PART_ALIGNMENT) * _PART_ALIGNMENT
    return stride, -(-rows // _SMALLEST_TILE) * -(-N // _SMALLEST_TILE)


class Products(NamedTuple):
    """The products that a context serves, on the ranks of ``group``."""

    max_M: int
    N: int
    output_dtype: torch.dtype
    local_world_size: int
    group: dist.ProcessGroup | None


class SummingContext(GEMMContext[B], ABC):
    """Symmetric memory for products of up to ``max_M`` rows of ``N`` columns. A context manager.

    Attributes:
        output_dtype: of A, B, the partial sums that travel, and the output.
    """

    function: ClassVar[str]
    creator: ClassVar[str]
    """Names, for errors, of the op and of the function that makes its contexts."""

    def __init__(self, products: Products) -> None:
        super().__init__(products.group)
        self.max_M, self.N, self.output_dtype = products[:3]
        self.world_size = self.num_ranks
        self.local_world_size = min(products.local_world_size, self.num_ranks)

    @staticmethod
    @abstractmethod
    def rows_check(argument: str, M: int, num_ranks: int) -> Check:
        """Check a number of rows of A, of a context or of a call."""

    @staticmethod
    def whole_rows(M: int, num_ranks: int) -> int:
        """The most rows of A, up to M, that a call can have."""
        return M

    @abstractmethod
    def rows_of_rank(self, M: int) -> int:
        """Rows of A that one rank adds where each row is added by one."""


_Context = TypeVar("_Context", bound=SummingContext[Any])


def create(
    kind: type[_Context],
    max_M: int,
    N: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    output_dtype: torch.dtype,
    group: Group,
    asked: Mapping[str, Any] | None = None,
    **own: Any,
) -> _Context:
    """A context of ``kind``, unless ``agree_to_create`` or its allocation raises. Collective over
    ``group``; ``asked``: what all ranks have to ask for alike besides, ``own``: what each may
    choose."""
    members, more = process_group_of(group), dict(asked or {})

    def checks() -> Iterator[Check]:
        yield from int_checks(max_M=max_M, N=N)
        yield from group_checks(
            members, rank, world_size=world_size, local_world_size=local_world_size
        )
        yield kind.rows_check("max_M", max_M, world_size)
        yield "N", N, N >= 1, "at least 1"
        yield from kernel_checks("output_dtype", output_dtype)

    alike = {"max_M": max_M, "N": N, "output_dtype": str(output_dtype), **more}
    agree_to_create(kind.creator, f"a {kind.title}", alike, checks(), members)
    products = Products(max_M, N, output_dtype, local_world_size, members)
    return kind(products, **more, **own)
