"""The all-reduce in packets x the shapes of its space, for sm_90 without a GPU."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from tests.compile.scattered import compile_launch
from triton_dist.kernels.common.exchange.buffer import Shape, plan_of
from triton_dist.kernels.common.exchange.packets import kernel_all_reduce_packets
from triton_dist.kernels.common.exchange.protocol import Packets
from triton_dist.kernels.common.launch import Launch
from triton_dist.kernels.nvidia.allreduce.ways import PACKET_SHAPES
from triton_dist.testing.compile_only import compile_only

COUNT = "atom.global.gpu.relaxed.add.u64"
POLL = "ld.relaxed.sys.global.v2.b64"
SEND = "st.global.v2.b64"
BLOCKS_OF_2048 = Shape(64, 2048)
BLOCKS = {shape.block_bytes: shape for shape in PACKET_SHAPES}.values()


def prepared(shape, elements=1 << 14, num_ranks=4, dtype=torch.bfloat16, rank=1):
    """A launch without memory."""

    def meta(count, of=dtype):
        return torch.empty(count, dtype=of, device="meta")

    words, table = meta(64, torch.int64), meta(num_ranks, torch.int64)
    packets = Packets(words, table, words, meta(32, torch.int64), 1 << 16)
    arguments = (meta(1), meta(1), packets, elements, 100, rank)
    options = {
        "plan": plan_of(num_ranks, shape, meta(1)),
        "num_warps": shape.num_warps_in_packets,
    }
    return Launch(kernel_all_reduce_packets, (shape.num_ctas,), arguments, options)


@functools.cache
def compiled(shape, arch=90, **options):
    with compile_only(arch):
        return compile_launch(prepared(shape, **options))


@pytest.mark.parametrize("shape", BLOCKS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "num_ranks"), [(torch.bfloat16, 4), (torch.float32, 2), (torch.float16, 8)], ids=str
)
def test_a_thread_sends_and_polls_a_line_and_moves_nothing_to_another(shape, dtype, num_ranks):
    kernel = compiled(shape, dtype=dtype, num_ranks=num_ranks)
    ptx, peers = kernel.ptx, num_ranks - 1
    assert kernel.stack_bytes <= 64  # a few addresses, in Triton 3.6
    assert kernel.registers * kernel.num_warps * 32 <= 65536
    assert len(re.findall(re.escape(POLL), ptx)) == peers
    # The first block, those behind it, and setting to 0.
    assert len(re.findall(re.escape(SEND), ptx)) == 3 * peers
    # What all threads are told is the number of the call; they meet again before words are cleared.
    assert len(re.findall(r"st\.shared", ptx)) == 1
    assert len(re.findall(r"bar\.sync", ptx)) == 2
    data = re.findall(r"(?:ld|st)\.global(?:\.v\d)?\.b(?:16|32)", ptx)
    assert set(data) - {"ld.global.b32"} == {"ld.global.v2.b32", "st.global.v2.b32"}  # guard[0]


def test_nothing_waits_for_a_fence_or_a_flag():
    ptx = compiled(BLOCKS_OF_2048).ptx
    assert not re.search(r"fence|membar|release|acquire|\.volatile", ptx)


def test_all_looks_are_in_flight_together_and_all_are_repeated():
    """In the order of the program: look up the peers, count the call, send, look at a line of each
    peer, and at all of them again."""
    ptx = compiled(BLOCKS_OF_2048).ptx
    assert ptx.index("ld.global.b64") < ptx.index(COUNT) < ptx.index(SEND) < ptx.index(POLL)
    between_sends = ptx[ptx.index(COUNT) : ptx.index(POLL)]
    assert "ld.global.b64" not in between_sends
    loop = re.search(r"look:\n(.*?)@some bra look;", ptx, re.S)[1]
    assert len(re.findall(re.escape(POLL), loop)) == 3
    looks = [found.end() for found in re.finditer(re.escape(POLL), loop)]
    assert "some" not in loop[: looks[-1]]


def test_words_are_cleared_after_all_threads_have_them():
    ptx = compiled(BLOCKS_OF_2048).ptx
    last_poll = ptx.rindex(POLL)
    assert "bar.sync" in ptx[last_poll : ptx.index(SEND, last_poll)]


@pytest.mark.parametrize(
    ("elements", "dtype"), [(1, torch.float32), (4097, torch.bfloat16)], ids=str
)
def test_odd_sizes(elements, dtype):
    kernel = compiled(BLOCKS_OF_2048, elements=elements, dtype=dtype)
    assert kernel.stack_bytes <= 64  # a few addresses, in Triton 3.6
    assert "st.global.v2.b64" in kernel.ptx
    assert "st.global.b64" not in kernel.ptx


@pytest.mark.parametrize("arch", [80, 100])
def test_other_generations(arch):
    assert f".target sm_{arch}" in compiled(BLOCKS_OF_2048, arch).ptx
