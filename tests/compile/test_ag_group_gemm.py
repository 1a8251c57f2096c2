"""The grouped GEMM whose rows arrive meanwhile: every tile, for sm_90 without a GPU."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from tests.compile.scattered import ACQUIRE, PROXY_FENCE, TMA_LOAD, compile_launch
from tests.compile.test_grouped_gemm import E, K, N, every_tile, meta, weights
from triton_dist.kernels.common.moe.product import grouped_product
from triton_dist.kernels.common.moe.routing import block_map
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.kernels.common.slots.gathered import MAX_CHUNKS
from triton_dist.testing.compile_only import HARDWARE, compile_only

REGISTERS = 65536
GATHERED_LOAD = re.compile(r"cp\.async\.c[ag]\.shared")
TOKENS, TOPK, RANKS = 4096, 8, 4


def prepared(config, layout="row-major", dtype=torch.bfloat16, ranks=RANKS, rank=1):
    blocks = block_map(
        meta(TOKENS, TOPK, dtype=torch.int32), E, config.kwargs["BLOCK_SIZE_M"], rank=rank,
        num_sources=ranks, group_ends=(1, ranks),
    )  # fmt: skip
    flags = meta(256, dtype=torch.int64)
    gathered = GatheredShards(meta(TOKENS, K, dtype=dtype), flags, flags[:32], 1, MAX_CHUNKS)
    own, C = meta(TOKENS // ranks, K, dtype=dtype), meta(TOKENS * TOPK, N, dtype=dtype)
    B = weights(layout, dtype)
    return grouped_product(own, B, C, blocks, config, gathered=gathered, rank=rank)


@functools.cache
def compiled(index, layout="row-major", **options):
    with compile_only(90):
        return compile_launch(prepared(GROUPED_TILES[index], layout, **options))


@pytest.mark.parametrize(("index", "layout"), list(every_tile()))
def test_a_tile_fits_waits_gathers_and_pipelines(index, layout):
    kernel, config = compiled(index, layout), GROUPED_TILES[index]
    programs = config.kwargs["PROGRAMS"]
    assert kernel.stack_bytes == 0
    assert (kernel.shared_memory_bytes + 1024) * programs <= 228 * 1024
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert kernel.registers * 32 * kernel.num_warps * programs <= REGISTERS
    # A wait stands in the loop over tiles, and that along K is pipelined all the same.
    assert "cp.async.cg" in kernel.ptx
    assert "cp.async.ca" not in kernel.ptx
    assert len(TMA_LOAD.findall(kernel.ptx)) == kernel.num_stages
    assert_waits_before_loads(kernel.ptx)


def assert_waits_before_loads(ptx):
    """Behind each acquire comes a barrier, since it is one thread's, before anything is decided;
    rows of A are read behind all of them. The fence between the proxies, which only TMA would need,
    stands in the loop of the wait, so the token that rows depend on comes from there."""
    acquires = [match.end() for match in re.finditer(re.escape(ACQUIRE), ptx)]
    assert acquires
    load = GATHERED_LOAD.search(ptx).start()
    assert acquires[-1] < load
    assert ptx.index(PROXY_FENCE) < load
    for acquire in acquires:
        assert "bar.sync" in ptx[acquire : ptx.index("bra", acquire)]


@pytest.mark.parametrize("index", [0, 16])
def test_pointers_serve_what_tma_cannot_read(index):
    kernel = compiled(index, "strided")
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert not TMA_LOAD.search(kernel.ptx)
    # Without TMA, weights are gathered loads too: none of them needs to wait.
    assert ACQUIRE in kernel.ptx
