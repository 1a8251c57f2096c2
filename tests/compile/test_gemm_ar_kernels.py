"""Every kernel of GEMM-AllReduce x tiles of every size in its space, for sm_90 without a GPU.

And of GEMM-ReduceScatter in one launch, whose kernel is that of the one-shot all-reduce.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch

from tests.compile.scattered import (
    ACQUIRE,
    FULL_WAIT,
    RELEASE,
    TMA_LOAD,
    TMA_STORE,
    assert_announced_later,
    compile_launch,
    hardest,
)
from triton_dist.kernels.common.exchange.protocol import Peers, Slots
from triton_dist.kernels.common.gemm.spaces import (
    PERSISTENT_TILES,
    POINTER_TILES,
    POINTER_TILES_TO_ALL,
    TILES_TO_ALL,
    tile_shapes,
)
from triton_dist.kernels.common.scatter.kernel import scattered_gemm
from triton_dist.kernels.common.scatter.one_launch import exchanged_gemm
from triton_dist.kernels.common.scatter.partials import Scattering, Slot
from triton_dist.kernels.common.scatter.to_all import TwoShots, copy_sums
from triton_dist.runtime.triton_compat import triton_version
from triton_dist.testing.compile_only import HARDWARE, compile_only

IN_ONE_LAUNCH = ("one shot", "two shot, one launch", "reduce-scatter")
ANY_ACQUIRE = re.compile(r"sys\.acquire")
PEER_STORE = re.compile(r"st\.global\S*")
KINDS = {
    ("one shot", True): TILES_TO_ALL,
    ("one shot", False): POINTER_TILES_TO_ALL[::2],  # for what descriptors cannot read
    # The tiles for few rows are those of one shot. This is the largest.
    ("two shot, one launch", True): tuple(tile_shapes(PERSISTENT_TILES))[:1],
    ("two shot, one launch", False): tuple(tile_shapes(POINTER_TILES))[:1],
    ("reduce-scatter", True): tuple(tile_shapes(PERSISTENT_TILES))[:1],
    # The kernels of GEMM-ReduceScatter, of which its tests have every tile.
    ("two shot", True): tuple(tile_shapes(PERSISTENT_TILES))[:1],
    ("two shot", False): tuple(tile_shapes(POINTER_TILES))[:1],
}


def matrix(*shape, of=torch.bfloat16):
    return torch.empty(*shape, dtype=of, device="meta")


def scattering(rank=1, num_ranks=4, dtype=torch.bfloat16):
    flags, table = matrix(4096, of=torch.int64), matrix(num_ranks, of=torch.int64)
    left = matrix(4096, of=torch.int32)
    slot = Slot(matrix(1, of=dtype), 1 << 21, table, table, flags, flags, left)
    return Scattering("all", rank, num_ranks, slot, table, table)


def prepared(
    kind, persistent, config, layout="column-major", dtype=torch.bfloat16, rank=1, num_ranks=4,
    rows=None, bias=True, num_chunks=2,
):  # fmt: skip
    """The launch for an A of ``rows`` x 4096 and a B of 4096 x 8192; no memory."""
    rows = rows or (100 if kind == "one shot" else 4000)
    own_rows = rows // num_ranks if kind == "reduce-scatter" else rows
    A, C = matrix(rows, 4096, of=dtype), matrix(own_rows, 8192, of=dtype)
    B = matrix(4096, 8192, of=dtype)
    if layout == "column-major":
        B = matrix(8192, 4096, of=dtype).T
    vector = matrix(8192, of=dtype) if bias else None
    if kind in IN_ONE_LAUNCH:
        flags, table = matrix(4096, of=torch.int64), matrix(num_ranks, of=torch.int64)
        words = matrix(32, of=torch.int64)
        slots = (
            Slots(matrix(1 << 23, of=dtype), table, 1 << 22), Peers(flags, table, flags, words)
        )  # fmt: skip
        return exchanged_gemm(
            A, B, C, vector, config, slots, 1 << 20,
            rank=rank, num_ranks=num_ranks, num_sms=132, persistent=persistent,
            to_owners=kind != "one shot", pass_on=kind == "two shot, one launch",
        )  # fmt: skip
    return scattered_gemm(
        A,
        B,
        C,
        vector,
        config,
        scattering(rank, num_ranks, dtype),
        kernel=TwoShots.kernel,
        num_sms=132,
        persistent=persistent,
        num_chunks=num_chunks,
    )


@functools.cache
def compiled(kind, persistent, index, arch=90, **options):
    with compile_only(arch):
        return compile_launch(prepared(kind, persistent, KINDS[kind, persistent][index], **options))


def every_tile():
    for (kind, persistent), tiles in KINDS.items():
        for index in hardest(tiles):
            config = tiles[index]
            sizes = "x".join(str(config.kwargs[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
            way = "descriptors" if persistent else "pointers"
            name = f"{kind}-{way}-{sizes}-{config.num_warps}x{config.num_stages}-{index}"
            yield pytest.param(kind, persistent, index, id=name)


@pytest.mark.parametrize(("kind", "persistent", "index"), list(every_tile()))
def test_a_tile_fits_pipelines_and_waits(kind, persistent, index):
    config = KINDS[kind, persistent][index]
    kernel = compiled(kind, persistent, index)
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    # The number of the call is found before the K loop and needed behind it: where a tile needs few
    # registers, the assembler puts it aside rather than to have fewer programs on a processor.
    # From Triton 3.7 on an address too.
    aside = 24 if triton_version().minor >= 7 else 16
    assert kernel.stack_bytes <= (aside if kind in IN_ONE_LAUNCH else 0)
    # 16 rows are too few for the matrix units of a group of warps.
    is_low = config.kwargs["BLOCK_SIZE_M"] == 16
    assert ("mma.sync" if is_low else "wgmma.mma_async") in kernel.ptx
    assert ANY_ACQUIRE.search(kernel.ptx)
    assert RELEASE.search(kernel.ptx)
    if persistent:
        # One K loop: A and B, stages - 1 times ahead and once inside.
        assert len(TMA_LOAD.findall(kernel.ptx)) == 2 * kernel.num_stages
    else:
        assert "cp.async.cg" in kernel.ptx
    if kind in IN_ONE_LAUNCH or not persistent:
        assert not TMA_STORE.search(kernel.ptx)
        assert not re.search(r"st\.global\.b16", kernel.ptx)
        assert_ordered_stores_are_released(kernel.ptx)
    else:
        # Announced are, in the loop and behind it, a tile for others, then a sum; then the last.
        assert len(RELEASE.findall(kernel.ptx)) == 5
        assert_announced_later(kernel.ptx[: last_tile(kernel.ptx)], every=2)
        assert_sums_are_released(kernel.ptx)


def last_tile(ptx):
    """Where the last release of a tile ends: behind it are those of sums alone."""
    return [*RELEASE.finditer(ptx)][2].end()


def assert_ordered_stores_are_released(ptx):
    """A barrier comes between the stores and each release, which is another thread's."""
    for release in RELEASE.finditer(ptx):
        stores = [*PEER_STORE.finditer(ptx, 0, release.start())]
        assert "bar.sync" in ptx[stores[-1].end() : release.start()]


