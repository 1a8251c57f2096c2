"""The grouped GEMM whose rows arrive meanwhile: every tile, for sm_90 without a GPU."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from tests.compile.scattered import ACQUIRE, PROXY_FENCE, TMA_LOAD, compile_launch
from tests.compile.test_grouped_gemm import E, K, N, every_tile, meta, weights
from triton_dist.kernels.common.moe.first_use import first_uses
from triton_dist.kernels.common.moe.product import grouped_product
from triton_dist.kernels.common.moe.routing import block_map
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES
from triton_dist.kernels.common.peers import GatheredShards, ShardPush
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


def test_one_kernel_serves_every_rank():
    kernels = {compiled(16, rank=rank).ptx for rank in (0, 1, 3)}
    assert len(kernels) == 1


def by_first_use(config, group_ends, layout="row-major"):
    """The launch that finds the order, and the product that sends by it."""
    ranks, ids = group_ends[-1], meta(TOKENS, TOPK, dtype=torch.int32)
    blocks = block_map(
        ids, E, config.kwargs["BLOCK_SIZE_M"], rank=1, num_sources=ranks, group_ends=group_ends
    )
    uses = first_uses(ids, E, 1, group_ends, 32, 16)
    flags, table = meta(1024, dtype=torch.int64), meta(16, dtype=torch.int64)
    push = ShardPush(table, table, meta(16, dtype=torch.int32), 1, 32)
    gathered = GatheredShards(meta(TOKENS, K), flags, flags[:32], 1, 256, push)
    product = grouped_product(
        meta(TOKENS // ranks, K), weights(layout, torch.bfloat16), meta(TOKENS * TOPK, N), blocks,
        config, gathered=gathered, rank=1, uses=uses,
    )  # fmt: skip
    with compile_only(90):
        return compile_launch(uses.launch), compile_launch(product)


@pytest.mark.parametrize(("index", "group_ends"), [(0, (2,)), (7, (1, 8))])
def test_what_sends_by_first_use_fits_and_stores_whole_lines(index, group_ends):
    order, kernel = by_first_use(GROUPED_TILES[index], group_ends)
    assert order.stack_bytes == 0
    assert order.registers <= 168
    programs = GROUPED_TILES[index].kwargs["PROGRAMS"]
    assert kernel.stack_bytes == 0
    assert (kernel.shared_memory_bytes + 1024) * programs <= 228 * 1024
    assert kernel.registers * 32 * kernel.num_warps * programs <= REGISTERS
    assert len(TMA_LOAD.findall(kernel.ptx)) == kernel.num_stages
    assert "cp.async.ca" not in kernel.ptx
    # What is sent is stored by 16 bytes, before it is told; rows are read behind the waits.
    release = kernel.ptx.index("sys.release")
    assert "st.global.v4.b32" in kernel.ptx[:release]
    assert kernel.ptx.rindex("acquire") < GATHERED_LOAD.search(kernel.ptx).start()
