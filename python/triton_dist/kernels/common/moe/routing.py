"""The block map assigns routes to rows of a grouped product, and rows to tiles.

Terms:
* route: choice j of token t is route ``t * topk + j``; its expert is ``topk_ids[t, j]``. A route
  whose id is not in 0 to E - 1 is padding. It counts as a route of expert E, which has no weights:
  its rows come last and are zero.
* row: index of a route after sorting by expert.
* source: a rank that provides tokens; token numbers are in the order of sources. The *position* of
  a source is its index in the order of arrival: this rank, rank + 1, rank + 2, …
* group: a range of positions. Tiles of a group precede the tiles of the next group.
* run: the consecutive tiles of one expert in one group.
* segment: 128 consecutive routes of one source. chunk: ``chunk_segments`` consecutive segments of
  one source; chunks are in order of arrival.

The host reads no counts. Buffers have the size for the worst routing, and the number of tiles is in
device memory, so a captured graph serves any routing. Only integers are summed, so equal ids give
equal maps.

The first launch counts routes. Each program counts the routes of a few experts in one chunk, and
how many of them precede each segment. In the second launch one program per segment assigns rows to
the segment's routes. Rows are sorted by expert number, then by chunk, then by route number. One
program per expert writes the expert's tiles. A tile belongs to the group with which its last row
arrives. Only the last tile of an expert may be partial, with fewer than ``block_m`` rows.

All ranks must pass equal ids. The tuner compares them at the first call of a key. Later calls do
not compare, so that a captured graph serves any ids. Different ids cause wrong results or endless
waits. With ``TRITON_DIST_DEBUG=agree`` every call compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.tile import shard_in_arrival_order, tile_in_group
from triton_dist.kernels.common.peers import timeout_words_at
from triton_dist.runtime.launch import Launch, int32_vectors

TILE_RECORD_WORDS = tl.constexpr(8)
"""int32 words of a tile's record.

They are: expert; first row and end row of the tile's run; first tile and number of tiles of the
run; smallest and largest position of the sources of the tile's rows; unused.
"""
MAX_EXPERTS, MAX_TOPK, MAX_GROUPS = 512, 10, 4
_SEGMENT_ROUTES = 128
"""Routes per segment."""
_SEGMENTS_PER_STEP, _EXPERTS_PER_STEP = 4, 8
"""Segments and experts that a program counts at a time."""
_COUNTS_PER_STEP = 4096
"""Counts, one per chunk and expert, that a program adds at a time."""


@jit
def experts_of(ids_ptr, source, local_route, valid, routes, E):
    """Return the experts of routes of a source: E for padding, E + 1 if not ``valid``."""
    expert = tl.load(ids_ptr + source * routes + local_route, mask=valid, other=0)
    expert = tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)
    return tl.where(valid, expert, E + 1)


@jit(do_not_specialize=["chunks", "chunk_segments", "routes", "rank", "E"])
def kernel_count_routes(
    ids_ptr, counts_ptr, earlier_counts_ptr, chunks, chunk_segments, routes, rank, E,
    PADDED_E: tl.constexpr, NUM_SOURCES: tl.constexpr, SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Count routes per expert. Grid (all chunks, cdiv(E + 1, EXPERTS)).

    A source has ``chunks`` chunks of ``chunk_segments`` segments. Write the arrays ``counts`` [all
    chunks, PADDED_E] and ``earlier_counts`` [E + 1, all segments].
    ``earlier_counts[expert, segment]`` is the number of the expert's routes in earlier segments of
    the chunk.
    """
    chunk = tl.program_id(0)
    source = (rank + chunk // chunks) % NUM_SOURCES
    experts = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    lane = tl.arange(0, SEGMENT)
    count = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, chunk_segments, SEGMENTS):
        segment = first + tl.arange(0, SEGMENTS)
        local_route = (chunk % chunks * chunk_segments + segment)[:, None] * SEGMENT + lane[None, :]
        valid = (segment < chunk_segments)[:, None] & (local_route < routes)
        expert = experts_of(ids_ptr, source, local_route, valid, routes, E)
        counted = tl.sum((expert[:, :, None] == experts[None, None, :]).to(tl.int32), 1)
        tl.store(
            earlier_counts_ptr + experts[None, :] * (tl.num_programs(0) * chunk_segments)
            + (chunk * chunk_segments + segment)[:, None],
            # Exclusive prefix sum over the segments of this iteration.
            count[None, :] + tl.cumsum(counted, 0) - counted,
            mask=(segment < chunk_segments)[:, None] & (experts <= E)[None, :],
        )  # fmt: skip
        count += tl.sum(counted, 0)
    tl.store(counts_ptr + chunk * PADDED_E + experts, count, mask=experts <= E)


