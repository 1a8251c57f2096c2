"""Every kernel of AllGather-GEMM x tiles of every size in its space, for sm_90 without a GPU."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import triton
import triton.language as tl

import triton_dist
from tests.compile.scattered import (
    ACQUIRE,
    FULL_WAIT,
    PROXY_FENCE,
    RELEASE,
    TMA_LOAD,
    TMA_STORE,
    WGMMA,
    assert_fits,
    compile_launch,
    hardest,
    matrix,
    quick,
    right,
    words,
)
from triton_dist import language as dl
from triton_dist.kernels.common.gemm.launch import (
    FUSED_PUSH_CANDIDATES,
    SPLIT_K_TILES,
    sharded_gemm,
)
from triton_dist.kernels.common.gemm.sharded import SplitWorkspace
from triton_dist.kernels.common.gemm.spaces import PERSISTENT_TILES, POINTER_TILES
from triton_dist.kernels.common.peers import GatheredShards, ShardPush
from triton_dist.kernels.common.slots.epochs import kernel_await_consumption, kernel_finish_epoch
from triton_dist.kernels.common.slots.gathered import kernel_release_copies
from triton_dist.testing.compile_only import compile_kernel, compile_only

LAYOUTS = ("row-major", "column-major")


def prepared(
    persistent, config, layout="row-major", gathered=True, dtype=torch.bfloat16, rank=1,
    num_ranks=4, rows=1008, chunk_rows=1008, push=None, K=4096,
):  # fmt: skip
    """The launch for a shard of ``rows`` x K and a B of K x 1024; tensors without memory."""
    ranks = num_ranks if gathered else 1
    flags = words()
    own, C = matrix(rows, K, dtype=dtype), matrix(rows * ranks, 1024, dtype=dtype)
    B = right(K, 1024, layout, dtype)
    everyone = matrix(rows * ranks, K, dtype=dtype)
    shards = GatheredShards(everyone, flags, flags[:32], chunk_rows, 8, push)
    partials = matrix(1 << 24, dtype=torch.float32)
    split = SplitWorkspace(partials, matrix(256, dtype=torch.int32))
    return sharded_gemm(
        own, B, C, config, num_sms=132, persistent=persistent, rank=rank if gathered else 0,
        num_ranks=ranks, gathered=shards if gathered else None, split_workspace=split,
    )  # fmt: skip


TILES = {True: PERSISTENT_TILES, False: POINTER_TILES}
# Of those for what descriptors cannot read, the two largest.
EVERY_TILE = [
    *itertools.product([True], hardest(PERSISTENT_TILES), LAYOUTS),
    *itertools.product([False], hardest(POINTER_TILES)[:2], LAYOUTS),
]
IN_CI = ((True, 0, "row-major"), (False, 0, "row-major"))


@pytest.mark.parametrize(("persistent", "index", "layout"), quick(EVERY_TILE, *IN_CI))
def test_a_tile_fits_pipelines_and_waits(sm90, persistent, index, layout):
    kernel = compile_launch(prepared(persistent, TILES[persistent][index], layout))
    assert kernel.name == f"kernel_gemm_{'' if persistent else 'non_'}persistent"
    # Own and gathered loop: each loads A and B, stages - 1 times ahead and once inside.
    assert_fits(kernel, tma_loads=2 * 2 * kernel.num_stages if persistent else 0, has=[WGMMA])
    assert_waits(kernel.ptx)
    if not persistent:
        assert "cp.async.cg" in kernel.ptx
        # Every stage is there: A and B tiles of bf16.
        tile = POINTER_TILES[index].kwargs
        elements = (tile["BLOCK_SIZE_M"] + tile["BLOCK_SIZE_N"]) * tile["BLOCK_SIZE_K"]
        assert kernel.shared_memory_bytes >= 2 * elements * (kernel.num_stages - 1)


@pytest.mark.parametrize("columns", quick([(128,), (256,)], (128,)))
def test_a_tile_that_is_cut_fits_pipelines_and_waits(sm90, columns):
    config = cut(SPLIT_K_TILES[0], columns)  # the other differs in the order of tiles
    kernel = compile_launch(prepared(True, config, "column-major", rows=128, chunk_rows=128))
    assert_fits(kernel, tma_loads=2 * 2 * kernel.num_stages, has=[WGMMA])
    assert_waits(kernel.ptx)
    assert_parts_are_stored_before_they_are_counted(kernel, config.kwargs)


def cut(config, columns):
    """A tile that is cut along K, with another number of columns: fewer compile sooner."""
    kwargs = config.kwargs | {"BLOCK_SIZE_N": columns}
    return triton.Config(kwargs, num_warps=config.num_warps, num_stages=config.num_stages)


COUNT = re.compile(r"atom\.global\.gpu\.acq_rel\.add")


def assert_parts_are_stored_before_they_are_counted(kernel, tile, width=4, parts_read=1):
    """In both loops, or in each group of warps: all stores of the accumulator as it lies in
    registers, ``width`` elements each, a barrier, the count, a barrier, and loads of
    ``parts_read`` parts that pass L1 by. No TMA in between."""
    stores = tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"] // (256 * width)
    store, load = f"st.global.v{width}", f"ld.global.cg.v{width}"
    chunks = COUNT.split(kernel.ptx)
    assert len(chunks) == 3
    for before, after in itertools.pairwise(chunks):
        written = before[before.index(store, before.rindex("wgmma.wait_group")) :]
        assert written.count(store) == stores
        assert width == 2 or "st.shared" not in written  # no conversion through shared memory
        assert "cp.async.bulk" not in written
        assert "bar.sync" in written[written.rindex(store) :]
        assert "bar.sync" in after[: after.index(load)]
        assert after.count(load) == parts_read * stores
    assert "ld.global.v4" not in kernel.ptx


def pushing(persistent, number, layout="column-major", K=4096, num_ranks=4):
    """The launch of a fused candidate, for a shard of 128 rows."""
    config, num_comm_sms, num_chunks = FUSED_PUSH_CANDIDATES[number]
    push = ShardPush(words(8), words(8), words(), num_comm_sms, num_chunks)
    config = config if persistent else POINTER_TILES[0]
    return prepared(
        persistent, config, layout, rows=128, chunk_rows=128, push=push, K=K, num_ranks=num_ranks
    )


@pytest.mark.parametrize(("number", "K"), quick([(0, 4096), (5, 4104)], (5, 4104)))
def test_a_fused_tile_fits_pipelines_pushes_and_waits(sm90, number, K):
    """Rows of 4104 columns begin at multiples of 16 bytes, and Triton does not know."""
    kernel = compile_launch(pushing(True, number, LAYOUTS[number % 2], K=K))
    loads = [match.start() for match in TMA_LOAD.finditer(kernel.ptx)]
    assert_fits(kernel, tma_loads=2 * 2 * kernel.num_stages, has=[WGMMA], lacks=[".local"])
    assert_pushes(kernel)
    # Inside the K loop over chunks: the flags of all programs at once, the fence, then the loads.
    acquire = [match.end() for match in ACQUIRE_AT_ONCE.finditer(kernel.ptx)][-1]
    fence = kernel.ptx.index(PROXY_FENCE, acquire)
    assert "bar.sync" in kernel.ptx[acquire:fence]
    assert len([load for load in loads if load > fence]) == 2 * kernel.num_stages
    assert not any(acquire < load < fence for load in loads)


ACQUIRE_AT_ONCE = re.compile(r"atom\.global\.sys\.acquire\.add")


def assert_pushes(kernel):
    """A piece of 16 KB in loads of 16 bytes a thread, all of them before the first store to a peer,
    and a barrier of the block between the last store and the release of the flags."""
    each = 16384 // (16 * 32 * kernel.num_warps)
    vector_load = r"ld\.global\.v4\.b32"
    loads = [match.start() for match in re.finditer(vector_load, kernel.ptx)]
    stores = [match.start() for match in re.finditer(r"st\.global\.v4\.b32", kernel.ptx)]
    assert len(loads) == len(stores) == each
    assert loads[-1] < stores[0]
    (release,) = (match.start() for match in RELEASE.finditer(kernel.ptx))
    assert "bar.sync" in kernel.ptx[stores[-1] : release]
    assert "st.global.b16" not in kernel.ptx


@pytest.mark.stress
def test_the_kernel_on_pointers_pushes_too(sm90):
    kernel = compile_launch(pushing(False, 0))
    assert kernel.name == "kernel_gemm_non_persistent"
    assert_fits(kernel, has=["cp.async.cg"])  # still pipelined
    (release,) = (match.start() for match in RELEASE.finditer(kernel.ptx))
    stores = [match.start() for match in re.finditer(r"st\.global\.b16", kernel.ptx)]
    assert any(store < release for store in stores)
    assert_waits(kernel.ptx)


def assert_waits(ptx):
    """An acquire at system scope, then the fence to the proxy that TMA reads through."""
    assert ACQUIRE in ptx
    assert ptx.rindex(PROXY_FENCE) > ptx.rindex(ACQUIRE)


@pytest.mark.parametrize(
    ("persistent", "index", "gathered", "arch", "dtype"),
    quick(
        OTHERS := [
            (True, 0, False, 90, torch.bfloat16),
            # fp32 is multiplied without matrix units. Pointer tile 5 is the smallest.
            (False, 5, True, 90, torch.float32),
            (True, 11, True, 80, torch.bfloat16),
            (True, 0, True, 100, torch.bfloat16),
            (False, 0, False, 90, torch.float16),
        ],
        OTHERS[0],
    ),
)
def test_a_plain_gemm_does_not_wait_and_other_dtypes_and_generations_do(
    persistent, index, gathered, arch, dtype
):
    with compile_only(arch):
        launch = prepared(persistent, TILES[persistent][index], LAYOUTS[1], gathered, dtype)
        kernel = compile_launch(launch)
    loads = (2 if gathered else 1) * 2 * kernel.num_stages if persistent and arch == 90 else None
    assert_fits(kernel, tma_loads=loads)
    if arch == 90:
        assert (WGMMA in kernel.ptx) is (dtype is not torch.float32)
    assert (ACQUIRE in kernel.ptx) is gathered
    assert (PROXY_FENCE in kernel.ptx) is (gathered and arch >= 90)
    assert ("cp.async.bulk.tensor" in kernel.ptx) is (persistent and arch >= 90)
    if gathered and arch == 90:
        assert_waits(kernel.ptx)


@pytest.mark.parametrize(
    ("of", "arguments", "others", "has", "lacks"),
    [
        (kernel_await_consumption, (words(), words(), 9, 1, 4), (1, 0, 2), [ACQUIRE], []),
        (kernel_finish_epoch, (words(), words(), words(), 1, 4), (0, 2), [RELEASE], [ACQUIRE]),
        (kernel_release_copies, (words(), words(), 32), (64,), [], []),
    ],
)
def test_what_begins_and_ends_a_call_is_one_kernel_for_all_worlds(
    sm90, of, arguments, others, has, lacks
):
    kernel = compile_kernel(of, *arguments, num_warps=1)
    assert_fits(kernel, has=has, lacks=lacks)
    again = (*arguments[: len(arguments) - len(others)], *others)
    assert compile_kernel(of, *again, num_warps=1).kernel is kernel.kernel
    if of is kernel_finish_epoch:
        assert kernel.ptx.rindex("st.global") > RELEASE.search(kernel.ptx).start()


@triton_dist.jit
def store_then_notify(source_ptr, out_ptr, flag_ptr, n, B: tl.constexpr):
    """Publishes tile after tile, so that a store of one iteration could slip past its release."""
    source = tl.make_tensor_descriptor(source_ptr, [n, B], [B, 1], [B, B])
    out = tl.make_tensor_descriptor(out_ptr, [n, B], [B, 1], [B, B])
    for tile in range(tl.program_id(0), tl.cdiv(n, B), tl.num_programs(0)):
        out.store([tile * B, 0], source.load([tile * B, 0]))
        dl.publish_tile()
        dl.notify(flag_ptr + tile, 1)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_store_is_complete_before_its_release_and_nothing_waits_without_tma(arch):
    source = matrix(1024, 64, dtype=torch.float16)
    with compile_only(arch):
        ptx = compile_kernel(store_then_notify, source, source.clone(), words(), 1024, B=64).ptx
    if arch == 80:
        assert "cp.async.bulk" not in ptx
        assert "fence.proxy" not in ptx
        return
    store = [match.end() for match in TMA_STORE.finditer(ptx)][-1]
    release = next(match.start() for match in RELEASE.finditer(ptx) if match.start() > store)
    between = ptx[store:release]
    # The full wait: the one that ends in .read only says that shared memory may be reused.
    assert FULL_WAIT.search(between)
    assert PROXY_FENCE in between
    assert "bar.sync" in between.split("wait_group")[-1]
