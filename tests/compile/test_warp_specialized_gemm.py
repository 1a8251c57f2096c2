"""The persistent kernel with specialised warps, compiled for sm_90 without a GPU."""

from __future__ import annotations

import re

import pytest
import torch
import triton

from tests.compile.scattered import (
    ACQUIRE,
    PROXY_FENCE,
    TMA_LOAD,
    TMA_STORE,
    WGMMA,
    assert_fits,
    compile_launch,
    hardest,
    matrix,
    quick,
)
from tests.compile.test_gemm_kernels import (
    COUNT,
    LAYOUTS,
    assert_parts_are_stored_before_they_are_counted,
    cut,
    prepared,
)
from triton_dist.kernels.common.gemm.launch import WARP_SPECIALIZED_SPLIT_K_TILES
from triton_dist.kernels.common.gemm.spaces import WARP_SPECIALIZED_TILES, warp_specialized_tiles
from triton_dist.kernels.nvidia.gemm import op as gemm
from triton_dist.runtime.compiling import CompilePool
from triton_dist.runtime.triton_compat import triton_version
from triton_dist.testing.compile_only import compile_only

EVERY_TILE = (*WARP_SPECIALIZED_TILES, *WARP_SPECIALIZED_SPLIT_K_TILES)
BEGIN_OF_PRODUCER = re.compile(r"setmaxnreg\.dec\.sync\.aligned\.u32\s+24;")
STAGED = re.compile(r"stmatrix\.sync|st\.shared\.v4")
WAIT_FOR_STORE = re.compile(r"cp\.async\.bulk\.wait_group\.read\s+0;")
GIVE_UP = "gpu.relaxed.max"
# The indices of the tiles that are cut along K follow those of the others.
HARDEST = [
    *hardest(WARP_SPECIALIZED_TILES),
    *(len(WARP_SPECIALIZED_TILES) + index for index in hardest(WARP_SPECIALIZED_SPLIT_K_TILES)),
]


@pytest.mark.parametrize(
    ("index", "columns"),
    quick([*((each, None) for each in HARDEST), (5, 128)], (0, None)),
)
def test_a_tile_fits_without_spills(sm90, index, columns):
    layout, config = LAYOUTS[index % 2], EVERY_TILE[index]
    if columns is not None:
        config = cut(config, columns)
    kernel = compile_launch(prepared(True, config, layout))
    assert kernel.name == "kernel_gemm_warp_specialized"
    # With Triton 3.9 two of the tiles keep 8 bytes on the stack, beside 168 registers.
    assert_fits(kernel, stack_bytes=8 if triton_version().minor >= 9 else 0)
    # Two groups of consumers, and a producer that is rounded up to one.
    assert kernel.num_warps == 12
    # Two groups have 240 registers a thread, the third gives its own up.
    limits = [
        int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+);", kernel.ptx)
    ]
    assert {24, 240} < set(limits)
    assert 3 * kernel.registers >= 2 * 240 + 24
    # One product of each group, in steps of 16 along K; 64 rows at a time.
    tile = config.kwargs
    products = tile["BLOCK_SIZE_K"] // 16 * tile["BLOCK_SIZE_M"] // 64
    assert kernel.ptx.count(WGMMA) == products
    assert_only_the_producer_waits_for_flags(kernel.ptx, copies(config, layout))
    assert_stores_wait_for_staging(kernel.ptx)
    if tile.get("SPLIT_K", 1) > 1:
        assert_parts_are_stored_before_they_are_counted(
            kernel, tile, width=2, parts_read=tile["SPLIT_K"]
        )
    else:
        assert COUNT.search(kernel.ptx) is None


def copies(config, layout):
    """By TMA, of a step: one of A, and of B 64 columns at a time where its rows are read."""
    return 2 if layout == "column-major" else 1 + config.kwargs["BLOCK_SIZE_N"] // 64


