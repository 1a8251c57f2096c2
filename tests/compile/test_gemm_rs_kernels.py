"""Every kernel of GEMM-ReduceScatter x tiles of every size, for sm_90 without a GPU."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from tests.compile.scattered import (
    ACQUIRE,
    RELEASE,
    TMA_LOAD,
    TMA_STORE,
    assert_announced_at_once,
    assert_announced_later,
    compile_launch,
    hardest,
)
from triton_dist.kernels.common.gemm.spaces import PERSISTENT_TILES, POINTER_TILES
from triton_dist.kernels.common.scatter.kernel import scattered_gemm
from triton_dist.kernels.common.scatter.partials import Scattering, Slot
from triton_dist.kernels.common.scatter.to_owners import ToOwners
from triton_dist.testing.compile_only import HARDWARE, compile_only


def prepared(
    persistent, config, layout="row-major", scatter="tile", dtype=torch.bfloat16, rank=1,
    num_ranks=4, rows=1008, bias=False, columns=1024, num_chunks=1,
):  # fmt: skip
    """The launch for an A of ``rows`` x 4096 a rank and a B of 4096 x ``columns``; no memory."""

    def matrix(*shape, of=dtype):
        return torch.empty(*shape, dtype=of, device="meta")

    A, C = matrix(rows * num_ranks, 4096), matrix(rows, columns)
    B = matrix(columns, 4096).T if layout == "column-major" else matrix(4096, columns)
    flags, table = matrix(4096, of=torch.int64), matrix(num_ranks, of=torch.int64)
    left = matrix(4096, of=torch.int32)
    partials = matrix(1, of=torch.float32 if scatter == "add" else dtype)
    slot = Slot(partials, 1 << 21, table, table, flags, flags, left)
    to = Scattering(scatter, rank, num_ranks, slot)
    vector = matrix(columns) if bias else None
    return scattered_gemm(
        A, B, C, vector, config, to,
        kernel=ToOwners.kernel, num_sms=132, persistent=persistent, num_chunks=num_chunks,
    )  # fmt: skip


@functools.cache
def compiled(
    persistent, index, layout="row-major", scatter="tile", arch=90, dtype=torch.bfloat16, bias=False
):
    config = (PERSISTENT_TILES if persistent else POINTER_TILES)[index]
    with compile_only(arch):
        return compile_launch(prepared(persistent, config, layout, scatter, dtype, bias=bias))


def every_tile():
    """Of tiles for what descriptors cannot read, the two largest."""
    for persistent, tiles in ((True, PERSISTENT_TILES), (False, POINTER_TILES)):
        for index in hardest(tiles)[: None if persistent else 2]:
            config = tiles[index]
            sizes = "x".join(str(config.kwargs[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
            kind = "persistent" if persistent else "pointers"
            name = f"{kind}-{sizes}-{config.num_warps}x{config.num_stages}-{index}"
            yield pytest.param(persistent, index, id=name)


@pytest.mark.parametrize(("persistent", "index"), list(every_tile()))
def test_a_tile_fits_pipelines_and_waits(persistent, index):
    kernel = compiled(persistent, index)
    assert kernel.name == f"kernel_gemm_scatter_{'' if persistent else 'non_'}persistent"
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert kernel.stack_bytes == 0
    assert "wgmma.mma_async" in kernel.ptx
    assert ACQUIRE in kernel.ptx
    assert RELEASE.search(kernel.ptx)
    if persistent:
        # One K loop for all row blocks: A and B, stages - 1 times ahead and once inside.
        assert len(TMA_LOAD.findall(kernel.ptx)) == 2 * kernel.num_stages
        assert_announced_later(kernel.ptx)
    else:
        assert "cp.async.cg" in kernel.ptx
        assert not TMA_STORE.search(kernel.ptx)


@pytest.mark.parametrize("columns", [1024, 65536])
@pytest.mark.parametrize("persistent", [True, False])
def test_row_blocks_are_counted_and_chunks_awaited(sm90, persistent, columns):
    """Counted at once where a row block has few tiles, else after the program's next tile."""
    config = (PERSISTENT_TILES if persistent else POINTER_TILES)[0]
    launch = prepared(persistent, config, scatter="row_block", columns=columns, num_chunks=4)
    kernel = compile_launch(launch)
    assert kernel.stack_bytes == 0
    assert ACQUIRE in kernel.ptx
    assert re.search(r"sys\.release\.add", kernel.ptx)
    if persistent:
        assert launch.options["summing"].LATER is (columns == 65536)
        assert len(TMA_LOAD.findall(kernel.ptx)) == 2 * kernel.num_stages
        check = assert_announced_later if columns == 65536 else assert_announced_at_once
        check(kernel.ptx)


def test_offsets_beyond_32_bits_compile(sm90):
    launch = prepared(False, POINTER_TILES[0], columns=2**27 + 1)
    assert launch.options["tile"].INT64_OFFSETS
    assert "wgmma.mma_async" in compile_launch(launch).ptx


@pytest.mark.parametrize("persistent", [True, False])
def test_sums_are_added_to_at_system_scope(persistent):
    kernel = compiled(persistent, 0, scatter="add")
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert ".sys.relaxed.add" in kernel.ptx
    assert not TMA_STORE.search(kernel.ptx)
    assert ACQUIRE in kernel.ptx


@pytest.mark.parametrize("persistent", [True, False])
def test_a_sum_is_set_to_zero_only_after_all_threads_have_read_it(persistent):
    """Loads and stores of zeros have different layouts: threads set to zero what others read."""
    ptx = compiled(persistent, 0, scatter="add").ptx
    last_load = [*re.finditer(r"ld\.global\.cg", ptx)][-1].end()
    first_store = re.compile(r"st\.global\.v4").search(ptx, last_load).start()
    assert "bar.sync" in ptx[last_load:first_store]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_parts_of_a_tile_are_read_together(sm90, num_ranks):
    """In 16 bytes a thread, all parts before the first is added."""
    launch = prepared(True, PERSISTENT_TILES[0], num_ranks=num_ranks)
    kernel = compile_launch(launch)
    assert kernel.stack_bytes == 0
    loads = re.findall(r"ld\.global\.cg\S*", kernel.ptx)
    # 128 KB, or less where registers would not do, on their way for each program.
    assert len(loads) == launch.options["summing"].ROWS * 256 * num_ranks // (8 * 256)
    assert set(loads) == {"ld.global.cg.v4.b32"}


def test_tiles_are_stored_to_peers_in_whole_vectors():
    """Not by 2 bytes, although the compiler cannot see where an address of a table points."""
    ptx = compiled(False, 0).ptx
    assert re.search(r"st\.global\.v4\.b32", ptx)
    assert not re.search(r"st\.global\.b16", ptx)


@pytest.mark.parametrize(("persistent", "dtype"), [(True, torch.float16), (False, torch.float16)])
def test_fp16_with_a_bias_and_a_column_major_b(persistent, dtype):
    kernel = compiled(persistent, 0, "column-major", dtype=dtype, bias=True)
    assert kernel.stack_bytes == 0
    assert "wgmma.mma_async" in kernel.ptx


@pytest.mark.parametrize(("persistent", "arch"), [(True, 100), (False, 80)])
def test_the_default_tiles_on_other_generations(persistent, arch):
    kernel = compiled(persistent, 0, "column-major", arch=arch)
    assert f".target sm_{arch}" in kernel.ptx
    assert ACQUIRE in kernel.ptx
    if persistent and arch >= 90:
        assert_announced_later(kernel.ptx)
