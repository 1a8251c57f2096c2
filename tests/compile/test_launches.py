"""Launches of the kernels: tuples among the arguments, and one compiled kernel for all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl

from tests.compile import test_exchange_kernels as exchanges
from tests.compile import test_gemm_ar_kernels as all_reduces
from tests.compile import test_gemm_kernels as gemms
from tests.compile import test_gemm_rs_kernels as reduce_scatters
from tests.compile import test_grouped_gemm as grouped_gemms
from tests.compile import test_packets as packets
from tests.compile import test_warp_specialized_gemm as specialized
from tests.compile.scattered import compile_launch
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.spaces import PERSISTENT_TILES, POINTER_TILES, tile_shapes
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES
from triton_dist.kernels.common.scatter.algorithms import output_tensors
from triton_dist.runtime.device.cuda_launch import can_repeat, parameters, scratch_bytes
from triton_dist.testing.compile_only import compile_kernel


class Slot(NamedTuple):
    data: Any
    table: Any
    elements: Any
    bias: Any


class Tile(NamedTuple):
    M: Any
    N: Any
    ROOT: Any


@jit(do_not_specialize=["rank"])
def kernel_scale(out_ptr, slot, n, rank, tile: tl.constexpr):
    index = tl.arange(0, tile.M)
    value = tl.load(slot.data + index) + tl.load(slot.table + rank) + slot.elements + n
    if slot.bias is not None:
        value += tl.load(slot.bias + index)
    if tile.ROOT == "square":
        value = tl.sqrt(value)
    tl.store(out_ptr + index, value)


def meta(of):
    return torch.empty(64, dtype=of, device="meta")


def test_members_follow_one_another_and_constants_are_none_of_them(sm90):
    """Constants are what the caller says is one, and 1 and None, which Triton makes one."""
    out, slot = meta(torch.float32), Slot(meta(torch.float32), meta(torch.int64), 48, None)
    tile = Tile(64, 1, "square")
    for given, members in (
        (slot, ("data", "table", "elements")),
        (slot._replace(elements=1, bias=out), ("data", "table", "bias")),
    ):
        compiled = compile_kernel(kernel_scale, out, given, 5, 1, grid=(1,), tile=tile)
        arguments = {"out_ptr": out, "slot": given, "n": 5, "rank": 1, "tile": tile}
        assert can_repeat(compiled.kernel, arguments)
        found = [*parameters(compiled.kernel.src.signature, arguments)]
        names = ["out_ptr", *(f"slot.{member}" for member in members), "n", "rank"]
        assert [name for name, _, _ in found] == names
        values = [getattr(given, member) for member in members]
        assert all(a is b for (_, _, a), b in zip(found, [out, *values, 5, 1], strict=True))
        # Two addresses of scratch memory come after them, as in every launch.
        assert compiled.ptx.count(".param ") == len(names) + 2


def test_a_tile_of_the_same_sizes_is_the_same_kernel_and_another_word_is_not(sm90):
    def compiled(tile):
        slot = Slot(meta(torch.float32), meta(torch.int64), 48, None)
        return compile_kernel(kernel_scale, slot.data, slot, 5, 1, grid=(1,), tile=tile)

    first, same, other = (compiled(Tile(64, 1, root)) for root in ("square", "square", "no"))
    assert first.kernel is same.kernel
    assert ("sqrt" in first.ptx, "sqrt" in other.ptx) == (True, False)


OPERANDS = {"a_ptr", "b_ptr", "x_ptr", "out_ptr"}
ROWS_OF_A_BUCKET = (4000, 3996, 3964, 3908)


def sharded(config, persistent=True):
    """Chunks of any number of rows, and another number of ranks with another M."""
    for rank, rows in ((1, 1008), (0, 504), (3, 1)):
        yield gemms.prepared(persistent, config, rank=rank, chunk_rows=rows)
    yield gemms.prepared(persistent, config, rank=5, num_ranks=8)


def scattered(persistent):
    config = (PERSISTENT_TILES if persistent else POINTER_TILES)[0]
    for rank, rows in enumerate((1008, 1007, 16, 1)):
        yield reduce_scatters.prepared(persistent, config, rank=rank, rows=rows)


def summed(kind, persistent, index):
    # Rows with owners are added by all programs; the bucket of M sets how many at a time.
    config = all_reduces.KINDS[kind, persistent][index]
    for rank, rows in enumerate((100, 1007, 1, 16) if kind == "one shot" else ROWS_OF_A_BUCKET):
        yield all_reduces.prepared(kind, persistent, config, rank=rank, rows=rows)


def exchanged(name, shape):
    for rank, elements in ((0, 4096), (1, 1 << 20), (3, 8192)):
        yield exchanges.prepared(name, shape, elements, rank=rank)


# Launches that one kernel serves: of tiles that tests of the kernel compile too.
LAUNCHES = {
    "gemm": lambda: sharded(PERSISTENT_TILES[0]),
    "gemm by pointers": lambda: sharded(POINTER_TILES[0], False),
    "gemm, specialised warps": lambda: sharded(specialized.EVERY_TILE[0]),
    "fused gemm": lambda: [gemms.pushing(True, 5, K=4104, num_ranks=ranks) for ranks in (2, 4, 8)],
    "grouped gemm": lambda: [
        grouped_gemms.prepared_gathered(GROUPED_TILES[18], rank=rank) for rank in (0, 1, 3)
    ],
    "scatter": lambda: scattered(True),
    "scatter by pointers": lambda: scattered(False),
    "deferred": lambda: [
        reduce_scatters.deferred("all", tile_shapes(PERSISTENT_TILES)[1], num_ranks=8)
    ],
    "packets": lambda: [
        packets.exchanged(packets.BLOCKS[0], elements, rank=rank)
        for rank, elements in ((0, 4096), (1, 1 << 15), (3, 8192))
    ],
    "packet gemm": lambda: [
        packets.prepared(True, packets.TILES[True][0], rank=rank, rows=rows)
        for rank, rows in enumerate((1, 2, 7, 16))
    ],
    **{str(each): lambda each=each: summed(*each) for each in all_reduces.IN_CI},
    **{
        name: lambda name=name, shape=shape: exchanged(name, shape)
        for name, shape in exchanges.IN_CI
    },
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_one_kernel_serves_all_ranks_and_sizes_and_its_launch_is_laid_out(sm90, name):
    launches = list(LAUNCHES[name]())
    (kernel,) = {compile_launch(launch).kernel for launch in launches}
    for launch in launches:
        arguments = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.options
        assert can_repeat(kernel, arguments)
        found = {each: value for each, _, value in parameters(kernel.src.signature, arguments)}
        varying = OPERANDS & set(launch.kernel.arg_names)
        assert bool(varying) is (name != "deferred")
        assert varying <= set(found)
        if "out" in arguments:
            out = arguments["out"]
            moves = output_tensors(out.c, out.bias)
            assert all(found[each] is tensor for each, tensor in moves.items())
            assert ("out.bias" in found) == (out.bias is not None)


def test_a_kernel_with_specialised_warps_is_laid_out_with_all_groups(sm90):
    """The launch has the threads of all groups, and scratch for five descriptors: own and gathered
    A, B, and C of each group."""
    launch = specialized.prepared(True, specialized.EVERY_TILE[0])
    kernel = compile_launch(launch).kernel
    assert kernel.metadata.num_warps == 12
    assert scratch_bytes(kernel, launch.grid) == 5 * 128 * launch.grid[0]
