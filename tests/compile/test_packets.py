"""The all-reduce in packets and the GEMM whose product goes in packets, for sm_90 without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from tests.compile.scattered import assert_fits, compile_launch, matrix, quick, words
from triton_dist.kernels.common.exchange.buffer import LaunchParams, exchange_lengths, make_plan
from triton_dist.kernels.common.exchange.protocol import Packets
from triton_dist.kernels.common.exchange.sums import one_shot_exchange, two_shot_exchange
from triton_dist.kernels.common.gemm.spaces import (
    MIN_TILE_ROWS,
    POINTER_TILES_TO_ALL,
    TILES_TO_ALL,
)
from triton_dist.kernels.common.scatter.packets import packet_gemm
from triton_dist.kernels.nvidia.allreduce.algorithms import PACKET_CANDIDATES
from triton_dist.runtime.launch import Launch
from triton_dist.runtime.triton_compat import triton_version
from triton_dist.testing.compile_only import compile_only

COUNT = "atom.global.gpu.relaxed.add.u64"
POLL = "ld.relaxed.sys.global.v2.b64"
SEND = "st.global.v2.b64"
HALF_A_LINE = "st.global.b64"
FENCE = re.compile(r"\S*(?:fence|membar|release|acquire|\.volatile)\S*")
BLOCKS_OF_2048 = LaunchParams(64, 2048)
BLOCKS = [*{shape.block_bytes: shape for shape in PACKET_CANDIDATES}.values()]
TILES = {
    persistent: [config for config in tiles if config.kwargs["BLOCK_SIZE_M"] == MIN_TILE_ROWS]
    for persistent, tiles in ((True, TILES_TO_ALL), (False, POINTER_TILES_TO_ALL))
}


def packets_of(num_ranks):
    return Packets(words(64), words(num_ranks), words(64), words(32), 1 << 16)


def exchanged(shape, elements=1 << 14, num_ranks=4, dtype=torch.bfloat16, rank=1, two_shot=False):
    """The launch of an all-reduce."""
    x, out = matrix(1, dtype=dtype), matrix(1, dtype=dtype)
    plan = make_plan(num_ranks, shape, x)
    options = {"plan": plan, "num_warps": shape.num_warps_in_packets}
    exchange = one_shot_exchange(elements, shape, 100, True)
    if two_shot:
        exchange = two_shot_exchange(elements, num_ranks, shape, 100, True)
    arguments = (x, out, packets_of(num_ranks), exchange_lengths(exchange), 100, rank)
    return Launch(exchange.kernel, (shape.num_ctas,), arguments, options)


def prepared(persistent, config, rows=1, N=8192, dtype=torch.bfloat16, rank=1, num_ranks=4):
    """The launch of a GEMM for an A of ``rows`` x 4096."""
    return packet_gemm(
        matrix(rows, 4096, dtype=dtype), matrix(N, 4096, dtype=dtype).T,
        matrix(rows, N, dtype=dtype), matrix(N, dtype=dtype), config, packets_of(num_ranks),
        rank=rank, num_ranks=num_ranks, num_sms=132, persistent=persistent,
    )  # fmt: skip


EVERY_BLOCK = [
    (shape, dtype, num_ranks)
    for dtype, num_ranks in ((torch.bfloat16, 4), (torch.float32, 2), (torch.float16, 8))
    for shape in BLOCKS
]


@pytest.mark.parametrize(
    ("shape", "dtype", "num_ranks"),
    quick(
        EVERY_BLOCK,
        (BLOCKS[0], torch.bfloat16, 4),
    ),
)
def test_a_thread_sends_and_polls_a_line_and_moves_nothing_to_another(
    sm90, shape, dtype, num_ranks
):
    kernel = compile_launch(exchanged(shape, dtype=dtype, num_ranks=num_ranks))
    ptx, peers = kernel.ptx, num_ranks - 1
    assert_fits(kernel, stack_bytes=64, lacks=[FENCE])  # a few addresses, in Triton 3.6
    assert ptx.count(POLL) == peers
    # The first block, those behind it, and setting to 0.
    assert ptx.count(SEND) == 3 * peers
    # What all threads are told is the number of the call; they meet again before words are cleared.
    assert ptx.count("st.shared") == 1
    assert ptx.count("bar.sync") == 2
    assert_words_are_cleared_after_all_threads_have_them(ptx)
    data = re.findall(r"(?:ld|st)\.global(?:\.v\d)?\.b(?:16|32)", ptx)
    # The exception reads a timeout word.
    assert set(data) - {"ld.global.b32"} == {"ld.global.v2.b32", "st.global.v2.b32"}
    # In the order of the program: look up the peers, count the call, send, look at a line of each
    # peer, and at all of them again.
    assert ptx.index("ld.global.b64") < ptx.index(COUNT) < ptx.index(SEND) < ptx.index(POLL)
    assert "ld.global.b64" not in ptx[ptx.index(COUNT) : ptx.index(POLL)]
    loop = re.search(r"poll:\n(.*?)@some bra poll;", ptx, re.S)[1]
    assert loop.count(POLL) == peers
    assert "some" not in loop[: loop.rindex(POLL)]


@pytest.mark.parametrize(
    ("shape", "num_ranks"),
    quick(
        LINES := [
            (LaunchParams(128, nbytes), ranks) for nbytes in (1024, 4096) for ranks in (4, 8)
        ],
        LINES[0],
    ),
)
def test_two_shots_send_and_poll_whole_lines(sm90, shape, num_ranks):
    kernel = compile_launch(exchanged(shape, num_ranks=num_ranks, two_shot=True))
    peers = num_ranks - 1
    assert_fits(kernel, stack_bytes=64, has=[SEND], lacks=[FENCE, HALF_A_LINE])
    assert kernel.ptx.count(POLL) == 2 * peers  # addends, then sums
    assert kernel.ptx.count(SEND) == 4 * peers  # both are sent and cleared


def assert_words_are_cleared_after_all_threads_have_them(ptx):
    last_poll = ptx.rindex(POLL)
    assert "bar.sync" in ptx[last_poll : ptx.index(SEND, last_poll)]


@pytest.mark.parametrize(
    ("elements", "dtype", "arch"),
    quick(
        [
            (1, torch.float32, 90),
            (4096, torch.bfloat16, 80),
            (4097, torch.bfloat16, 90),
            (4096, torch.bfloat16, 100),
        ],
    ),
)
def test_odd_sizes_and_other_generations(elements, dtype, arch):
    with compile_only(arch):
        kernel = compile_launch(exchanged(BLOCKS_OF_2048, elements, dtype=dtype))
    assert_fits(kernel, stack_bytes=64, has=[SEND], lacks=[HALF_A_LINE])


# On 4 ranks; the widest of each kind on 8 too.
WIDEST = {
    persistent: max(range(len(tiles)), key=lambda index: tiles[index].kwargs["BLOCK_SIZE_N"])
    for persistent, tiles in TILES.items()
}
EVERY_TILE = [
    (persistent, index, num_ranks)
    for persistent, tiles in TILES.items()
    for index in range(len(tiles))
    for num_ranks in ((4, 8) if index == WIDEST[persistent] else (4,))
]


@pytest.mark.parametrize(
    ("persistent", "index", "num_ranks"),
    quick(EVERY_TILE, (True, 0, 4)),
)
def test_a_tile_goes_in_whole_lines_from_who_polls_them(sm90, persistent, index, num_ranks):
    config = TILES[persistent][index]
    kernel = compile_launch(prepared(persistent, config, num_ranks=num_ranks))
    ptx, tile = kernel.ptx, config.kwargs
    lines = tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"] // 4 // (32 * config.num_warps)
    # Addresses of peers, most in Triton 3.7; of 8 ranks also what comparing their sizes takes.
    aside = 216 if num_ranks == 8 else 72
    assert_fits(kernel, stack_bytes=aside, has=["mma.sync"], lacks=[HALF_A_LINE])
    # What is sent, and set to 0 again.
    assert ptx.count(SEND) == 2 * lines * (num_ranks - 1)
    # Of four lines a thread, Triton makes copies of the polling, whose results nobody uses.
    copies = {6: 4, 7: 3, 8: 3}.get(triton_version().minor, 1) if lines == 4 else 1
    assert ptx.count(POLL) == lines * (num_ranks - 1) * copies
    # Nothing that peers send moves to other threads: they meet to clear words, and that is all.
    assert "st.shared" not in ptx[ptx.index(POLL) : ptx.rindex(POLL)]
    assert_words_are_cleared_after_all_threads_have_them(ptx)
    assert set(re.findall(r"st\.global\S*", ptx)) == {SEND, "st.global.v2.b32"}
    # No fence but what makes descriptors, which is of this GPU alone.
    found = FENCE.findall(ptx)
    assert all("async.shared::cta" in each or "tensormap" in each for each in found)
    assert bool(found) is persistent
    assert not any(".sys" in each for each in found)
    # Peers and the number of the call are known before the product.
    product = ptx.index("mma.sync")
    assert ptx.index("ld.global.b64") < ptx.index(COUNT) < min(product, ptx.index(SEND))
    assert not persistent or "ld.global.b64" not in ptx[ptx.index(COUNT) :]


@pytest.mark.parametrize(
    ("N", "dtype"),
    quick([(33, torch.float16), (8190, torch.float16), (33, torch.float32)], (33, torch.float16)),
)
def test_any_row_and_dtype(sm90, N, dtype):
    kernel = compile_launch(prepared(False, TILES[False][0], dtype=dtype, N=N, rows=7, num_ranks=2))
    assert_fits(kernel, stack_bytes=64, has=[SEND], lacks=[HALF_A_LINE])
