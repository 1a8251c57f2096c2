"""Every tile of the grouped GEMM and both launches of the block map, for sm_90 without a GPU."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from tests.compile.scattered import TMA_LOAD, compile_launch
from triton_dist.kernels.common.moe.product import grouped_product
from triton_dist.kernels.common.moe.routing import block_map
from triton_dist.kernels.common.moe.rows import gathered_rows
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES
from triton_dist.testing.compile_only import HARDWARE, compile_only

REGISTERS = 65536
TOKENS, TOPK, E, K, N = 4096, 8, 128, 2048, 1536


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def weights(layout, dtype=torch.bfloat16, columns=N):
    if layout == "column-major":
        return meta(E, columns, K, dtype=dtype).transpose(1, 2)
    if layout == "strided":
        return meta(E, K, columns + 1, dtype=dtype)[:, :, :columns]
    return meta(E, K, columns, dtype=dtype)


def prepared(config, layout, dtype=torch.bfloat16, silu_mul=False, is_sorted=False):
    blocks = block_map(meta(TOKENS, TOPK, dtype=torch.int32), E, config.kwargs["BLOCK_SIZE_M"])
    C = meta(TOKENS * TOPK, N // 2 if silu_mul else N, dtype=dtype)
    return grouped_product(
        meta(TOKENS, K, dtype=dtype), weights(layout, dtype), C, blocks, config,
        is_sorted=is_sorted, silu_mul=silu_mul,
    )  # fmt: skip


def kernel_of(config):
    """What tells the kernels of configs apart."""
    return str(config.all_kwargs() | {"PROGRAMS": "any"})


@functools.cache
def compiled(index, layout, **options):
    with compile_only(90):
        return compile_launch(prepared(GROUPED_TILES[index], layout, **options))


def every_tile():
    """The largest in both layouts, every third of the others: ``test_ag_group_gemm.py`` has all,
    with more to do in each."""
    kinds = [kernel_of(config) for config in GROUPED_TILES]
    for number, index in enumerate(sorted({kinds.index(kind) for kind in kinds})):
        config = GROUPED_TILES[index]
        if number % 3:
            continue
        sizes = "x".join(str(config.kwargs[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
        both = ("row-major", "column-major")
        for layout in both if index == 0 else [both[number % 2]]:
            name = f"{sizes}-{config.num_warps}x{config.num_stages}-{layout}"
            yield pytest.param(index, layout, id=name)


def assert_fits(kernel, programs=1):
    assert kernel.stack_bytes == 0
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    # All programs that a multiprocessor is to have find room on it: 1 KB of its shared memory goes
    # to each beside its own.
    assert (kernel.shared_memory_bytes + 1024) * programs <= 228 * 1024
    assert kernel.registers * 32 * kernel.num_warps * programs <= REGISTERS


@pytest.mark.parametrize(("index", "layout"), list(every_tile()))
def test_a_tile_fits_gathers_and_pipelines(index, layout):
    config = GROUPED_TILES[index]
    kernel = compiled(index, layout)
    assert_fits(kernel, config.kwargs["PROGRAMS"])
    # 16 and 32 rows are too few for the matrix units of a group of warps.
    is_low = config.kwargs["BLOCK_SIZE_M"] < 64
    assert ("mma.sync" if is_low else "wgmma.mma_async") in kernel.ptx
    # A's rows come by 16 bytes a thread, weights by TMA: stages - 1 times ahead, and once inside.
    assert "cp.async.cg" in kernel.ptx
    assert "cp.async.ca" not in kernel.ptx
    assert len(TMA_LOAD.findall(kernel.ptx)) == kernel.num_stages
    # Rows of C are 16 bytes a thread too, as far as there are so many.
    assert re.search(r"st\.global\.v[24]\.b32", kernel.ptx)
    assert not re.search(r"st\.global\.b16", kernel.ptx)


@pytest.mark.parametrize("index", range(0, len(GROUPED_TILES), 5))
def test_a_tile_of_gate_and_up_fits(index):
    kernel = compiled(index, "row-major", silu_mul=True)
    assert_fits(kernel)
    assert len(TMA_LOAD.findall(kernel.ptx)) == 2 * kernel.num_stages


@pytest.mark.parametrize("index", [0, 7, 15])
def test_pointers_serve_what_tma_cannot_read(index):
    kernel = compiled(index, "strided")
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert not TMA_LOAD.search(kernel.ptx)


@pytest.mark.parametrize("experts", [8, 512])
def test_the_map_fits(experts):
    launches = block_map(
        meta(TOKENS, TOPK, dtype=torch.int64), experts, 128, rank=1, num_sources=4,
        group_ends=(1, 2, 4),
    ).launches  # fmt: skip
    with compile_only(90):
        for launch in launches:
            kernel = compile_launch(launch)
            assert_fits(kernel)
            assert "atom.global" not in kernel.ptx


def test_copied_rows_are_moved_by_16_bytes():
    blocks = block_map(meta(TOKENS, TOPK, dtype=torch.int32), E, 128)
    with compile_only(90):
        kernel = compile_launch(gathered_rows(meta(TOKENS, K), meta(TOKENS * TOPK, K), blocks))
    assert "ld.global.v4" in kernel.ptx
    assert "st.global.v4" in kernel.ptx
