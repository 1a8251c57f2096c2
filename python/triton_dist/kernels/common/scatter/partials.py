"""Memory of ops that sum products over ranks, and the base class of their contexts.

The M rows consist of one row block per rank. A rank owns its row block and adds it over all ranks.
Calls alternate between two slots. On each rank a slot has:

    partials [source rank, slot_stride] of the output's dtype: addends of this rank's row block
        [rows, N], written by the GEMM or the copy engines of the source.
    arrivals int64 [tile or chunk, source rank]: flags of the partials, written by the source.
    deferred int32 [SMs]: 1 for each program that has deferred its tiles (``scatter/tiles.py``),
        written by kernels of this rank.

The contexts of gemm_rs and gemm_ar add further regions.
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
    BufferT,
    Check,
    GEMMContext,
    agree_to_create,
    dtype_checks,
)
from triton_dist.runtime.ranks import Group, process_group_of

ScatterMode = Literal["tile", "row_block", "add", "all"]
# Row blocks of an all-reduce are multiples of this number of rows, the smallest BLOCK_SIZE_M.
_ROW_BLOCK_ALIGNMENT = 16
# Smallest tile size of tl.dot, which limits the number of tiles.
_SMALLEST_TILE = 16
# Partials are padded to multiples of this number of elements, so that each partial is aligned.
_PARTIAL_ALIGNMENT = 128
MAX_CHUNKS = 16
"""Maximum number of chunks of a row block."""


class ScatterSlot(NamedTuple):
    """Kernel argument: memory that receives tiles. ``scatter/kernel.py`` describes the members."""

    partials: Any
    stride: Any
    targets: Any
    flags: Any
    arrivals: Any
    epoch: Any
    deferred: Any


class SumOutput(NamedTuple):
    """Kernel argument: output, bias, and addresses on each rank of the sums and of their flags."""

    c: Any
    bias: Any
    peer_sums: Any
    peer_flags: Any


@dataclass(frozen=True)
class TileMemory:
    """Memory to which this rank sends tiles, and in which tiles of peers arrive.

    ``mode`` is the mode that ``scatter/kernel.py`` describes. ``peer_sums`` and ``peer_flags``
    are only used in mode ``"all"``.
    """

    mode: ScatterMode
    rank: int
    num_ranks: int
    slot: ScatterSlot
    peer_sums: torch.Tensor | None = None
    peer_flags: torch.Tensor | None = None

    def rows_per_row_block(self, M: int) -> int:
        return row_block_rows(M, self.num_ranks) if self.mode == "all" else M // self.num_ranks

    def kernel_arguments(
        self, C: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[ScatterSlot, SumOutput]:
        return self.slot, SumOutput(C, bias, self.peer_sums, self.peer_flags)


@dataclass(frozen=True)
class Chunks:
    """Chunks of a row block, each of ``tiles_m`` rows of tiles; the last chunk may have fewer.

    ``group_size_m`` is the GROUP_SIZE_M with which a chunk is completed before the next begins.
    """

    tiles_m: int
    group_size_m: int
    rows: tuple[int, ...]
    tiles: tuple[int, ...]
    """Number of rows, and number of tiles, of each chunk."""


def chunks_of_row_block(config: triton.Config, rows: int, N: int, num_chunks: int) -> Chunks:
    """Divide a row block [rows, N] into at most ``num_chunks`` chunks.

    The tiles of a group of GROUP_SIZE_M rows of tiles are completed at the same time. A chunk
    therefore consists of whole groups. A group is at most as large as a chunk.
    """
    tile = config.kwargs
    tiles_m = int(triton.cdiv(rows, tile["BLOCK_SIZE_M"]))
    tiles_n = int(triton.cdiv(N, tile["BLOCK_SIZE_N"]))
    chunk_tiles_m = int(triton.cdiv(tiles_m, num_chunks))
    # Round up to whole groups, so that no group belongs to two chunks.
    group = min(tile["GROUP_SIZE_M"], chunk_tiles_m)
    chunk_tiles_m = int(triton.cdiv(chunk_tiles_m, group)) * group
    starts = range(0, tiles_m, chunk_tiles_m)
    tile_rows = [(first, min(first + chunk_tiles_m, tiles_m)) for first in starts]
    block = tile["BLOCK_SIZE_M"]
    return Chunks(
        chunk_tiles_m,
        group,
        tuple(min(end * block, rows) - first * block for first, end in tile_rows),
        tuple((end - first) * tiles_n for first, end in tile_rows),
    )


def row_block_rows(M: int, num_ranks: int) -> int:
    """Return the rows per row block of an all-reduce. The last blocks may be short or empty."""
    return int(triton.cdiv(M, num_ranks * _ROW_BLOCK_ALIGNMENT)) * _ROW_BLOCK_ALIGNMENT


def tiles_of_row_block(config: triton.Config, rows: int, N: int) -> int:
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    return int(triton.cdiv(rows, block_m) * triton.cdiv(N, block_n))


def partial_sizes(rows: int, N: int) -> tuple[int, int]:
    """Return (elements from one partial [rows, N] to the next, maximum tiles of a partial)."""
    stride = -(-rows * N // _PARTIAL_ALIGNMENT) * _PARTIAL_ALIGNMENT
    return stride, -(-rows // _SMALLEST_TILE) * -(-N // _SMALLEST_TILE)


class ContextLimits(NamedTuple):
    """Size and dtype of the largest product that a context supports, and the context's ranks."""

    max_M: int
    N: int
    output_dtype: torch.dtype
    local_world_size: int
    group: dist.ProcessGroup | None


