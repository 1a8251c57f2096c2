"""Every kernel of GEMM-ReduceScatter x tiles of every size, and what adds the tiles that
it leaves, for sm_90 without a GPU."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from tests.compile.scattered import (
    ACQUIRE,
    RELEASE,
    TMA_STORE,
    WGMMA,
    assert_announced_at_once,
    assert_announced_later,
    assert_fits,
    compile_launch,
    hardest,
    matrix,
    quick,
    right,
    words,
)
from triton_dist.kernels.common.gemm.spaces import (
    PERSISTENT_TILES,
    POINTER_TILES,
    tile_configs,
    tile_shapes,
)
from triton_dist.kernels.common.scatter.kernel import scattered_gemm
from triton_dist.kernels.common.scatter.partials import ScatterSlot, TileMemory
from triton_dist.kernels.common.scatter.tiles import add_deferred_tiles
from triton_dist.kernels.common.scatter.to_owners import ReduceScatterLaunches, add_row_block
from triton_dist.testing.compile_only import compile_only


def prepared(
    persistent, config, layout="row-major", scatter="tile", dtype=torch.bfloat16, rank=1,
    num_ranks=4, rows=1008, bias=False, columns=1024, num_chunks=1,
):  # fmt: skip
    """The launch for an A of ``rows`` x 4096 a rank and a B of 4096 x ``columns``; no memory."""
    A, C = matrix(rows * num_ranks, 4096, dtype=dtype), matrix(rows, columns, dtype=dtype)
    B = right(4096, columns, layout, dtype)
    return scattered_gemm(
        A, B, C, matrix(columns, dtype=dtype) if bias else None, config,
        tile_memory(scatter, rank, num_ranks, dtype), kernel=ReduceScatterLaunches.kernel,
        num_sms=132, persistent=persistent, num_chunks=num_chunks,
    )  # fmt: skip


def tile_memory(scatter, rank, num_ranks, dtype=torch.bfloat16):
    flags, table, left = words(), words(num_ranks), matrix(4096, dtype=torch.int32)
    partials = matrix(1, dtype=torch.float32 if scatter == "add" else dtype)
    slot = ScatterSlot(partials, 1 << 23, table, table, flags, flags, left)
    sums = (table, table) if scatter == "all" else ()
    return TileMemory(scatter, rank, num_ranks, slot, *sums)


TILES = {True: PERSISTENT_TILES, False: POINTER_TILES}
# Of tiles for what descriptors cannot read, the two largest.
EVERY_TILE = [
    *itertools.product([True], hardest(PERSISTENT_TILES)),
    *itertools.product([False], hardest(POINTER_TILES)[:2]),
]


@pytest.mark.parametrize(("persistent", "index"), quick(EVERY_TILE, (True, 0), (False, 0)))
def test_a_tile_fits_pipelines_and_waits(sm90, persistent, index):
    launch = prepared(persistent, TILES[persistent][index])
    kernel = compile_launch(launch)
    assert kernel.name == f"kernel_gemm_scatter_{'' if persistent else 'non_'}persistent"
    # One K loop for all row blocks: A and B, stages - 1 times ahead and once inside.
    loads = 2 * kernel.num_stages if persistent else 0
    assert_fits(kernel, tma_loads=loads, has=[WGMMA, ACQUIRE, RELEASE])
    if persistent:
        assert_announced_later(kernel.ptx)
        if index == 0:
            assert_parts_are_read_together(kernel, launch, num_ranks=4)
    else:
        # Stored to peers in whole vectors, although the compiler cannot see where an address of a
        # table points.
        has = ["cp.async.cg", "st.global.v4.b32"]
        assert_fits(kernel, has=has, lacks=[TMA_STORE, "st.global.b16"])


ROW_BLOCKS = [(True, 0, 1024), (True, 0, 65536), (False, 0, 65536), (False, 5, 2**27 + 1)]


@pytest.mark.parametrize(("persistent", "index", "columns"), quick(ROW_BLOCKS, ROW_BLOCKS[1]))
def test_row_blocks_are_counted_and_chunks_awaited(sm90, persistent, index, columns):
    """Counted at once where a row block has few tiles, else after the program's next tile; with
    offsets beyond 32 bits as well."""
    config = TILES[persistent][index]
    launch = prepared(persistent, config, scatter="row_block", columns=columns, num_chunks=4)
    kernel = compile_launch(launch)
    assert launch.options["tile"].INT64_OFFSETS is (columns > 65536)
    assert_fits(
        kernel,
        tma_loads=2 * kernel.num_stages if persistent else 0,
        has=[WGMMA, ACQUIRE, re.compile(r"sys\.release\.add")],
    )
    if persistent:
        assert launch.options["summing"].ANNOUNCE_LATER is (columns == 65536)
        check = assert_announced_later if columns == 65536 else assert_announced_at_once
        check(kernel.ptx)


@pytest.mark.parametrize(("persistent", "index"), quick([(True, 11), (False, 5)], (True, 11)))
def test_sums_are_added_to_at_system_scope(sm90, persistent, index):
    """A sum is set to zero only after all threads have read it: loads and stores of zeros have
    different layouts, and threads set to zero what others read."""
    kernel = compile_launch(prepared(persistent, TILES[persistent][index], scatter="add"))
    assert_fits(kernel, has=[".sys.relaxed.add", ACQUIRE], lacks=[TMA_STORE])
    last_load = [*re.finditer(r"ld\.global\.cg", kernel.ptx)][-1].end()
    first_store = kernel.ptx.index("st.global.v4", last_load)
    assert "bar.sync" in kernel.ptx[last_load:first_store]


def assert_parts_are_read_together(kernel, launch, num_ranks):
    """In 16 bytes a thread, all parts before the first is added."""
    loads = re.findall(r"ld\.global\.cg\S*", kernel.ptx)
    # 128 KB, or less where registers would not do, on their way for each program.
    assert len(loads) == launch.options["summing"].ROWS_PER_STEP * 256 * num_ranks // (8 * 256)
    assert set(loads) == {"ld.global.cg.v4.b32"}


@pytest.mark.parametrize(
    ("persistent", "index", "arch", "dtype", "num_ranks"),
    quick(
        [
            (True, 0, 90, torch.float16, 8),
            (True, 0, 100, torch.bfloat16, 4),
            (False, 5, 80, torch.float16, 2),
            (False, 0, 90, torch.float16, 4),
            (True, 0, 90, torch.bfloat16, 2),
        ],
    ),
)
def test_a_bias_a_column_major_b_and_other_dtypes_worlds_and_generations(
    persistent, index, arch, dtype, num_ranks
):
    config = TILES[persistent][index]
    with compile_only(arch):
        launch = prepared(
            persistent, config, "column-major", dtype=dtype, num_ranks=num_ranks, bias=True
        )
        kernel = compile_launch(launch)
    assert_fits(kernel, has=[ACQUIRE, *([WGMMA] if arch == 90 else [])])
    if persistent:
        assert_announced_later(kernel.ptx)
        assert_parts_are_read_together(kernel, launch, num_ranks)


def deferred(scatter, config, num_ranks):
    """The launch for row blocks of 1000 rows, 8192 columns; no memory."""
    M = 1000 * num_ranks
    C = matrix(M if scatter == "all" else 1000, 8192)
    to = tile_memory(scatter, 1, num_ranks)
    return add_deferred_tiles(C, matrix(8192), config, to, M=M, num_sms=132, num_chunks=2)


DEFERRED = [("row_block", 8), ("add", 8), ("all", 8), ("tile", 8), ("all", 2)]


@pytest.mark.parametrize(("scatter", "num_ranks"), quick(DEFERRED, DEFERRED[2]))
def test_deferred_tiles_are_awaited_then_added_in_whole_vectors(sm90, scatter, num_ranks):
    config = tile_shapes(PERSISTENT_TILES)[num_ranks == 8]
    kernel = compile_launch(deferred(scatter, config, num_ranks))
    assert_fits(kernel)
    # All threads have looked whether anything is left, before one says that no more is.
    look = re.search(r"ld\.global\.b32 \S+ \S+ \S+ \[ (%rd\d+)", kernel.ptx)
    taken = re.search(rf"st\.global\.b32 \[ {look.group(1)} ", kernel.ptx)
    assert "bar.sync" in kernel.ptx[look.end() : taken.start()]
    loads = [*re.finditer(r"ld\.global\.cg\S*", kernel.ptx)]
    assert {load.group() for load in loads} == {"ld.global.cg.v4.b32"}
    assert kernel.ptx.rindex(ACQUIRE, 0, loads[0].start()) > 0
    released = [*RELEASE.finditer(kernel.ptx)]
    assert bool(released) == (scatter == "all")
    if released:  # behind a barrier that is behind the last store of a sum
        sums = [*re.finditer(r"st\.global\.v4\.b32", kernel.ptx)]
        assert len(sums) >= num_ranks
        assert "bar.sync" in kernel.ptx[sums[-1].end() : released[-1].start()]


@pytest.mark.parametrize("num_ranks", quick([(2,), (8,)], (8,)))
def test_a_row_block_is_awaited_then_added_in_whole_vectors(sm90, num_ranks):
    C, to = matrix(1000, 8192), tile_memory("row_block", 1, num_ranks)
    (config,) = tile_configs((64, 256, 64, 8, 1, 1))
    kernel = compile_launch(add_row_block(C, matrix(8192), config, to, 1000 * num_ranks, 2))
    assert_fits(kernel, has=[ACQUIRE])
    loads = [*re.finditer(r"ld\.global\.cg\S*", kernel.ptx)]
    assert {load.group() for load in loads} == {"ld.global.cg.v4.b32"}
    assert kernel.ptx.index(ACQUIRE) < loads[0].start()