@jit
def sum_counts(counts_ptr, begin, end, E, PADDED_E: tl.constexpr, CHUNKS: tl.constexpr):
    """Return [PADDED_E]: the number of routes of each expert in chunks ``begin`` to ``end - 1``.

    ``CHUNKS`` chunks are read at a time.
    """
    experts = tl.arange(0, PADDED_E)
    total = tl.zeros((PADDED_E,), tl.int32)
    for first in range(begin, end, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        counts = tl.load(
            counts_ptr + chunk[:, None] * PADDED_E + experts[None, :],
            mask=(chunk < end)[:, None] & (experts <= E)[None, :],
            other=0,
        )
        total += tl.sum(counts, 0)
    return total


class MapMemory(NamedTuple):
    """Memory that ``kernel_map_blocks`` writes, see ``BlockMap``."""

    routes: Any
    rows: Any
    ends: Any
    tiles: Any
    num_tiles: Any


@jit
def assign_rows(
    ids_ptr, counts_ptr, earlier_counts_ptr, map_memory, segment, segments, chunks, chunk_segments,
    routes, rank, E, PADDED_E: tl.constexpr, NUM_SOURCES: tl.constexpr, SEGMENT: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store the row of each route of segment ``segment``, and the route of each of these rows.

    ``segments`` is the number of segments of all sources.
    """
    chunk = segment // chunk_segments
    source = (rank + chunk // chunks) % NUM_SOURCES
    lane = tl.arange(0, SEGMENT)
    local_route = (segment - chunk // chunks * chunks * chunk_segments) * SEGMENT + lane
    valid = local_route < routes
    expert = experts_of(ids_ptr, source, local_route, valid, routes, E)
    before = tl.load(earlier_counts_ptr + expert * segments + segment, mask=valid, other=0)
    earlier = sum_counts(counts_ptr, 0, chunk, E, PADDED_E, CHUNKS)
    total = earlier + sum_counts(counts_ptr, chunk, NUM_SOURCES * chunks, E, PADDED_E, CHUNKS)
    # First come rows of experts with smaller numbers, then the expert's rows of earlier chunks.
    first = tl.cumsum(total, 0) - total + earlier
    # Routes of the same expert before this route in the segment.
    earlier_same_expert = (expert[:, None] == expert[None, :]) & (lane[None, :] < lane[:, None])
    row = tl.gather(first, expert, 0) + before + tl.sum(earlier_same_expert.to(tl.int32), 1)
    route = source * routes + local_route
    tl.store(map_memory.routes + row, route, mask=valid)
    tl.store(map_memory.rows + route, row, mask=valid)


@jit
def cumulative_rows_by_position(
    counts_ptr, expert, chunks, PADDED_E: tl.constexpr, NUM_SOURCES: tl.constexpr,
    PADDED_SOURCES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return [PADDED_SOURCES]: an expert's number of rows from sources up to and at each
    position."""
    position = tl.arange(0, PADDED_SOURCES)
    rows = tl.zeros((PADDED_SOURCES,), tl.int32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        counts = tl.load(
            counts_ptr + (position[:, None] * chunks + chunk[None, :]) * PADDED_E + expert,
            mask=(position < NUM_SOURCES)[:, None] & (chunk < chunks)[None, :],
            other=0,
        )
        rows += tl.sum(counts, 1)
    return tl.cumsum(rows, 0)


@jit
def store_records(tiles_ptr, first, tile, tiles, expert, begin_row, end_row):
    """Store the first five words of the records of a run of ``tiles`` tiles
    (``TILE_RECORD_WORDS``).

    ``tile`` is a block of indices in the run. Return the addresses of the records, and which of
    them exist.
    """
    record, mask = tiles_ptr + (first + tile) * TILE_RECORD_WORDS, tile < tiles
    tl.store(record, expert, mask=mask)
    tl.store(record + 1, begin_row, mask=mask)
    tl.store(record + 2, end_row, mask=mask)
    tl.store(record + 3, first, mask=mask)
    tl.store(record + 4, tiles, mask=mask)
    return record, mask


@jit
def write_tiles(
    counts_ptr, map_memory, expert, chunks, group_ends, block_m, E, PADDED_E: tl.constexpr,
    NUM_SOURCES: tl.constexpr, PADDED_SOURCES: tl.constexpr, NUM_GROUPS: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store the records of an expert's tiles, and the end of its rows."""
    experts = tl.arange(0, PADDED_E)
    position = tl.arange(0, PADDED_SOURCES)
    total = sum_counts(counts_ptr, 0, NUM_SOURCES * chunks, E, PADDED_E, CHUNKS)
    rows = tl.sum(tl.where(experts == expert, total, 0), 0)
    row = tl.sum(tl.where(experts < expert, total, 0), 0)
    tl.store(map_memory.ends + expert, row + rows)
    by_position = tl.zeros((PADDED_SOURCES,), tl.int32)
    if NUM_SOURCES > 1:
        by_position = cumulative_rows_by_position(
            counts_ptr, expert, chunks, PADDED_E, NUM_SOURCES, PADDED_SOURCES, 128 // PADDED_SOURCES
        )
    arrived_rows = tl.zeros((PADDED_E,), tl.int32)
    earlier_tiles = tl.zeros((PADDED_E,), tl.int32)  # tiles of earlier groups
    written_tiles = 0  # tiles of all experts written so far
    end = 0
    for group in tl.static_range(NUM_GROUPS):
        begin = end
        end = ((group_ends >> (8 * group)) & 255) * chunks
        # The last group also takes the partial tiles.
        if group == NUM_GROUPS - 1:
            ready_tiles = tl.cdiv(total, block_m)
        else:
            arrived_rows += sum_counts(counts_ptr, begin, end, E, PADDED_E, CHUNKS)
            ready_tiles = arrived_rows // block_m
        tiles_by_expert = ready_tiles - earlier_tiles
        first = written_tiles + tl.sum(tl.where(experts < expert, tiles_by_expert, 0), 0)
        tiles = tl.sum(tl.where(experts == expert, tiles_by_expert, 0), 0)
        run_begin = tl.sum(tl.where(experts == expert, earlier_tiles, 0), 0) * block_m
        run_end = tl.minimum(run_begin + tiles * block_m, rows)
        for first_tile in range(0, tiles, SEGMENT):
            tile = first_tile + tl.arange(0, SEGMENT)
            tile_begin = (run_begin + tile * block_m)[:, None]
            tile_end = tl.minimum(tile_begin + block_m, run_end)
            not_last = (position < NUM_SOURCES - 1)[None, :]
            record, mask = store_records(
                map_memory.tiles, first, tile, tiles, expert, row + run_begin, row + run_end
            )
            # A row's position is the number of positions whose rows of the expert all precede it.
            before_begin = (not_last & (by_position[None, :] <= tile_begin)).to(tl.int32)
            before_end = (not_last & (by_position[None, :] < tile_end)).to(tl.int32)
            tl.store(record + 5, tl.sum(before_begin, 1), mask=mask)
            tl.store(record + 6, tl.sum(before_end, 1), mask=mask)
        written_tiles += tl.sum(tiles_by_expert, 0)
        earlier_tiles = ready_tiles
    if expert == E:
        tl.store(map_memory.num_tiles, written_tiles)


@jit(do_not_specialize=["chunks", "chunk_segments", "routes", "rank", "group_ends", "block_m", "E"])
def kernel_map_blocks(
    ids_ptr, counts_ptr, earlier_counts_ptr, map_memory, chunks, chunk_segments, routes, rank,
    group_ends, block_m, E, PADDED_E: tl.constexpr, NUM_SOURCES: tl.constexpr,
    PADDED_SOURCES: tl.constexpr, NUM_GROUPS: tl.constexpr, SEGMENT: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write the block map. Grid (all chunks * ``chunk_segments`` + E + 1,).

    ``group_ends`` has one byte per group: the position after the last position of the group.
    """
    program = tl.program_id(0)
    if program <= E:
        write_tiles(
            counts_ptr, map_memory, program, chunks, group_ends, block_m, E, PADDED_E, NUM_SOURCES,
            PADDED_SOURCES, NUM_GROUPS, SEGMENT, CHUNKS,
        )  # fmt: skip
    else:
        assign_rows(
            ids_ptr, counts_ptr, earlier_counts_ptr, map_memory, program - E - 1,
            NUM_SOURCES * chunks * chunk_segments, chunks, chunk_segments, routes, rank, E,
            PADDED_E, NUM_SOURCES, SEGMENT, CHUNKS,
        )  # fmt: skip


@jit
def tile_of_work_item(
    tiles_ptr, work_item, tiles_n, BLOCK_SIZE_M: tl.constexpr, GROUP_SIZE_M: tl.constexpr
):
    """Return (expert, first row of the tile, end row of its run, column tile, tile) of a work item.

    A work item is a tile in one of ``tiles_n`` column tiles. A run of L tiles that begins at tile a
    has the L * ``tiles_n`` work items from ``a * tiles_n`` on. Tile ``work_item // tiles_n``
    therefore belongs to the work item's run, and its record describes the run.
    """
    record = tiles_ptr + work_item // tiles_n * TILE_RECORD_WORDS
    expert = tl.load(record)
    row = tl.load(record + 1)
    end = tl.load(record + 2)
    first = tl.load(record + 3)
    tiles = tl.load(record + 4)
    m, n = tile_in_group(work_item - first * tiles_n, tiles, tiles_n, GROUP_SIZE_M)
    return expert, row + m * BLOCK_SIZE_M, end, n, first + m


@jit
def await_positions(awaited_position, last_position, sources, rank, grouped_plan: tl.constexpr):
    """Wait for the shards of the positions after ``awaited_position``, up to and including
    ``last_position``.

    Return (largest position for which this program has waited, wait token of ``dl.wait``).
    """
    wait_token = 0
    while awaited_position < last_position:
        awaited_position += 1
        source = shard_in_arrival_order(awaited_position, rank, grouped_plan.NUM_SOURCES)
        flag_ptr = sources.arrivals + source * grouped_plan.FLAGS_PER_RANK
        # Flags are copies of the peers' epoch words: a count of calls and a tag of call sizes.
        current = tl.load(sources.epoch)
        wait_token += dl.wait(flag_ptr, 1, current, timeout_words_at(sources.epoch), True)
    return awaited_position, wait_token


@jit
def row_addresses(gathered_ptr, own_ptr, row, rank, shard_rows, stride, NUM_SOURCES: tl.constexpr):
    """Return the addresses of rows of all sources.

    If there are several sources, this rank's rows are at ``own_ptr``, other rows at
    ``gathered_ptr``.
    """
    base_ptr = gathered_ptr
    if NUM_SOURCES > 1:
        # Shift the base, so that this rank's rows have the same row numbers as gathered rows.
        own_base_ptr = own_ptr - tl.cast(rank, tl.int64) * shard_rows * stride
        is_own = (row >= rank * shard_rows) & (row < (rank + 1) * shard_rows)
        base_ptr = tl.where(is_own, own_base_ptr, gathered_ptr)
    return base_ptr + row.to(tl.int64) * stride


@dataclass(frozen=True)
class BlockMap:
    """A block map in int32 device memory, and the launches that compute it."""

    E: int
    topk: int
    block_m: int
    routes: torch.Tensor
    """[R], route of each row. R is the number of routes."""
    rows: torch.Tensor
    """[R], row of each route."""
    ends: torch.Tensor
    """[E + 1], end of the rows of each expert.

    The last element is R. The element before it is the first row of padding.
    """
    tiles: torch.Tensor
    """[maximum number of tiles, 8], the record of each tile; see ``TILE_RECORD_WORDS``."""
    num_tiles: torch.Tensor
    """[1], number of tiles."""
    launches: tuple[Launch, ...]

    def queue(self) -> BlockMap:
        for launch in self.launches:
            launch.run()
        return self


def max_tiles(routes: int, experts: int, block_m: int) -> int:
    """Return the maximum number of tiles over all routings of ``routes`` routes to ``experts``
    experts."""
    used = min(routes, experts)
    return used + (routes - used) // block_m


def block_map(
    topk_ids: torch.Tensor,
    E: int,
    block_m: int,
    *,
    rank: int = 0,
    num_sources: int = 1,
    group_ends: Sequence[int] | None = None,
) -> BlockMap:
    """Return the map of routes to tiles of ``block_m`` rows, without launching its kernels.

    Args:
        topk_ids: int32 or int64 [M, topk], contiguous: ids of the sources' tokens, by rank.
        E: number of experts, 1 to ``MAX_EXPERTS``. Ids that are not in 0 to E - 1 are padding.
        rank: this rank, which is the first source in the order of arrival.
        num_sources: number of sources. Each source has M / num_sources tokens.
        group_ends: for each of at most ``MAX_GROUPS`` groups, the position after its last source;
            default: one group.
    """
    check_ids("block_map", topk_ids, E)
    ends = tuple(group_ends or (num_sources,))
    M, topk = topk_ids.shape
    if M % num_sources:
        expected = f"a multiple of {num_sources} rows"
        raise InvalidArgument("block_map", "topk_ids.shape", tuple(topk_ids.shape), expected)
    if sorted({0, *ends}) != [0, *ends] or ends[-1] != num_sources or len(ends) > MAX_GROUPS:
        expected = f"at most {MAX_GROUPS} ascending positions, the last {num_sources}"
        raise InvalidArgument("block_map", "group_ends", group_ends, expected)
    routes = M // num_sources * topk
    padded_E = max(16, 1 << (E + 1).bit_length())
    chunks_at_a_time = _COUNTS_PER_STEP // padded_E
    chunks, chunk_segments = _chunks_and_segments(routes, max(1, chunks_at_a_time // num_sources))
    all_chunks, total = num_sources * chunks, routes * num_sources
    counts, earlier_counts, routes_of, rows_of, row_ends, num_tiles, tiles = int32_vectors(
        topk_ids.device, all_chunks * padded_E, all_chunks * chunk_segments * (E + 1), total, total,
        E + 1, 1, max_tiles(total, E + 1, block_m) * TILE_RECORD_WORDS.value,
    )  # fmt: skip
    options = {
        "PADDED_E": padded_E,
        "NUM_SOURCES": num_sources,
        "SEGMENT": _SEGMENT_ROUTES,
        "num_warps": 4,
    }
    chunking = chunks, chunk_segments, routes, rank
    count = Launch(
        kernel_count_routes,
        (all_chunks, -(-(E + 1) // _EXPERTS_PER_STEP)),
        (topk_ids, counts, earlier_counts, *chunking, E),
        {**options, "SEGMENTS": _SEGMENTS_PER_STEP, "EXPERTS": _EXPERTS_PER_STEP},
    )
    packed_ends = sum(end << 8 * group for group, end in enumerate(ends))
    map_memory = MapMemory(routes_of, rows_of, row_ends, tiles, num_tiles)
    map_launch = Launch(
        kernel_map_blocks,
        (all_chunks * chunk_segments + E + 1,),
        (topk_ids, counts, earlier_counts, map_memory, *chunking, packed_ends, block_m, E),
        {
            **options,
            "PADDED_SOURCES": 1 << (num_sources - 1).bit_length(),
            "NUM_GROUPS": len(ends),
            "CHUNKS": chunks_at_a_time,
        },
    )
    records = tiles.view(-1, TILE_RECORD_WORDS.value)
    return BlockMap(
        E, topk, block_m, routes_of, rows_of, row_ends, records, num_tiles, (count, map_launch)
    )


def check_ids(function: str, topk_ids: torch.Tensor, E: int, argument: str = "topk_ids") -> None:
    """Raise ``InvalidArgument`` if no map can be computed for ``topk_ids`` and ``E``.

    ``argument`` is the name of the ids in errors.
    """
    if not 1 <= E <= MAX_EXPERTS:
        raise InvalidArgument(function, "E", E, f"1 to {MAX_EXPERTS}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        expected = "torch.int32 or torch.int64"
        raise InvalidArgument(function, f"{argument}.dtype", topk_ids.dtype, expected)
    shape = tuple(topk_ids.shape)
    if len(shape) != 2 or shape[0] < 1 or not 1 <= shape[1] <= MAX_TOPK:
        expected = f"[M, topk], at least one token, topk 1 to {MAX_TOPK}"
        raise InvalidArgument(function, f"{argument}.shape", shape, expected)
    if not topk_ids.is_contiguous():
        expected = f"contiguous ids; call {argument}.contiguous()"
        raise InvalidArgument(function, f"{argument}.stride()", topk_ids.stride(), expected)


def _chunks_and_segments(routes: int, max_chunks: int) -> tuple[int, int]:
    """Return (number of chunks, segments per chunk) for the ``routes`` of a source."""
    segments = -(-routes // _SEGMENT_ROUTES)
    steps = -(-segments // (max_chunks * _SEGMENTS_PER_STEP))
    chunk_segments = min(segments, steps * _SEGMENTS_PER_STEP)
    return -(-segments // chunk_segments), chunk_segments
