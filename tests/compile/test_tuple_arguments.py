"""A kernel with tuples among its arguments: what it is handed by a launch that is laid out."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl

from tests.compile import test_exchange_kernels as exchanges
from tests.compile import test_gemm_ar_kernels as all_reduces
from tests.compile import test_gemm_rs_kernels as reduce_scatters
from tests.compile import test_packet_gemm as packet_gemms
from tests.compile import test_packet_kernels as packets
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
    compiled = exchanges.compile_launch(launch)
    arguments = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.options
    assert can_repeat(compiled.kernel, arguments)
    found = {each: value for each, _, value in parameters(compiled.kernel.src.signature, arguments)}
    if "out" in arguments:
        out = arguments["out"]
        moves = outputs(out.c, out.bias)
        assert all(found[each] is tensor for each, tensor in moves.items())
        assert ("out.bias" in found) == (out.bias is not None)
    assert varying <= set(found)
