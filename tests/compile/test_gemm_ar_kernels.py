"""Every kernel of GEMM-AllReduce x tiles of every size in its space, for sm_90 without a GPU.

And of GEMM-ReduceScatter in one launch, whose kernel is that of the one-shot all-reduce.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.compile.scattered import (
    ACQUIRE,
    FULL_WAIT,
    RELEASE,
    TMA_STORE,
    WGMMA,
    assert_announced_later,
    assert_fits,
    compile_launch,
    hardest,
    matrix,
    quick,
    right,
    words,
)
from triton_dist.kernels.common.exchange.protocol import Peers, Slots
from triton_dist.kernels.common.gemm.spaces import (
    PERSISTENT_TILES,
    POINTER_TILES,
    POINTER_TILES_TO_ALL,
    TILES_TO_ALL,
)
from triton_dist.kernels.common.scatter.kernel import scattered_gemm
from triton_dist.kernels.common.scatter.one_launch import exchanged_gemm
from triton_dist.kernels.common.scatter.partials import ScatterSlot, TileMemory
from triton_dist.kernels.common.scatter.to_all import TwoShotLaunches, copy_sums
from triton_dist.runtime.triton_compat import triton_version

IN_ONE_LAUNCH = ("one shot", "two shot, one launch", "reduce-scatter")
ANY_ACQUIRE = re.compile(r"sys\.acquire")
PEER_STORE = re.compile(r"st\.global\S*")
LARGEST, LARGEST_BY_POINTERS = PERSISTENT_TILES[0], POINTER_TILES[0]
SMALLEST, SMALLEST_BY_POINTERS = PERSISTENT_TILES[11], POINTER_TILES[5]
KINDS = {
    ("one shot", True): TILES_TO_ALL,
    ("one shot", False): POINTER_TILES_TO_ALL[::2],  # for what descriptors cannot read
    # The tiles for few rows are those of one shot.
    ("two shot, one launch", True): (SMALLEST, LARGEST),
    ("two shot, one launch", False): (SMALLEST_BY_POINTERS, LARGEST_BY_POINTERS),
    ("reduce-scatter", True): (SMALLEST, LARGEST),
    # The kernels of GEMM-ReduceScatter, of which its tests have every tile.
    ("two shot", True): (SMALLEST, LARGEST),
    ("two shot", False): (SMALLEST_BY_POINTERS, LARGEST_BY_POINTERS),
}


def tile_memory(rank=1, num_ranks=4, dtype=torch.bfloat16):
    flags, table, left = words(), words(num_ranks), matrix(4096, dtype=torch.int32)
    slot = ScatterSlot(matrix(1, dtype=dtype), 1 << 21, table, table, flags, flags, left)
    return TileMemory("all", rank, num_ranks, slot, table, table)


def ranks_of(kind, persistent):
    """The most ranks where they are a burden, and the usual number."""
    return 8 if persistent and kind in ("one shot", "two shot") else 4


def prepared(
    kind, persistent, config, layout="column-major", dtype=torch.bfloat16, rank=1, num_ranks=None,
    rows=None, bias=True, num_chunks=2,
):  # fmt: skip
    """The launch for an A of ``rows`` x 4096 and a B of 4096 x 8192; no memory."""
    num_ranks = num_ranks or ranks_of(kind, persistent)
    rows = rows or (100 if kind == "one shot" else 4000)
    own_rows = rows // num_ranks if kind == "reduce-scatter" else rows
    A, C = matrix(rows, 4096, dtype=dtype), matrix(own_rows, 8192, dtype=dtype)
    B = right(4096, 8192, layout, dtype)
    vector = matrix(8192, dtype=dtype) if bias else None
    common = {"num_sms": 132, "persistent": persistent}
    if kind in IN_ONE_LAUNCH:
        flags, table = words(), words(num_ranks)
        slots = Slots(matrix(1 << 23, dtype=dtype), table, 1 << 22)
        return exchanged_gemm(
            A, B, C, vector, config, (slots, Peers(flags, table, flags, words(32))), 1 << 20,
            rank=rank, num_ranks=num_ranks, to_owners=kind != "one shot",
            broadcasts_sums=kind == "two shot, one launch", **common,
        )  # fmt: skip
    to = tile_memory(rank, num_ranks, dtype)
    options = common | {"kernel": TwoShotLaunches.kernel, "num_chunks": num_chunks}
    return scattered_gemm(A, B, C, vector, config, to, **options)


EVERY_TILE = [(*kind, index) for kind, tiles in KINDS.items() for index in hardest(tiles)]
IN_CI = [
    ("one shot", True, 11), ("two shot, one launch", True, 0),
    ("two shot", True, 0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "persistent", "index"), quick(EVERY_TILE, *IN_CI))
def test_a_tile_fits_pipelines_and_waits(sm90, kind, persistent, index):
    config = KINDS[kind, persistent][index]
    kernel = compile_launch(prepared(kind, persistent, config))
    # The number of the call is found before the K loop and needed behind it: where a tile needs few
    # registers, the assembler puts it aside rather than to have fewer programs on a processor.
    # From Triton 3.7 on an address too.
    aside = 24 if triton_version().minor >= 7 else 16
    # 16 rows are too few for the matrix units of a group of warps.
    is_low = config.kwargs["BLOCK_SIZE_M"] == 16
    assert_fits(
        kernel,
        stack_bytes=aside if kind in IN_ONE_LAUNCH else 0,
        # One K loop: A and B, stages - 1 times ahead and once inside.
        tma_loads=2 * kernel.num_stages if persistent else 0,
        has=["mma.sync" if is_low else WGMMA, ANY_ACQUIRE, RELEASE],
    )
    assert persistent or "cp.async.cg" in kernel.ptx
    if ranks_of(kind, persistent) == 8 and not is_low:
        assert_whole_vectors(kernel, kind, num_ranks=8)
    if kind in IN_ONE_LAUNCH or not persistent:
        assert not TMA_STORE.search(kernel.ptx)
        assert not re.search(r"st\.global\.b16", kernel.ptx)
        assert_ordered_stores_are_released(kernel.ptx)
    else:
        # Announced are, in the loop and behind it, a tile for others, then a sum; then the last.
        assert len(RELEASE.findall(kernel.ptx)) == 5
        assert_announced_later(kernel.ptx[: last_tile(kernel.ptx)], every=2)
        assert_sums_are_released(kernel.ptx)
        assert_own_tile_is_complete_before_it_is_added(kernel.ptx)


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


def assert_own_tile_is_complete_before_it_is_added(ptx):
    """The full wait for its store, and a barrier, come before the wait for the peers."""
    store = [*TMA_STORE.finditer(ptx)][-1].end()
    between = ptx[store : ptx.index(ACQUIRE, store)]
    assert "bar.sync" in between[FULL_WAIT.search(between).end() :]


def assert_whole_vectors(kernel, kind, num_ranks):
    """Parts are read together, in 16 bytes a thread, and sums are sent in 16 bytes a thread."""
    assert set(re.findall(r"ld\.global\.cg\S*", kernel.ptx)) == {"ld.global.cg.v4.b32"}
    stores = re.findall(r"st\.global\S*b32", kernel.ptx)
    words = ["st.global.b32"] if kind == "two shot" else []  # of a program that leaves its tiles
    assert sorted({*stores}) == sorted({*words, "st.global.v4.b32"})
    assert stores.count("st.global.b32") == len(words)
    assert len(stores) >= num_ranks


@pytest.mark.parametrize("copy", [True, False])
def test_sums_are_copied_in_whole_vectors_once_they_are_there(sm90, copy):
    C, to = matrix(4000, 8192), tile_memory()
    kernel = compile_launch(
        copy_sums(C, C, words(), PERSISTENT_TILES[0], to, num_chunks=2, copy=copy)
    )
    assert_fits(kernel)
    acquire = kernel.ptx.index(ACQUIRE)
    loads = [*re.finditer(r"ld\.global\.cg\S*", kernel.ptx)]
    assert bool(loads) is copy
    assert all(each.group() == "ld.global.cg.v4.b32" for each in loads)
    assert all(each.start() > acquire for each in loads)
    assert bool(re.search(r"st\.global\.v4\.b32", kernel.ptx)) is copy


@pytest.mark.parametrize(
    ("kind", "persistent", "num_ranks"),
    quick([("one shot", True, 2), ("two shot", False, 4)]),
)
def test_fp16_row_major_without_a_bias(sm90, kind, persistent, num_ranks):
    config = TILES_TO_ALL[-1] if persistent else SMALLEST_BY_POINTERS
    given = {"dtype": torch.float16, "bias": False, "num_chunks": 1, "num_ranks": num_ranks}
    assert_fits(compile_launch(prepared(kind, persistent, config, "row-major", **given)))
