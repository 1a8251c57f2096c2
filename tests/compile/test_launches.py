"""Launches of the kernels: tuples among the arguments, and one compiled kernel for all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl

from tests.compile import test_ag_group_gemm as grouped_gemms
from tests.compile import test_exchange_kernels as exchanges
from tests.compile import test_gemm_ar_kernels as all_reduces
from tests.compile import test_gemm_kernels as gemms
from tests.compile import test_gemm_rs_kernels as reduce_scatters
from tests.compile import test_packet_gemm as packet_gemms
from tests.compile import test_packet_kernels as packets
from tests.compile import test_warp_specialized_gemm as specialized
from tests.compile.scattered import compile_launch
from tests.compile.test_deferred_tiles import deferred
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.spaces import PERSISTENT_TILES, POINTER_TILES
from triton_dist.kernels.common.scatter.ways import outputs
from triton_dist.runtime.device.cuda_launch import can_repeat, parameters
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


SHAPE = exchanges.Shape(32, 8192)
IN_AND_OUT = {"x_ptr", "out_ptr"}
OPERANDS = {"a_ptr", "b_ptr"}
LAUNCHES = {
    **{
        name: (lambda name=name: exchanges.prepared(name, SHAPE), IN_AND_OUT)
        for name in ("two shot", "add", "copy")
    },
    "packets": (lambda: packets.prepared(packets.BLOCKS_OF_2048), IN_AND_OUT),
    "scatter": (lambda: reduce_scatters.prepared(True, PERSISTENT_TILES[0], bias=True), OPERANDS),
    "by pointers": (lambda: reduce_scatters.prepared(False, POINTER_TILES[0]), OPERANDS),
    "all-reduce": (lambda: all_reduces.prepared("two shot", True, PERSISTENT_TILES[0]), OPERANDS),
    "deferred": (lambda: deferred("all", PERSISTENT_TILES[0], 2), set()),
    "one launch": (
        lambda: all_reduces.prepared("one shot", True, all_reduces.TILES_TO_ALL[0]), OPERANDS,
    ),
    "packet gemm": (lambda: packet_gemms.prepared(True, packet_gemms.TILES[True][0]), OPERANDS),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_is_laid_out_and_what_varies_is_among_its_parameters(sm90, name):
    make, varying = LAUNCHES[name]
    launch = make()
    compiled = compile_launch(launch)
    arguments = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.options
    assert can_repeat(compiled.kernel, arguments)
    found = {each: value for each, _, value in parameters(compiled.kernel.src.signature, arguments)}
    if "out" in arguments:
        out = arguments["out"]
        moves = outputs(out.c, out.bias)
        assert all(found[each] is tensor for each, tensor in moves.items())
        assert ("out.bias" in found) == (out.bias is not None)
    assert varying <= set(found)


def sharded(config, persistent=True):
    """Chunks of any number of rows, and another number of ranks with another M."""
    for rank, rows in ((0, 1008), (1, 504), (3, 1), (2, 7)):
        yield gemms.prepared(persistent, config, rank=rank, chunk_rows=rows)
    yield gemms.prepared(persistent, config, rank=5, num_ranks=8)


def scattered(persistent, config):
    for rank, rows in enumerate((1008, 1007, 16, 1)):
        yield reduce_scatters.prepared(persistent, config, rank=rank, rows=rows)


def summed(kind, persistent):
    # Where rows have owners, all programs add, and how much at a time goes by the bucket.
    has_owners = kind in ("two shot, one launch", "reduce-scatter")
    config = all_reduces.KINDS[kind, persistent][0]
    for rank, rows in enumerate((1024, 1020, 900, 772) if has_owners else (1008, 1007, 1, 16)):
        yield all_reduces.prepared(kind, persistent, config, rank=rank, rows=rows)


def exchanged(name):
    for rank, elements in ((0, 4096), (1, 1 << 20), (3, 8192)):
        yield exchanges.prepared(name, exchanges.DEFAULT_SHAPE, elements, rank=rank)


def in_packets():
    for rank, elements in ((0, 4096), (1, 1 << 15), (3, 8192)):
        yield packets.prepared(packets.BLOCKS_OF_2048, elements, rank=rank)


def low():
    for rank, rows in enumerate((1, 2, 7, 16)):
        yield packet_gemms.prepared(True, packet_gemms.TILES[True][0], rank=rank, rows=rows)


def fused():
    for num_ranks in (2, 4, 8):
        yield gemms.pushing(True, 0, gemms.LAYOUTS[0], num_ranks=num_ranks)


def gathered():
    for rank in (0, 1, 3):
        yield grouped_gemms.prepared(grouped_gemms.GROUPED_TILES[16], rank=rank)


ALIKE = {
    "gemm": lambda: sharded(PERSISTENT_TILES[0]),
    "gemm by pointers": lambda: sharded(POINTER_TILES[0], False),
    "gemm, specialised warps": lambda: sharded(specialized.EVERY_TILE[0]),
    "fused gemm": fused,
    "grouped gemm": gathered,
    "scatter": lambda: scattered(True, PERSISTENT_TILES[0]),
    "scatter by pointers": lambda: scattered(False, POINTER_TILES[0]),
    "packets": in_packets,
    "packet gemm": low,
    **{kind: lambda kind=kind: summed(*kind) for kind in all_reduces.KINDS},
    **{name: lambda name=name: exchanged(name) for name in exchanges.ONE_LAUNCH},
}


@pytest.mark.parametrize("name", ALIKE, ids=str)
def test_one_compiled_kernel_serves_all_ranks_and_sizes(sm90, name):
    assert len({id(compile_launch(launch).kernel) for launch in ALIKE[name]()}) == 1
