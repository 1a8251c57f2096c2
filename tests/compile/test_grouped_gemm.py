"""The grouped GEMM, also with rows that arrive meanwhile, its block map, and the sums over choices
and ranks, for sm_90 without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from tests.compile.scattered import (
    ACQUIRE,
    PROXY_FENCE,
    WGMMA,
    assert_fits,
    compile_launch,
    matrix,
    quick,
    words,
)
from triton_dist.kernels.common.exchange.protocol import Peers, Plan, Slots
from triton_dist.kernels.common.exchange.pushed import Pushed
from triton_dist.kernels.common.moe.columns import kernel_add_columns
from triton_dist.kernels.common.moe.product import grouped_product
from triton_dist.kernels.common.moe.routing import block_map
from triton_dist.kernels.common.moe.rows import gather_rows
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES
from triton_dist.kernels.common.moe.topk_sum import (
    kernel_topk_exchange,
    topk_sum,
)
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.kernels.common.slots.gathered import MAX_CHUNKS
from triton_dist.runtime.launch import Launch

GATHERED_LOAD = re.compile(r"cp\.async\.c[ag]\.shared")
WHOLE_VECTORS = ("ld.global.v4.b32", "st.global.v4.b32")
TOKENS, TOPK, E, K, N, RANKS = 4096, 8, 128, 2048, 1536, 4
LAYOUTS = ROW_MAJOR, COLUMN_MAJOR = "row-major", "column-major"
STRIDED = "strided"


def routed(topk=TOPK, dtype=torch.int32):
    return matrix(TOKENS, topk, dtype=dtype)


def weights(layout, dtype=torch.bfloat16):
    if layout == COLUMN_MAJOR:
        return matrix(E, N, K, dtype=dtype).transpose(1, 2)
    return matrix(E, K, N + (layout == STRIDED), dtype=dtype)[:, :, :N]


def prepared(config, layout=ROW_MAJOR, silu_mul=False):
    blocks = block_map(routed(), E, config.kwargs["BLOCK_SIZE_M"])
    C = matrix(TOKENS * TOPK, N // 2 if silu_mul else N)
    return grouped_product(
        matrix(TOKENS, K), weights(layout), C, blocks, config, is_sorted=False, silu_mul=silu_mul
    )


def prepared_gathered(config, layout=ROW_MAJOR, rank=1):
    blocks = block_map(
        routed(), E, config.kwargs["BLOCK_SIZE_M"], rank=rank, num_sources=RANKS,
        group_ends=(1, RANKS),
    )  # fmt: skip
    gathered = GatheredShards(matrix(TOKENS, K), words(), words(32), 1, MAX_CHUNKS)
    own, C = matrix(TOKENS // RANKS, K), matrix(TOKENS * TOPK, N)
    return grouped_product(own, weights(layout), C, blocks, config, gathered=gathered, rank=rank)


# The largest in both layouts, the others in one by turns.
EVERY_TILE = [
    (0, COLUMN_MAJOR), *((index, LAYOUTS[index % 2]) for index in range(len(GROUPED_TILES))),
]  # fmt: skip


def assert_gathers_and_pipelines(kernel, config, stack_bytes=0):
    is_low = config.kwargs["BLOCK_SIZE_M"] < 64  # too few rows for the units of a group of warps
    assert_fits(
        kernel,
        stack_bytes=stack_bytes,
        programs=config.kwargs["PROGRAMS"],
        # A's rows come by 16 bytes a thread, weights by TMA: stages - 1 times ahead, once inside.
        tma_loads=kernel.num_stages,
        has=["mma.sync" if is_low else WGMMA, "cp.async.cg"],
        lacks=["cp.async.ca"],
    )


@pytest.mark.parametrize(("index", "layout"), quick(EVERY_TILE, (19, COLUMN_MAJOR)))
def test_a_tile_fits_gathers_and_pipelines(sm90, index, layout):
    """Of the product whose rows are all there; the next test has the same with more to do."""
    config = GROUPED_TILES[index]
    kernel = compile_launch(prepared(config, layout))
    assert_gathers_and_pipelines(kernel, config)
    # Rows of C are 16 bytes a thread too, as far as there are so many.
    assert re.search(r"st\.global\.v[24]\.b32", kernel.ptx)
    assert not re.search(r"st\.global\.b16", kernel.ptx)


@pytest.mark.parametrize(("index", "layout"), quick(EVERY_TILE, (18, ROW_MAJOR)))
def test_a_tile_waits_for_its_rows(sm90, index, layout):
    """Behind each acquire comes a barrier, since it is one thread's, before anything is decided;
    rows of A are read behind all of them. The fence between the proxies, which only TMA would need,
    stands in the loop of the wait, so the token that rows depend on comes from there."""
    config = GROUPED_TILES[index]
    ptx = (kernel := compile_launch(prepared_gathered(config, layout))).ptx
    # Tile 17 is meant for two programs a multiprocessor, and puts an address or two aside.
    assert_gathers_and_pipelines(kernel, config, stack_bytes=16 if index == 17 else 0)
    acquires = [match.end() for match in re.finditer(re.escape(ACQUIRE), ptx)]
    load = GATHERED_LOAD.search(ptx).start()
    assert acquires[-1] < load
    assert ptx.index(PROXY_FENCE) < load
    for acquire in acquires:
        assert "bar.sync" in ptx[acquire : ptx.index("bra", acquire)]


@pytest.mark.parametrize("index", quick([(0,), (5,), (10,), (15,), (20,)], (0,)))
def test_a_tile_of_gate_and_up_fits(sm90, index):
    kernel = compile_launch(prepared(GROUPED_TILES[index], silu_mul=True))
    assert_fits(kernel, tma_loads=2 * kernel.num_stages)


@pytest.mark.parametrize(
    ("index", "gathered"),
    quick([(0, False), (7, False), (15, False), (0, True), (16, True), (18, True)], (18, True)),
)
def test_pointers_serve_what_tma_cannot_read(sm90, index, gathered):
    make = prepared_gathered if gathered else prepared
    kernel = compile_launch(make(GROUPED_TILES[index], STRIDED))
    assert_fits(kernel, stack_bytes=1 << 10, tma_loads=0)
    # Without TMA, weights are gathered loads too: none of them needs to wait.
    assert (ACQUIRE in kernel.ptx) is gathered


@pytest.mark.parametrize("experts", quick([(8,), (512,)], (8,)))
def test_the_map_fits(sm90, experts):
    blocks = block_map(
        routed(dtype=torch.int64), experts, 128, rank=1, num_sources=4, group_ends=(1, 2, 4)
    )
    for launch in blocks.launches:
        assert_fits(compile_launch(launch), lacks=["atom.global"])


def test_copied_rows_are_moved_by_16_bytes(sm90):
    launch = gather_rows(matrix(TOKENS, K), matrix(TOKENS * TOPK, K), block_map(routed(), E, 128))
    assert_fits(compile_launch(launch), has=WHOLE_VECTORS)


def test_columns_of_weights_come_by_tma(sm90):
    """A chunk is a slice, whose strides are those of all weights."""
    chunk = matrix(E, 768, 4096)[:, :, 1024:2048]
    rows, C = matrix(TOKENS * TOPK, 768), matrix(TOKENS * TOPK, 1024)
    blocks, config = block_map(routed(), E, 64), GROUPED_TILES[10]
    launch = grouped_product(rows, chunk, C, blocks, config, is_sorted=False, silu_mul=False)
    kernel = compile_launch(launch)
    assert_fits(kernel, tma_loads=kernel.num_stages)


@pytest.mark.parametrize(
    ("topk", "width", "dtype", "is_sorted"),
    quick(
        SUMS := [
            (1, 1024, torch.bfloat16, False),
            (8, 128, torch.bfloat16, False),
            (10, 4096, torch.bfloat16, False),
            (8, 256, torch.float32, True),
            (2, 100, torch.float16, True),
            (2, 128, torch.bfloat16, False),
            (8, 4096, torch.bfloat16, False),
            (10, 1024, torch.bfloat16, False),
        ],
        SUMS[2],
    ),
)
def test_choices_are_read_by_16_bytes_all_at_once(sm90, topk, width, dtype, is_sorted):
    M = 2 * TOKENS
    choices, ids = matrix(M, topk, dtype=torch.float32), matrix(M, topk, dtype=torch.int32)
    rows = matrix(M * topk, dtype=torch.int32) if is_sorted else None
    products, out = matrix(M * topk, width, dtype=dtype), matrix(M * 4096, dtype=dtype)
    kernel = compile_launch(
        topk_sum(
            products, choices, ids, rows, out, E, rows_per_block=TOKENS, first_column=512, N=4096
        )
    )
    assert_fits(kernel)
    if dtype is torch.bfloat16:
        assert "st.global.v4.b32" in kernel.ptx
        assert kernel.registers <= 128
        assert len(re.findall(r"ld\.global\.v4\.b32", kernel.ptx)) >= topk
        # The last choice is on its way before the first is rounded.
        assert kernel.ptx.rindex("ld.global") < kernel.ptx.index("cvt.rn.bf16")


@pytest.mark.parametrize(
    ("num_ranks", "width", "block_n", "dtype"),
    quick(
        PARTS := [
            (2, 512, 512, torch.bfloat16),
            (8, 4096, 1024, torch.bfloat16),
            (4, 96, 128, torch.bfloat16),
            (2, 256, 256, torch.float32),
            (4, 128, 128, torch.bfloat16),
            (4, 4096, 1024, torch.bfloat16),
            (8, 128, 128, torch.bfloat16),
        ],
        PARTS[1],
    ),
)
def test_parts_are_read_by_16_bytes_behind_their_flags(sm90, num_ranks, width, block_n, dtype):
    aligned = dtype is torch.bfloat16 and width % 128 == 0
    given = (matrix(1 << 20, dtype=dtype) for _ in range(3))
    operands = (next(given), next(given), Pushed(next(given), words(), words()))
    sizes = (8192 // num_ranks, 4096, width, 1 << 26, 8192, 1)
    options = {
        "NUM_RANKS": num_ranks, "ALIGNED": aligned, "BLOCK_SIZE_M": 2048 // block_n,
        "BLOCK_SIZE_N": block_n, "num_warps": 4,
    }  # fmt: skip
    kernel = compile_launch(Launch(kernel_add_columns, (528,), (*operands, *sizes), options))
    assert_fits(kernel, has=[ACQUIRE])
    if aligned:
        assert kernel.registers <= 128
        loads = [*re.finditer(r"ld\.global\.cg\.v4\.b32", kernel.ptx)]
        assert len(loads) >= 2 * num_ranks  # 2048 elements, 16 a thread
        assert kernel.ptx.index(ACQUIRE) < loads[0].start()
        assert "st.global.v4.b32" in kernel.ptx


@pytest.mark.parametrize(
    ("topk", "num_ranks", "whole", "is_sorted", "dtype", "width"),
    quick(
        EXCHANGES := [
            (8, 2, False, False, torch.bfloat16, 4096),
            (10, 8, True, True, torch.bfloat16, 4096),
            (3, 2, False, False, torch.float32, 100),
        ],
        EXCHANGES[0],
    ),
)
def test_one_launch_sums_choices_as_it_loads_and_ranks_behind_their_flags(
    sm90, topk, num_ranks, whole, is_sorted, dtype, width
):
    slots = Slots(matrix(1 << 20, dtype=dtype), words(16), 1 << 20)
    peers = Peers(words(), words(16), words(), words())
    rows = matrix(64 * topk, dtype=torch.int32) if is_sorted else None
    choices, ids = matrix(64, topk, dtype=torch.float32), matrix(64, topk, dtype=torch.int32)
    products, out = matrix(64 * topk, width, dtype=dtype), matrix(64, width, dtype=dtype)
    arguments = (products, choices, ids, rows, out, slots, peers, 32, width, E, 1 << 18, 64, 1)
    plan = Plan(num_ranks, num_ranks, 8192 // out.element_size(), 1)
    options = {"TOPK": topk, "ALL_ROWS": whole, "plan": plan, "num_warps": 16}
    kernel = compile_launch(Launch(kernel_topk_exchange, (128,), arguments, options))
    assert_fits(kernel, stack_bytes=16)  # an address
    if dtype is torch.float32:
        return
    acquire = kernel.ptx.rindex("acquire")  # of the flags of all ranks
    before, after = kernel.ptx[:acquire], kernel.ptx[acquire:]
    own_block = 1 if whole else num_ranks
    assert len(re.findall(r"ld\.global\.v4\.b32", before)) >= topk * own_block
    # Here, and at each peer, and at last the sum.
    assert len(re.findall(r"st\.global\.v4\.b32", before)) >= num_ranks
    assert len(re.findall(r"ld\.global\.cg\.v4\.b32", after)) >= num_ranks
    assert "st.global.v4.b32" in after