def assert_sums_are_released(ptx):
    """Behind a barrier, and the tile is awaited before it is added: acquire, loads, stores."""
    final = [*RELEASE.finditer(ptx)][-1].start()
    store = [*PEER_STORE.finditer(ptx, 0, final)][-1].end()
    assert "bar.sync" in ptx[store:final]
    load = [*re.finditer(r"ld\.global\.cg", ptx[:store])][-1].start()
    acquire = ptx.rindex(ACQUIRE, 0, load)
    assert last_tile(ptx) < acquire < load < store


def test_an_own_tile_is_complete_before_it_is_added():
    """The full wait for its store, and a barrier, come before the wait for the peers."""
    ptx = compiled("two shot", True, 0).ptx
    store = [*TMA_STORE.finditer(ptx)][-1].end()
    between = ptx[store : ptx.index(ACQUIRE, store)]
    assert "bar.sync" in between[FULL_WAIT.search(between).end() :]


# 4 in all the others.
@pytest.mark.parametrize(("kind", "num_ranks"), [("one shot", 8), ("two shot", 8), ("one shot", 2)])
def test_any_number_of_ranks(sm90, kind, num_ranks):
    """Parts are read together, in 16 bytes a thread, and sums are sent in 16 bytes a thread."""
    kernel = compile_launch(prepared(kind, True, KINDS[kind, True][-1], num_ranks=num_ranks))
    assert kernel.stack_bytes == 0
    assert set(re.findall(r"ld\.global\.cg\S*", kernel.ptx)) == {"ld.global.cg.v4.b32"}
    stores = re.findall(r"st\.global\S*b32", kernel.ptx)
    words = ["st.global.b32"] if kind == "two shot" else []  # of a program that leaves its tiles
    assert sorted({*stores}) == sorted({*words, "st.global.v4.b32"})
    assert stores.count("st.global.b32") == len(words)
    assert len(stores) >= num_ranks


@pytest.mark.parametrize("copy", [True, False])
def test_sums_are_copied_in_whole_vectors_once_they_are_there(sm90, copy):
    C, words = matrix(4000, 8192), matrix(4096, of=torch.int64)
    launch = copy_sums(
        C, C, words, PERSISTENT_TILES[0], scattering(), num_chunks=2, copy=copy
    )  # fmt: skip
    kernel = compile_launch(launch)
    assert kernel.stack_bytes == 0
    acquire = kernel.ptx.index(ACQUIRE)
    loads = [*re.finditer(r"ld\.global\.cg\S*", kernel.ptx)]
    assert bool(loads) is copy
    assert all(each.group() == "ld.global.cg.v4.b32" for each in loads)
    assert all(each.start() > acquire for each in loads)
    assert bool(re.search(r"st\.global\.v4\.b32", kernel.ptx)) is copy


@pytest.mark.parametrize(("kind", "persistent"), [("one shot", True), ("two shot", False)])
def test_fp16_row_major_without_a_bias(kind, persistent):
    kernel = compiled(
        kind, persistent, -1, layout="row-major", dtype=torch.float16, bias=False, num_chunks=1
    )
    assert kernel.stack_bytes == 0
