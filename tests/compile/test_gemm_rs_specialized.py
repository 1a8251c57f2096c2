"""GEMM-ReduceScatter with specialised warps, compiled for sm_90 without a GPU: the product that is
counted, and the sum that follows it."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from packaging.version import Version

from tests.compile.scattered import (
    ACQUIRE,
    FULL_WAIT,
    PROXY_FENCE,
    RELEASE,
    TMA_LOAD,
    TMA_STORE,
    compile_launch,
)
from tests.compile.test_gemm_kernels import LAYOUTS, first_of_each, kernel_of
from tests.compile.test_warp_specialized_gemm import (
    EVERY_TILE,
    WGMMA,
    assert_parts_are_stored_before_they_are_counted,
    assert_stores_wait_for_staging,
    copies,
)
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.scattered_gemm_launch import Scattering, scattered_gemm
from triton_dist.kernels.common.specialized_scatter import (
    specialized_scatter,
    specializes_warps,
    sum_parts,
)
from triton_dist.kernels.common.split_k import SplitWorkspace
from triton_dist.kernels.nvidia.gemm import WARP_SPECIALIZED_TILES
from triton_dist.runtime.device.cuda_launch import can_repeat, scratch_bytes
from triton_dist.runtime.triton_compat import triton_version
from triton_dist.testing.compile_only import HARDWARE, compile_only

# Columns of B with which a slab has less than two waves of tiles, and more.
FEW, MANY = 1024, 65536


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def scattering(rank=1, num_ranks=4, dtype=torch.bfloat16):
    words = empty(4096, dtype=torch.int32)
    table = empty(num_ranks, dtype=torch.int64)
    staged = empty(num_ranks, 1 << 21, dtype=dtype)
    return Scattering(
        "slab", rank, num_ranks, empty(1, dtype=dtype), 1 << 21, table, table, words, words, table,
        table, staged,
    )  # fmt: skip


def operands(layout="row-major", rows=1008, columns=FEW, num_ranks=4, dtype=torch.bfloat16):
    A, C = empty(rows * num_ranks, 4096, dtype=dtype), empty(rows, columns, dtype=dtype)
    if layout == "column-major":
        return A, empty(columns, 4096, dtype=dtype).T, C
    return A, empty(4096, columns, dtype=dtype), C


def product(
    config, layout="row-major", rank=1, rows=1008, columns=FEW, num_ranks=4, dtype=torch.bfloat16
):
    A, B, C = operands(layout, rows, columns, num_ranks, dtype)
    assert specializes_warps(A, B, C, config, "slab", True)
    split = SplitWorkspace(empty(1 << 24, dtype=torch.float32), empty(256, dtype=torch.int32))
    return specialized_scatter(
        A, B, C, config, scattering(rank, num_ranks, dtype), num_sms=132, num_chunks=2, split=split
    )


def total(num_ranks=4, rows=1008, columns=1024, bias=False, rank=1):
    C, vector = empty(rows, columns), empty(columns) if bias else None
    to = scattering(rank, num_ranks)
    return sum_parts(C, vector, EVERY_TILE[0], to, num_sms=132, num_chunks=2)


@functools.cache
def compiled(index, layout="row-major", columns=FEW):
    with compile_only(90):
        return compile_launch(product(EVERY_TILE[index], layout, columns=columns))


@pytest.mark.parametrize(
    ("index", "columns"),
    [(index, FEW) for index in first_of_each(map(kernel_of, EVERY_TILE))]
    + [(0, MANY), (len(WARP_SPECIALIZED_TILES), MANY)],
)
def test_a_tile_fits_without_spills(index, columns):
    layout = LAYOUTS[index % 2]
    kernel = compiled(index, layout, columns)
    tile = EVERY_TILE[index].kwargs
    is_cut = tile.get("SPLIT_K", 1) > 1
    assert kernel.name == "kernel_gemm_scatter_warp_specialized"
    # A word that is kept at the beginning while warps take their registers.
    most = 8 if is_cut and columns == FEW and triton_version() >= Version("3.9") else 0
    assert kernel.stack_bytes <= most
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert kernel.num_warps == 12
    assert kernel.registers * 32 * kernel.num_warps <= 65536
    assert 3 * kernel.registers >= 2 * 240 + 24
    assert kernel.ptx.count(WGMMA) == tile["BLOCK_SIZE_K"] // 16 * tile["BLOCK_SIZE_M"] // 64
    # One loop loads, and multiplies nothing; nobody waits for a peer.
    loads = [match.start() for match in TMA_LOAD.finditer(kernel.ptx)]
    assert len(loads) == copies(EVERY_TILE[index], layout)
    assert WGMMA not in kernel.ptx[loads[0] : loads[-1]]
    assert ACQUIRE not in kernel.ptx
    assert_stores_wait_for_staging(kernel.ptx)
    assert_counted_once_complete(kernel.ptx)
    if is_cut:
        assert_parts_are_stored_before_they_are_counted(kernel, tile)


def assert_counted_once_complete(ptx):
    """Before each count, behind the last store before it: the full wait (one that ends in .read
    only says that shared memory may be reused), in all threads of the group, so also in the one
    that stored; the fence between the proxies; a barrier, since the count is another thread's."""
    counts = [*RELEASE.finditer(ptx)]
    assert counts
    for count in counts:
        wait = [*FULL_WAIT.finditer(ptx, 0, count.start())][-1]
        between = ptx[wait.start() : count.start()]
        assert not TMA_STORE.search(between)
        assert not re.search(r"\bbra\b", between)
        assert PROXY_FENCE in between
        assert "bar.sync" in between.split(PROXY_FENCE)[1]
        line = ptx[count.start() : ptx.index(";", count.start())]
        assert ".add" in line