class SummingContext(GEMMContext[BufferT], ABC):
    """Context manager that owns symmetric memory for products of up to ``max_M`` by ``N``.

    Attributes:
        output_dtype: dtype of the output and of the partials that are sent, and of A and B unless
            they are fp8.
    """

    function: ClassVar[str]
    creator: ClassVar[str]
    """Names of the op and of the function that creates its contexts, for errors."""

    def __init__(self, limits: ContextLimits) -> None:
        super().__init__(limits.group)
        self.max_M, self.N, self.output_dtype = limits[:3]
        self.world_size = self.num_ranks
        self.local_world_size = min(limits.local_world_size, self.num_ranks)

    @staticmethod
    @abstractmethod
    def rows_check(argument: str, M: int, num_ranks: int) -> Check:
        """Return the check of the number of rows of A, for a context or a call."""

    @staticmethod
    def round_down_rows(M: int, num_ranks: int) -> int:
        """Return the largest valid number of rows of A that is at most M."""
        return M

    @abstractmethod
    def rows_of_rank(self, M: int) -> int:
        """Return the number of rows that a rank adds if each row is added by a single rank."""


_Context = TypeVar("_Context", bound=SummingContext[Any])


def create(
    ctx_type: type[_Context],
    max_M: int,
    N: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    output_dtype: torch.dtype,
    group: Group,
    equal_arguments: Mapping[str, Any] | None = None,
    **rank_arguments: Any,
) -> _Context:
    """Create a context of class ``ctx_type``. Collective over ``group``.

    ``equal_arguments`` are further arguments that must be equal on all ranks. ``rank_arguments``
    may differ. Raise the errors of ``agree_to_create`` and of the allocation.
    """
    members, extra_arguments = process_group_of(group), dict(equal_arguments or {})

    def checks() -> Iterator[Check]:
        yield ctx_type.rows_check("max_M", max_M, world_size)
        yield from dtype_checks("output_dtype", output_dtype)

    agree_to_create(
        ctx_type.creator, f"a {ctx_type.op_name}", members, rank,
        {"world_size": world_size, "local_world_size": local_world_size}, {"max_M": max_M, "N": N},
        checks(), output_dtype=output_dtype, **extra_arguments,
    )  # fmt: skip
    limits = ContextLimits(max_M, N, output_dtype, local_world_size, members)
    return ctx_type(limits, **extra_arguments, **rank_arguments)
