"""GEMM-AllReduce in packets x the tiles that it tries, for sm_90 without a GPU."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from tests.compile.scattered import compile_launch
from triton_dist.kernels.common.exchange.protocol import Packets
from triton_dist.kernels.common.gemm.spaces import LOW, POINTER_TILES_TO_ALL, TILES_TO_ALL
from triton_dist.kernels.common.scatter.packets import packet_gemm
from triton_dist.runtime.triton_compat import triton_version
from triton_dist.testing.compile_only import HARDWARE, compile_only

COUNT = "atom.global.gpu.relaxed.add.u64"
POLL = "ld.relaxed.sys.global.v2.b64"
SEND = "st.global.v2.b64"
TILES = {
    persistent: [config for config in tiles if config.kwargs["BLOCK_SIZE_M"] == LOW]
    for persistent, tiles in ((True, TILES_TO_ALL), (False, POINTER_TILES_TO_ALL))
}


def matrix(*shape, of=torch.bfloat16):
    return torch.empty(*shape, dtype=of, device="meta")


def prepared(persistent, config, rows=1, N=8192, dtype=torch.bfloat16, rank=1, num_ranks=4):
    """The launch for an A of ``rows`` x 4096; no memory."""
    words = matrix(64, of=torch.int64)
    table, guard = matrix(num_ranks, of=torch.int64), matrix(32, of=torch.int64)
    return packet_gemm(
        matrix(rows, 4096, of=dtype), matrix(N, 4096, of=dtype).T, matrix(rows, N, of=dtype),
        matrix(N, of=dtype), config, Packets(words, table, words, guard, 1 << 16),
        rank=rank, num_ranks=num_ranks, num_sms=132, persistent=persistent,
    )  # fmt: skip


@functools.cache
def compiled(persistent=True, index=0, arch=90, **options):
    with compile_only(arch):
        return compile_launch(prepared(persistent, TILES[persistent][index], **options))


def every_tile():
    """On 4 ranks; the widest of each kind on 8 too."""
    for persistent, tiles in TILES.items():
        widest = max(range(len(tiles)), key=lambda index: tiles[index].kwargs["BLOCK_SIZE_N"])
        for index, config in enumerate(tiles):
            sizes = "x".join(str(config.kwargs[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
            way = "descriptors" if persistent else "pointers"
            for num_ranks in (4, 8) if index == widest else (4,):
                yield pytest.param(persistent, index, num_ranks, id=f"{way}-{sizes}-{num_ranks}")


def lines_of_a_thread(config):
    tile = config.kwargs
    return tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"] // 4 // (32 * config.num_warps)


@pytest.mark.parametrize(("persistent", "index", "num_ranks"), list(every_tile()))
def test_a_tile_goes_in_whole_lines_from_who_polls_them(persistent, index, num_ranks):
    kernel, config = compiled(persistent, index, num_ranks=num_ranks), TILES[persistent][index]
    ptx, lines = kernel.ptx, lines_of_a_thread(config) * (num_ranks - 1)
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    # Addresses of peers, most in Triton 3.7; of 8 ranks also what comparing their sizes takes.
    assert kernel.stack_bytes <= (216 if num_ranks == 8 else 72)
    assert "mma.sync" in ptx
    # What is sent, and set to 0 again.
    assert ptx.count(SEND) == 2 * lines
    assert "st.global.b64" not in ptx
    # Of four lines a thread, Triton makes copies of the polling, whose results nobody uses.
    copies = {6: 4, 7: 3, 8: 3}.get(triton_version().minor, 1)
    assert ptx.count(POLL) == lines * (copies if lines_of_a_thread(config) == 4 else 1)
    # Nothing that peers send moves to other threads: they meet to clear words, and that is all.
    last_poll = ptx.rindex(POLL)
    assert "st.shared" not in ptx[ptx.index(POLL) : last_poll]
    assert "bar.sync" in ptx[last_poll : ptx.index(SEND, last_poll)]
    assert set(re.findall(r"st\.global\S*", ptx)) == {SEND, "st.global.v2.b32"}


@pytest.mark.parametrize("persistent", [True, False])
def test_nothing_waits_for_a_fence_or_a_flag(persistent):
    """But for what makes descriptors, which is of this GPU alone."""
    found = re.findall(
        r"\S*(?:fence|membar|release|acquire|\.volatile)\S*", compiled(persistent).ptx
    )
    assert all("async.shared::cta" in each or "tensormap" in each for each in found)
    assert bool(found) is persistent
    assert not any(".sys" in each for each in found)


def test_peers_and_the_number_of_the_call_are_known_before_the_product():
    ptx = compiled().ptx
    product = ptx.index("mma.sync")
    assert ptx.index("ld.global.b64") < ptx.index(COUNT) < min(product, ptx.index(SEND))
    assert "ld.global.b64" not in ptx[ptx.index(COUNT) :]


@pytest.mark.parametrize(("N", "dtype"), [(8190, torch.float16), (33, torch.float32)], ids=str)
def test_any_row_and_dtype(N, dtype):
    kernel = compiled(False, dtype=dtype, N=N, rows=7)
    assert kernel.stack_bytes <= 64
    assert SEND in kernel.ptx
    assert "st.global.b64" not in kernel.ptx
