"""The kernels of the plain collectives x the shapes of their spaces, for sm_90 without a GPU."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch

from tests.compile.scattered import compile_launch
from triton_dist.kernels.common.exchange import protocol, pushed, sums
from triton_dist.kernels.common.exchange.buffer import (
    DEFAULT_SHAPE,
    LARGE_SHAPES,
    SMALL_SHAPES,
    Shape,
    plan_of,
    shard_elements,
)
from triton_dist.kernels.common.exchange.protocol import Lengths, Peers, Slots
from triton_dist.kernels.common.launch import Launch
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
# The number of programs is not known to the compiler: one of each of the others.
# Pieces are the bound of a loop: one, and the most, of each size of a block.
SHAPES = {
    (shape.block_bytes, shape.num_pieces > 1): shape
    for shape in sorted(
        (*LARGE_SHAPES, *SMALL_SHAPES, DEFAULT_SHAPE), key=lambda each: each.num_pieces
    )
}.values()


def prepared(name, shape, elements=1 << 22, num_ranks=4, dtype=torch.bfloat16, rank=1):
    """A launch for shards of ``elements``; without memory."""

    def meta(count, of=dtype):
        return torch.empty(count, dtype=of, device="meta")

    total = elements * (1 if name == "one shot" else num_ranks)
    lengths = Lengths(elements, shard_elements(elements), total)
    pieces = 1 if name == "one shot" else shape.num_pieces
    plan = plan_of(num_ranks, shape, meta(1), pieces)
    options = {"plan": plan, "num_warps": shape.num_warps}
    table, words = meta(num_ranks, torch.int64), meta(256, torch.int64)
    if name in PUSHED:
        arguments = (meta(1), meta(1), pushed.Pushed(meta(1), words, words), lengths, 100, rank)
        return Launch(PUSHED[name], (64,), arguments, options)
    arguments = (
        meta(1), meta(1), Slots(meta(1), table, 1 << 26), Peers(words, table, words, words),
        lengths, 100, rank,
    )  # fmt: skip
    return Launch(ONE_LAUNCH[name], (shape.num_ctas,), arguments, options)


@functools.cache
def compiled(name, shape, arch=90, **options):
    with compile_only(arch):
        return compile_launch(prepared(name, shape, **options))


def only_vectors(ptx):
    """Whether data is read and written 16 bytes at a time alone."""
    narrow = re.findall(r"(?:ld|st)\.global(?:\.cg)?\.(?:b16|b32|v2\.b32)\b", ptx)
    # What is not data: entries of tables, and the two words of the guard.
    return [
        each for each in narrow if each.startswith("st") or "b16" in each or ".cg" in each
    ] == []


def every_shape():
    """The largest blocks of each kernel; the others, which need no more, of the one that has all
    the parts."""
    largest = max(shape.block_bytes for shape in SHAPES)
    for name, shape in itertools.product(ONE_LAUNCH, SHAPES):
        if name == "two shot" or shape.block_bytes == largest:
            yield pytest.param(name, shape, id=f"{name}-{shape}")


@pytest.mark.parametrize(("name", "shape"), list(every_shape()))
def test_an_exchange_moves_vectors_and_spills_nothing(name, shape):
    kernel = compiled(name, shape)
    # Rather than take a 65th register, the assembler puts three addresses of the all-gather aside.
    aside = 16 if name == "all-gather" and triton_version().minor in (7, 8) else 0
    assert kernel.stack_bytes <= aside
    assert kernel.registers * kernel.num_warps * 32 <= 65536
    assert "ld.global.v4.b32" in kernel.ptx
    assert "st.global.v4.b32" in kernel.ptx
    assert only_vectors(kernel.ptx)


def test_flags_come_after_stores_and_loads_after_flags():
    """In the order of the program: count the call, store to peers, a barrier of the threads,
    release; acquire, then load what came."""
    ptx = compiled("one shot", Shape(64, 8192)).ptx
    release, acquire = ptx.index(RELEASE), ptx.index(ACQUIRE)
    assert ptx.index(COUNT) < ptx.index("st.global.v4.b32") < release < acquire
    # Every address that a store or a release needs is looked up before the first of them.
    assert not re.search(
        r"ld\.global\.b64", ptx[ptx.rindex("st.global.v4.b32", 0, release) : release]
    )
    assert acquire < ptx.index("ld.global.cg.v4.b32")


@pytest.mark.parametrize("name", list(ONE_LAUNCH))
def test_threads_meet_before_one_tells_the_peers(name):
    """One instruction tells all of them, a thread each; nothing is stored after the barrier."""
    ptx = compiled(name, max(SHAPES, key=lambda each: each.num_pieces)).ptx
    releases = [found.start() for found in re.finditer(re.escape(RELEASE), ptx)]
    assert len(releases) == (2 if name == "two shot" else 1)
    for release in releases:
        barrier = ptx.rindex("bar.sync", 0, release)
        assert not re.search(r"st\.global|\bbra\b", ptx[barrier:release])


@pytest.mark.parametrize("name", list(PUSHED))
@pytest.mark.parametrize("shape", [Shape(16, 16384, 1), Shape(64, 16384, 4)], ids=str)
def test_what_copy_engines_push_is_read_in_vectors(name, shape):
    kernel = compiled(name, shape)
    assert kernel.stack_bytes == 0
    assert only_vectors(kernel.ptx)
    assert kernel.ptx.index("ld.global.sys.acquire") < kernel.ptx.index("ld.global.cg.v4.b32")
    assert RELEASE not in kernel.ptx


@pytest.mark.parametrize(
    ("name", "elements"),
    # Of one, a constant for Triton, the kernel that does most.
    [*((name, 4097) for name in (*ONE_LAUNCH, *PUSHED)), ("two shot", 1)],
)
def test_odd_sizes(name, elements):
    kernel = compiled(name, DEFAULT_SHAPE, elements=elements)
    # An element at a time takes more addresses than vectors do: some spill, most in Triton 3.7.
    assert kernel.stack_bytes <= 264


@pytest.mark.parametrize(  # by turns: all kernels move blocks by the same functions
    ("name", "dtype", "num_ranks"),
    [
        (name, *((torch.float16, 8) if place % 2 else (torch.float32, 3)))
        for place, name in enumerate(ONE_LAUNCH)
    ],
)
def test_dtypes_and_numbers_of_ranks(name, dtype, num_ranks):
    kernel = compiled(name, Shape(64, 8192), dtype=dtype, num_ranks=num_ranks)
    assert kernel.stack_bytes <= 64  # a few addresses, in Triton 3.6
    assert only_vectors(kernel.ptx)


@pytest.mark.parametrize(  # one of each family
    ("name", "arch"), [("two shot", 80), ("one shot", 100), ("add", 80)]
)
def test_other_generations(name, arch):
    assert f".target sm_{arch}" in compiled(name, DEFAULT_SHAPE, arch).ptx
