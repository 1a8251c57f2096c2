"""Every kernel of AllGather-GEMM x tiles of every size in its space, for sm_90 without a GPU."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch
import triton
import triton.language as tl

import triton_dist
from tests.compile.scattered import (
    ACQUIRE,
    PROXY_FENCE,
    RELEASE,
    TMA_LOAD,
    TMA_STORE,
    compile_launch,
    hardest,
)
from triton_dist import language as dl
from triton_dist.errors import CandidateFailed
from triton_dist.kernels.common.gemm.launch import FUSED_TILES, SPLIT_K_TILES, sharded_gemm
from triton_dist.kernels.common.gemm.spaces import PERSISTENT_TILES, POINTER_TILES
from triton_dist.kernels.common.gemm.units import SplitWorkspace
from triton_dist.kernels.common.peers import GatheredShards, ShardPush
from triton_dist.kernels.common.slots.epochs import kernel_await_consumption, kernel_finish_epoch
from triton_dist.kernels.common.slots.gathered import kernel_release_copies
from triton_dist.testing.compile_only import HARDWARE, compile_kernel, compile_only

LAYOUTS = ("row-major", "column-major")
DEFAULTS = {True: PERSISTENT_TILES[0], False: POINTER_TILES[0]}


def prepared(
    persistent, config, layout="row-major", gathered=True, dtype=torch.bfloat16, rank=1,
    num_ranks=4, rows=1008, chunk_rows=1008, push=None, K=4096,
):  # fmt: skip
    """The launch for a shard of ``rows`` x K and a B of K x 1024; tensors without memory."""

    def matrix(m, n):
        return torch.empty(m, n, dtype=dtype, device="meta")

    ranks = num_ranks if gathered else 1
    flags = torch.empty(256, dtype=torch.int64, device="meta")
    own, C = matrix(rows, K), matrix(rows * ranks, 1024)
    B = matrix(1024, K).T if layout == "column-major" else matrix(K, 1024)
    shards = GatheredShards(matrix(rows * ranks, K), flags, flags[:32], chunk_rows, 8, push)
    partials = torch.empty(1 << 24, device="meta")
    split = SplitWorkspace(partials, torch.empty(256, dtype=torch.int32, device="meta"))
    return sharded_gemm(
        own, B, C, config, num_sms=132, persistent=persistent, rank=rank if gathered else 0,
        num_ranks=ranks, gathered=shards if gathered else None, split=split,
    )  # fmt: skip


@functools.cache
def compiled(persistent, index, layout, gathered=True, arch=90, dtype=torch.bfloat16):
    """Compiled once, whatever is asserted of it; ``index`` into the tiles of its space."""
    config = (PERSISTENT_TILES if persistent else POINTER_TILES)[index]
    with compile_only(arch):
        return compile_launch(prepared(persistent, config, layout, gathered, dtype))


def kernel_of(config):
    """What tells the kernels of configs apart: not GROUP_SIZE_M, a factor in places of tiles."""
    return str(config.all_kwargs() | {"GROUP_SIZE_M": "any"})


def first_of_each(kinds):
    """Index of the first of each of ``kinds``: what is alike is compiled once."""
    kinds = list(kinds)
    return sorted({kinds.index(kind) for kind in kinds})


def every_tile():
    """The largest ones with both layouts, the others with one by turns; of those for what
    descriptors cannot read, the two largest."""
    for persistent, tiles in ((True, PERSISTENT_TILES), (False, POINTER_TILES)):
        for number, index in enumerate(hardest(tiles)[: None if persistent else 2]):
            config = tiles[index]
            sizes = "x".join(str(config.kwargs[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
            kind = "persistent" if persistent else "pointers"
            for layout in LAYOUTS if sizes == "128x256x64" else [LAYOUTS[number % 2]]:
                name = f"{kind}-{sizes}-{config.num_warps}x{config.num_stages}-{index}-{layout}"
                yield pytest.param(persistent, index, layout, id=name)


@pytest.mark.parametrize(("persistent", "index", "layout"), list(every_tile()))
def test_a_tile_fits_pipelines_and_waits(persistent, index, layout):
    kernel = compiled(persistent, index, layout)
    assert kernel.name == f"kernel_gemm_{'' if persistent else 'non_'}persistent"
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert kernel.stack_bytes == 0
    assert "wgmma.mma_async" in kernel.ptx
    assert_waits(kernel.ptx)
    if persistent:
        # Own and gathered loop: each loads A and B, stages - 1 times ahead and once inside.
        assert len(TMA_LOAD.findall(kernel.ptx)) == 2 * 2 * kernel.num_stages
    else:
        assert "cp.async.cg" in kernel.ptx
        # Every stage is there: A and B tiles of bf16.
        tile = POINTER_TILES[index].kwargs
        elements = (tile["BLOCK_SIZE_M"] + tile["BLOCK_SIZE_N"]) * tile["BLOCK_SIZE_K"]
        assert kernel.shared_memory_bytes >= 2 * elements * (kernel.num_stages - 1)


@pytest.mark.parametrize("index", first_of_each(map(kernel_of, SPLIT_K_TILES)))
def test_a_tile_that_is_cut_fits_pipelines_and_waits(index):
    config = SPLIT_K_TILES[index]
    with compile_only(90):
        kernel = compile_launch(prepared(True, config, "column-major", rows=128, chunk_rows=128))
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert kernel.stack_bytes == 0
    # A block has the registers that it needs.
    assert kernel.registers * 32 * kernel.num_warps <= 65536
    assert "wgmma.mma_async" in kernel.ptx
    assert_waits(kernel.ptx)
    assert len(TMA_LOAD.findall(kernel.ptx)) == 2 * 2 * kernel.num_stages
    assert_parts_are_stored_before_they_are_counted(kernel, config.kwargs)


COUNT = re.compile(r"atom\.global\.gpu\.acq_rel\.add")


def assert_parts_are_stored_before_they_are_counted(kernel, tile):
    """In both loops: all 16-byte stores of the accumulator as it lies in registers, a barrier of
    the block, the count, a barrier, and loads of the other part that pass L1 by. No TMA in
    between."""
    stores = tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"] // (32 * kernel.num_warps * 4)
    pieces = COUNT.split(kernel.ptx)
    assert len(pieces) == 3
    for before, after in itertools.pairwise(pieces):
        written = before[before.index("st.global.v4", before.rindex("wgmma.wait_group")) :]
        assert written.count("st.global.v4") == stores
        assert "st.shared" not in written  # no conversion through shared memory
        assert "cp.async.bulk" not in written
        assert "bar.sync" in written[written.rindex("st.global.v4") :]
        read = after[: after.index("ld.global.cg.v4")]
        assert "bar.sync" in read
        assert after.count("ld.global.cg.v4") == stores
    assert "ld.global.v4" not in kernel.ptx


def pushing(persistent, number, layout="column-major", K=4096, num_ranks=4):
    """The launch of a fused candidate, for a shard of 128 rows."""
    config, num_comm_sms, num_chunks = FUSED_TILES[number]
    table = torch.empty(8, dtype=torch.int64, device="meta")
    push = ShardPush(table, table.clone(), words(), num_comm_sms, num_chunks)
    config = config if persistent else DEFAULTS[False]
    return prepared(
        persistent, config, layout, rows=128, chunk_rows=128, push=push, K=K, num_ranks=num_ranks
    )


# How many programs send is a constant in one comparison, and chunks are a loop unless there is one.
FUSED_KINDS = [(kernel_of(config), chunks > 1) for config, _, chunks in FUSED_TILES]


@pytest.mark.parametrize("number", first_of_each(FUSED_KINDS))
def test_a_fused_tile_fits_pipelines_pushes_and_waits(number):
    with compile_only(90):
        kernel = compile_launch(pushing(True, number, LAYOUTS[number % 2]))
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert kernel.stack_bytes == 0
    assert ".local" not in kernel.ptx
    assert kernel.registers * 32 * kernel.num_warps <= 65536
    assert "wgmma.mma_async" in kernel.ptx
    loads = [match.start() for match in TMA_LOAD.finditer(kernel.ptx)]
    assert len(loads) == 2 * 2 * kernel.num_stages
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


def test_rows_of_any_aligned_length_are_pushed_in_vectors(sm90):
    """4104 columns: rows begin at multiples of 16 bytes, and Triton does not know."""
    assert_pushes(compile_launch(pushing(True, 0, K=4104)))


def test_the_kernel_on_pointers_pushes_too(sm90):
    kernel = compile_launch(pushing(False, 0))
    assert kernel.name == "kernel_gemm_non_persistent"
    assert kernel.stack_bytes == 0
    assert "cp.async.cg" in kernel.ptx  # still pipelined
    (release,) = (match.start() for match in RELEASE.finditer(kernel.ptx))
    stores = [match.start() for match in re.finditer(r"st\.global\.b16", kernel.ptx)]
    assert any(store < release for store in stores)
    assert_waits(kernel.ptx)


def assert_waits(ptx):
    """An acquire at system scope, then the fence to the proxy that TMA reads through."""
    assert ACQUIRE in ptx
    assert ptx.rindex(PROXY_FENCE) > ptx.rindex(ACQUIRE)


@pytest.mark.parametrize(("persistent", "layout"), [(True, LAYOUTS[1]), (False, LAYOUTS[0])])
def test_a_plain_gemm_has_no_wait(persistent, layout):
    kernel = compiled(persistent, 0, layout, gathered=False)
    assert kernel.stack_bytes == 0
    assert ACQUIRE not in kernel.ptx
    assert PROXY_FENCE not in kernel.ptx
    if persistent:
        assert len(TMA_LOAD.findall(kernel.ptx)) == 2 * kernel.num_stages


@pytest.mark.parametrize(
    ("persistent", "index", "dtype"),
    # fp32 is multiplied without matrix units; of the pointer tiles, number 5 is the smallest.
    [(True, 0, torch.float16), (False, 0, torch.float16), (False, 5, torch.float32)],
)
def test_other_dtypes(persistent, index, dtype):
    kernel = compiled(persistent, index, "column-major", dtype=dtype)
    assert kernel.shared_memory_bytes <= HARDWARE[90].shared_memory_bytes
    assert kernel.stack_bytes == 0
    assert ("wgmma.mma_async" in kernel.ptx) is (dtype is torch.float16)
    assert_waits(kernel.ptx)


@pytest.mark.parametrize(("persistent", "arch"), [(True, 100), (True, 80)])
def test_the_default_tiles_on_other_generations(persistent, arch):
    kernel = compiled(persistent, 0, "column-major", arch=arch)
    assert f".target sm_{arch}" in kernel.ptx
    assert kernel.shared_memory_bytes <= HARDWARE[arch].shared_memory_bytes
    assert ACQUIRE in kernel.ptx
    assert (PROXY_FENCE in kernel.ptx) is (arch >= 90)
    assert ("cp.async.bulk.tensor" in kernel.ptx) is (persistent and arch >= 90)


def words(count=64):
    return torch.empty(count, dtype=torch.int64, device="meta")


def test_consumption_is_looked_at_with_acquire(sm90):
    kernel = compile_kernel(kernel_await_consumption, words(), words(), 9, 1, 4, num_warps=1)
    assert kernel.stack_bytes == 0
    assert ACQUIRE in kernel.ptx
    again = compile_kernel(kernel_await_consumption, words(), words(), 1, 0, 2, num_warps=1)
    assert again.kernel is kernel.kernel


def test_peers_are_told_with_release(sm90):
    table = torch.empty(4, dtype=torch.int64, device="meta")
    kernel = compile_kernel(kernel_finish_epoch, words(), words(), table, 1, 4, num_warps=1)
    assert kernel.stack_bytes == 0
    assert kernel.ptx.rindex("st.global") > RELEASE.search(kernel.ptx).start()
    assert ACQUIRE not in kernel.ptx
    again = compile_kernel(kernel_finish_epoch, words(), words(), table, 0, 2, num_warps=1)
    assert again.kernel is kernel.kernel


def test_copies_are_released_by_one_kernel_for_all_worlds(sm90):
    kernel = compile_kernel(kernel_release_copies, words(), words(), 32, num_warps=1)
    assert kernel.stack_bytes == 0
    again = compile_kernel(kernel_release_copies, words(), words(), 64, num_warps=1)
    assert again.kernel is kernel.kernel


@triton_dist.jit
def store_then_notify(source_ptr, out_ptr, flag_ptr, n, B: tl.constexpr):
    """Publishes tile after tile, so that a store of one iteration could slip past its release."""
    source = tl.make_tensor_descriptor(source_ptr, [n, B], [B, 1], [B, B])
    out = tl.make_tensor_descriptor(out_ptr, [n, B], [B, 1], [B, B])
    for tile in range(tl.program_id(0), tl.cdiv(n, B), tl.num_programs(0)):
        out.store([tile * B, 0], source.load([tile * B, 0]))
        dl.publish_tile()
        dl.notify(flag_ptr + tile, 1)


@pytest.mark.parametrize("arch", [90, 100])
def test_a_store_is_complete_before_its_release(arch):
    source = torch.empty(1024, 64, dtype=torch.float16, device="meta")
    with compile_only(arch):
        ptx = compile_kernel(store_then_notify, source, source.clone(), words(), 1024, B=64).ptx
    store = [match.end() for match in TMA_STORE.finditer(ptx)][-1]
    release = next(match.start() for match in RELEASE.finditer(ptx) if match.start() > store)
    between = ptx[store:release]
    # The full wait: the one that ends in .read only says that shared memory may be reused.
    assert re.search(r"cp\.async\.bulk\.wait_group\s+0", between)
    assert PROXY_FENCE in between
    assert "bar.sync" in between.split("wait_group")[-1]


def test_publishing_is_free_where_there_is_no_tma():
    source = torch.empty(1024, 64, dtype=torch.float16, device="meta")
    with compile_only(80):
        ptx = compile_kernel(store_then_notify, source, source.clone(), words(), 1024, B=64).ptx
    assert "cp.async.bulk" not in ptx
    assert "fence.proxy" not in ptx


def test_a_tile_that_does_not_fit_is_a_failed_candidate(sm90):
    too_large = triton.Config(
        DEFAULTS[True].kwargs | {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 128}, num_warps=4, num_stages=3
    )
    with pytest.raises(CandidateFailed, match="OutOfResources: out of resource: shared memory"):
        prepared(True, too_large).compile()
