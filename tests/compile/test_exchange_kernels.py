"""The kernels of the plain collectives x the shapes of their spaces, for sm_90 without a GPU."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from tests.compile.scattered import assert_fits, compile_launch, matrix, quick, words
from triton_dist.kernels.common.exchange import protocol, pushed, sums
from triton_dist.kernels.common.exchange.buffer import (
    DEFAULT_PARAMS,
    LARGE_PARAMS,
    SMALL_PARAMS,
    LaunchParams,
    make_plan,
    padded_shard_numel,
)
from triton_dist.kernels.common.exchange.protocol import Lengths, Peers, Slots
from triton_dist.runtime.launch import Launch
from triton_dist.runtime.triton_compat import triton_version
from triton_dist.testing.compile_only import compile_only

ACQUIRE = "sys.acquire"
RELEASE = "atom.global.sys.release.exch.b64"
COUNT = "atom.global.gpu.relaxed.add.u64"
ONE_LAUNCH = {
    "one shot": sums.kernel_all_reduce_one_shot,
    "two shot": sums.kernel_all_reduce_two_shot,
    "reduce-scatter": protocol.kernel_reduce_scatter,
    "all-gather": protocol.kernel_all_gather,
}
PUSHED = {"add": pushed.kernel_add_pushed, "copy": pushed.kernel_copy_pushed}
KERNELS = ONE_LAUNCH | PUSHED
# The number of programs is not known to the compiler: one of each of the others.
# Pieces are the bound of a loop: one, and the most, of each size of a block.
SHAPES = {
    (shape.block_bytes, shape.num_chunks > 1): shape
    for shape in sorted(
        (*LARGE_PARAMS, *SMALL_PARAMS, DEFAULT_PARAMS), key=lambda each: each.num_chunks
    )
}
LARGEST = SHAPES[16384, True]


def prepared(name, shape, elements=1 << 22, num_ranks=4, dtype=torch.bfloat16, rank=1):
    """A launch for shards of ``elements``; without memory."""
    x, out, slots = (matrix(1, dtype=dtype) for _ in range(3))
    total = elements * (1 if name == "one shot" else num_ranks)
    lengths = Lengths(elements, padded_shard_numel(elements), total)
    chunks = 1 if name == "one shot" else shape.num_chunks
    options = {"plan": make_plan(num_ranks, shape, x, chunks), "num_warps": shape.num_warps}
    if name in PUSHED:
        arguments = (x, out, pushed.Pushed(slots, words(), words()), lengths, 100, rank)
        return Launch(PUSHED[name], (64,), arguments, options)
    table = words(num_ranks)
    peers = Peers(words(), table, words(), words())
    arguments = (x, out, Slots(slots, table, 1 << 26), peers, lengths, 100, rank)
    return Launch(ONE_LAUNCH[name], (shape.num_ctas,), arguments, options)


def assert_only_vectors(ptx):
    """Data is read and written 16 bytes at a time alone."""
    narrow = re.findall(r"(?:ld|st)\.global(?:\.cg)?\.(?:b16|b32|v2\.b32)\b", ptx)
    # What is not data: entries of tables, and two timeout words.
    assert not [each for each in narrow if each[:2] == "st" or "b16" in each or ".cg" in each]


EVERY_SHAPE = [
    *itertools.product(ONE_LAUNCH, SHAPES.values()),
    *itertools.product(PUSHED, [LaunchParams(16, 16384, 1), LaunchParams(64, 16384, 4)]),
]
# The largest blocks, with and without a loop over pieces.
IN_CI = [
    *(
        (name, LARGEST if name in ("two shot", "all-gather") else SHAPES[16384, False])
        for name in ONE_LAUNCH
    ),
    ("add", LaunchParams(64, 16384, 4)),
    ("copy", LaunchParams(16, 16384, 1)),
]


@pytest.mark.parametrize(("name", "shape"), quick(EVERY_SHAPE, *IN_CI))
def test_an_exchange_moves_vectors_behind_flags_and_spills_nothing(sm90, name, shape):
    """In the order of the program: count the call, store to peers, a barrier of the threads,
    release; acquire, then load what came."""
    kernel = compile_launch(prepared(name, shape))
    ptx = kernel.ptx
    # Rather than take a 65th register, the assembler puts three addresses of the all-gather aside.
    aside = 16 if name == "all-gather" and triton_version().minor in (7, 8) else 0
    assert_fits(kernel, stack_bytes=aside)
    assert_only_vectors(ptx)
    assert ptx.index(ACQUIRE) < ptx.index("ld.global.cg.v4.b32")
    if name in PUSHED:
        assert RELEASE not in ptx
        return
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    if name == "one shot":
        release = ptx.index(RELEASE)
        assert ptx.index(COUNT) < ptx.index("st.global.v4.b32") < release < ptx.index(ACQUIRE)
        # Every address that a store or a release needs is looked up before the first of them.
        assert "ld.global.b64" not in ptx[ptx.rindex("st.global.v4.b32", 0, release) : release]
    # One instruction tells all peers, a thread each; nothing is stored after the barrier.
    releases = [found.start() for found in re.finditer(re.escape(RELEASE), ptx)]
    assert len(releases) == (2 if name == "two shot" else 1)
    for each in releases:
        barrier = ptx.rindex("bar.sync", 0, each)
        assert not re.search(r"st\.global|\bbra\b", ptx[barrier:each])


@pytest.mark.parametrize(
    ("name", "elements"),
    # Of one, a constant for Triton, the kernel that does most.
    quick(
        [*((name, 4097) for name in KERNELS), ("two shot", 1)],
        ("two shot", 1),
    ),
)
def test_odd_sizes(sm90, name, elements):
    # An element at a time takes more addresses than vectors do: some spill, most in Triton 3.7.
    assert_fits(compile_launch(prepared(name, DEFAULT_PARAMS, elements)), stack_bytes=264)


@pytest.mark.parametrize(  # by turns: all kernels move blocks by the same functions
    ("name", "arch", "dtype", "num_ranks"),
    quick(
        [
            ("reduce-scatter", 100, torch.float32, 3),
            ("all-gather", 80, torch.float16, 8),
            ("one shot", 90, torch.float32, 3),
            ("two shot", 90, torch.float16, 8),
            ("add", 80, torch.bfloat16, 4),
        ],
    ),
)
def test_dtypes_numbers_of_ranks_and_generations(name, arch, dtype, num_ranks):
    with compile_only(arch):
        launch = prepared(name, DEFAULT_PARAMS, dtype=dtype, num_ranks=num_ranks)
        kernel = compile_launch(launch)
    assert_fits(kernel, stack_bytes=64)  # a few addresses, in Triton 3.6
    assert_only_vectors(kernel.ptx)
