"""Every kernel of GEMM-ReduceScatter x every tile of its space, for sm_90 without a GPU."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from triton_dist.kernels.common.scattered_gemm_launch import (
    Scattering,
    reduced_slab,
    scattered_gemm,
)
from triton_dist.kernels.nvidia.gemm import PERSISTENT_TILES, POINTER_TILES
from triton_dist.testing.compile_only import HARDWARE, compile_kernel, compile_only

ACQUIRE = "ld.global.sys.acquire"
RELEASE = re.compile(r"(atom|red)\.global\.sys\.release|(atom|red)\.release\.sys\.global")
TMA_LOAD = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.shared")
TMA_STORE = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.global")
FULL_WAIT = re.compile(r"cp\.async\.bulk\.wait_group\s+0")
PROXY_FENCE = "fence.proxy.async.global"
SCATTERS = ("tile", "slab", "add")


def prepared(
    persistent, config, layout="row-major", scatter="tile", dtype=torch.bfloat16, rank=1,
    num_ranks=4, rows=1008, bias=False,
):  # fmt: skip
    """The launch for an A of 4 x ``rows`` x 4096 and a B of 4096 x 1024; without memory."""

    def matrix(*shape, of=dtype):
        return torch.empty(*shape, dtype=of, device="meta")

    A, C = matrix(rows * num_ranks, 4096), matrix(rows, 1024)
    B = matrix(1024, 4096).T if layout == "column-major" else matrix(4096, 1024)
    words, table = matrix(4096, of=torch.int32), matrix(num_ranks, of=torch.int64)
    partials = matrix(1, of=torch.float32 if scatter == "add" else dtype)
    to = Scattering(scatter, rank, num_ranks, partials, 1 << 21, table, table, words, words)
    vector = matrix(1024) if bias else None
    if persistent is None:
        return reduced_slab(C, vector, to)
    return scattered_gemm(A, B, C, vector, config, to, num_sms=132, persistent=persistent)


def compile_launch(launch):
    return compile_kernel(launch.kernel, *launch.args, grid=launch.grid, **launch.options)


@functools.cache
def compiled(
    persistent, index, layout="row-major", scatter="tile", arch=90, dtype=torch.bfloat16, bias=False
):
    config = (PERSISTENT_TILES if persistent else POINTER_TILES)[index]
    with compile_only(arch):
        return compile_launch(prepared(persistent, config, layout, scatter, dtype, bias=bias))


def every_tile():
    for persistent, tiles in ((True, PERSISTENT_TILES), (False, POINTER_TILES)):
        for index, config in enumerate(tiles):
            sizes = "x".join(str(config.kwargs[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
            kind = "persistent" if persistent else "pointers"
            name = f"{kind}-{sizes}-{config.num_warps}x{config.num_stages}-{index}"
            yield pytest.param(persistent, index, id=name)


def assert_published(ptx):
    """After each TMA store and before anything else happens: the full wait (one that ends in .read
    only says that shared memory may be reused), the fence between the proxies, and a barrier, since
    the release is another thread's."""
    stores = list(TMA_STORE.finditer(ptx))
    assert stores
    after = ptx[stores[-1].end() :]
    wait = FULL_WAIT.search(after)
    assert wait
    assert RELEASE.search(after, 0, wait.start()) is None
    assert re.search(r"\bbra\b", after[: wait.start()]) is None
    between = after[wait.start() : re.search(r"\bbra\b", after).start()]
    assert PROXY_FENCE in between
    assert "bar.sync" in between.split(PROXY_FENCE)[1]
    assert (
        RELEASE.search(between) is None
        or between.index("bar.sync") < RELEASE.search(between).start()
    )


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
        # One K loop for all slabs: A and B, stages - 1 times ahead and once inside.
        assert len(TMA_LOAD.findall(kernel.ptx)) == 2 * kernel.num_stages
        assert_published(kernel.ptx)
    else:
        assert "cp.async.cg" in kernel.ptx
        assert not TMA_STORE.search(kernel.ptx)


@pytest.mark.parametrize("persistent", [True, False])
def test_slabs_are_counted_and_not_summed(persistent):
    kernel = compiled(persistent, 0, scatter="slab")
    assert kernel.stack_bytes == 0
    assert ACQUIRE not in kernel.ptx
    assert RELEASE.search(kernel.ptx)
    if persistent:
        assert_published(kernel.ptx)


@pytest.mark.parametrize("persistent", [True, False])
def test_sums_are_added_to_at_system_scope(persistent):
    kernel = compiled(persistent, 0, scatter="add")
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert ".sys.relaxed.add" in kernel.ptx
    assert not TMA_STORE.search(kernel.ptx)
    assert ACQUIRE in kernel.ptx


def test_tiles_are_stored_to_peers_in_whole_vectors():
    """Not by 2 bytes, although the compiler cannot see where an address of a table points."""
    ptx = compiled(False, 0).ptx
    assert re.search(r"st\.global\.v4\.b32", ptx)
    assert not re.search(r"st\.global\.b16", ptx)


@pytest.mark.parametrize("bias", [True, False])
def test_the_reduction_after_pushes(sm90, bias):
    kernel = compile_launch(prepared(None, None, scatter="slab", bias=bias))
    assert kernel.stack_bytes == 0
    assert kernel.ptx.index(ACQUIRE) < kernel.ptx.index("ld.global.cg")
    assert re.search(r"ld\.global\.cg\.v4\.b32", kernel.ptx)


@pytest.mark.parametrize(("persistent", "dtype"), [(True, torch.float16), (False, torch.float16)])
def test_fp16_with_a_bias_and_a_column_major_b(persistent, dtype):
    kernel = compiled(persistent, 0, "column-major", dtype=dtype, bias=True)
    assert kernel.stack_bytes == 0
    assert "wgmma.mma_async" in kernel.ptx


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize("persistent", [True, False])
def test_the_default_tiles_on_other_generations(persistent, arch):
    kernel = compiled(persistent, 0, "column-major", arch=arch)
    assert f".target sm_{arch}" in kernel.ptx
    assert ACQUIRE in kernel.ptx
    if persistent and arch >= 90:
        assert_published(kernel.ptx)


@pytest.mark.parametrize("persistent", [True, False])
def test_one_compiled_kernel_serves_all_ranks_and_rows(sm90, persistent):
    config = (PERSISTENT_TILES if persistent else POINTER_TILES)[0]
    kernels = {
        id(compile_launch(prepared(persistent, config, rank=rank, rows=rows)).kernel)
        for rank, rows in ((0, 1008), (1, 1007), (3, 1), (2, 16))
    }
    assert len(kernels) == 1