def assert_only_the_producer_waits_for_flags(ptx, copies):
    """The loads lie in one piece of the code that multiplies nothing: those of the own shard, the
    acquire, the fence to the proxy that TMA reads through, those of the others; ``copies`` each."""
    loads = [match.start() for match in TMA_LOAD.finditer(ptx)]
    acquires = [match.start() for match in re.finditer(re.escape(ACQUIRE), ptx)]
    assert len(loads) == 2 * copies
    assert loads[copies - 1] < min(acquires)
    assert max(acquires) < ptx.rindex(PROXY_FENCE) < loads[copies]
    assert WGMMA not in ptx[loads[0] : loads[-1]]
    assert BEGIN_OF_PRODUCER.search(ptx)
    # A wait that gives up marks the guard word; one that finds another size, those of the ring.
    assert ptx[min(acquires) : loads[copies]].count(GIVE_UP) == ptx.count(GIVE_UP) == 2


def assert_stores_wait_for_staging(ptx):
    """Staging memory is written once the store before has read it, in all threads of the group;
    then the fence to the proxy that TMA reads through, in all threads, then the store."""
    stores = [match.start() for match in TMA_STORE.finditer(ptx)]
    for store in stores:
        wait = [match.end() for match in WAIT_FOR_STORE.finditer(ptx[:store])][-1]
        before = ptx[wait:store]
        written = [match.start() for match in STAGED.finditer(before)]
        assert "bar.sync" in before[: written[0]]
        after = before[written[-1] :]
        assert after.index("fence.proxy.async.shared::cta") < after.index("bar.sync")
        assert "cp.async.bulk.commit_group" in ptx[store : store + 1000]
    # And each group's last store has read it before the kernel ends.
    assert len(WAIT_FOR_STORE.findall(ptx)) == len(stores) + 2


@pytest.mark.parametrize(
    ("layout", "dtype", "rows"),
    quick([("row-major", torch.float16, 1), ("column-major", torch.bfloat16, 37)]),
)
def test_a_plain_gemm_has_no_wait(sm90, layout, dtype, rows):
    """Of any number of rows: Triton makes an M of 1 a constant."""
    kernel = compile_launch(prepared(True, EVERY_TILE[1], layout, False, dtype, rows=rows))
    of = ".f32.f16.f16" if dtype is torch.float16 else ".f32.bf16.bf16"
    has = [f"{WGMMA}.sync.aligned.m64n256k16{of}"]
    loads = copies(EVERY_TILE[1], layout)
    assert_fits(kernel, tma_loads=loads, has=has, lacks=[ACQUIRE, PROXY_FENCE])


@pytest.mark.stress
def test_another_process_compiles_it(sm90, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    launch = prepared(True, EVERY_TILE[4], gathered=False)
    launch.kernel.device_caches.clear()
    found = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit)
    )
    pool = CompilePool()
    try:
        (digest,) = pool.collect(launch.compile)
        pool.begin([digest], 1)
        pool.wait(digest)
    finally:
        pool.close()
    launch.compile()
    assert found == [True]
    assert sm90.launches == []


@pytest.mark.parametrize(
    ("arch", "dtype", "kernel"),
    [
        (80, torch.bfloat16, "kernel_gemm_persistent"),
        (100, torch.bfloat16, "kernel_gemm_persistent"),
        (90, torch.float32, "kernel_gemm_non_persistent"),
        (90, torch.float16, "kernel_gemm_warp_specialized"),
    ],
)
def test_where_it_cannot_serve_the_ordinary_kernel_does(arch, dtype, kernel):
    with compile_only(arch):
        launch = prepared(True, EVERY_TILE[0], dtype=dtype)
        assert launch.kernel.fn.__name__ == kernel
        assert bool(warp_specialized_tiles()) is (arch == 90)
        A, B = (matrix(4096, 4096, dtype=dtype) for _ in range(2))
        kept = gemm.fits_gemm({"gemm_config": EVERY_TILE[0]}, A, B)
        assert kept is (kernel == "kernel_gemm_warp_specialized")