@pytest.mark.parametrize("columns", [FEW, MANY])
def test_when_a_tile_is_counted(sm90, columns):
    """At once where a slab has few tiles; else between the product of the group's next tile and
    that one's store, and the last one after the loop."""
    launch = product(EVERY_TILE[0], columns=columns)
    assert launch.options["ANNOUNCE_LATER"] is (columns == MANY)
    ptx = compiled(0, columns=columns).ptx
    kinds = {"counted": RELEASE.pattern, "stored": TMA_STORE.pattern, "multiplied": WGMMA}
    what = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in kinds.items()))
    events = [next(k for k in kinds if event[k]) for event in what.finditer(ptx)]
    before = [events[i - 1] for i, event in enumerate(events) if event == "counted"]
    # The compiler lays the loop out in turns: its products stand behind its store.
    if columns == MANY:
        assert len(before) == 4
        assert before.count("multiplied") == 2
    else:
        assert before == ["stored"] * 2


def test_one_compiled_kernel_serves_all_ranks_and_rows(sm90):
    """Rows that make as many rows of tiles in a group."""
    config = EVERY_TILE[0]
    kernels = {
        id(compile_launch(product(config, rank=rank, rows=rows)).kernel)
        for rank, rows in ((0, 1008), (1, 1007), (3, 1001))
    }
    assert len(kernels) == 1
    sums = {
        id(compile_launch(total(rank=rank, rows=rows)).kernel)
        for rank, rows in ((0, 1008), (1, 1007), (3, 1))
    }
    assert len(sums) == 1


def test_fp16(sm90):
    kernel = compile_launch(product(EVERY_TILE[0], dtype=torch.float16))
    assert kernel.stack_bytes == 0
    assert f"{WGMMA}.sync.aligned.m64n256k16.f32.f16.f16" in kernel.ptx


@pytest.mark.parametrize("rows", [1, 37])
def test_few_rows(sm90, rows):
    kernel = compile_launch(product(EVERY_TILE[1], rows=rows))
    assert kernel.stack_bytes == 0
    assert compile_launch(total(rows=rows)).stack_bytes == 0


def test_its_launch_can_be_laid_out(sm90):
    """Scratch for four descriptors: A, B, and what each group stores to."""
    kernel = compiled(0)
    launch = product(EVERY_TILE[0])
    arguments = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.options
    assert can_repeat(kernel.kernel, arguments)
    assert scratch_bytes(kernel.kernel, launch.grid) == 4 * 128 * launch.grid[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_parts_are_read_in_whole_vectors_all_together(sm90, num_ranks, bias):
    """16 bytes a thread, at least 64 on their way before the first is added. Rows whose number is
    no multiple of anything."""
    kernel = compile_launch(total(num_ranks, rows=1007, columns=1000, bias=bias))
    assert kernel.stack_bytes <= 8 * (num_ranks == 8)
    assert kernel.registers <= 128
    loads = re.findall(r"ld\.global\.cg\S*", kernel.ptx)
    assert set(loads) == {"ld.global.cg.v4.b32"}
    assert len(loads) == max(num_ranks, 4)
    stores = re.findall(r"st\.global\S*", kernel.ptx)
    assert set(stores) == {"st.global.v4.b32"}
    assert ACQUIRE in kernel.ptx


@pytest.mark.parametrize(
    ("arch", "dtype", "scatter", "persistent", "serves"),
    [
        (90, torch.bfloat16, "slab", True, True),
        (90, torch.bfloat16, "slab", False, False),
        (90, torch.bfloat16, "tile", True, False),
        (90, torch.float32, "slab", True, False),
        (80, torch.bfloat16, "slab", True, False),
        (100, torch.bfloat16, "slab", True, False),
    ],
)
def test_where_it_cannot_serve_the_ordinary_kernels_do(arch, dtype, scatter, persistent, serves):
    A, B, C = operands(dtype=dtype)
    with compile_only(arch):
        for config in (EVERY_TILE[0], EVERY_TILE[-1]):
            assert specializes_warps(A, B, C, config, scatter, persistent) is serves
            launch = scattered_gemm(
                A, B, C, None, config, scattering(dtype=dtype), num_sms=132, persistent=persistent
            )
            assert launch.kernel.fn.__name__.startswith("kernel_gemm_scatter_")
            assert not {"WARP_SPECIALIZED", "SPLIT_K"} & set(launch.options)


def test_what_tma_cannot_read_is_not_specialised(sm90):
    A, B, C = operands()
    wide = empty(8192, FEW)
    for a, b, c, serves in (
        (A, wide[::2], C, True),
        (A, wide[4096:, ::2], empty(1008, FEW // 2), False),
        (empty(4096, 4032).T, B, C, False),
        (A, B[:, :1001], empty(1008, 1001), False),  # rows of the product
    ):
        assert specializes_warps(a, b, c, EVERY_TILE[0], "slab", True) is serves


def test_a_workspace_that_is_too_small_is_refused(sm90):
    A, B, C = operands()
    with pytest.raises(InvalidArgument, match="specialized_scatter: split is None"):
        specialized_scatter(A, B, C, EVERY_TILE[-1], scattering(), num_sms=132, num_chunks=1)
