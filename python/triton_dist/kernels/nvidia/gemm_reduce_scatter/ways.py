"""Config space of GEMM-ReduceScatter: tile shapes x transfer methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from triton_dist.kernels.common import vendor_reduce_scatter as vendor
from triton_dist.kernels.common.exchange.shapes import Shape, is_worth_trying, shape_of
from triton_dist.kernels.common.gemm.rows import row_bucket
from triton_dist.kernels.common.gemm.spaces import (
    get_config_space,
    suits_rows,
    tile_shapes,
    tiles_to_owners,
)
from triton_dist.kernels.common.scatter.launch import chunks_of_slab
from triton_dist.kernels.common.vendor import VendorMethod
from triton_dist.kernels.nvidia.gemm import prune_fn as suits_gemm
from triton_dist.kernels.nvidia.gemm_reduce_scatter.context import EXCHANGED_BYTES
from triton_dist.runtime.device import current_device

# How many of the tile shapes are tried with pushes, and how many of these in any number of chunks.
_PUSHED_TILES, _LARGEST_TILES = 7, 3
_CHUNKS, _FEW_CHUNKS = (1, 2, 4, 8), (1, 2)
# Of a reduce-scatter behind a product.
_SERIAL_SHAPES = (
    *(Shape(ctas, 8192) for ctas in (32, 64, 128)),
    *(Shape(ctas, 16384) for ctas in (64, 128)),
    Shape(64, 16384, 4),
)


def config_space() -> list[dict[str, Any]]:
    """Tiles and transfer together; the first is the default.

    Every tile shape with tiles sent one by one; tiles of one launch that adds, too; then slabs that
    a copy engine pushes, the largest tiles in any number of chunks, those for few rows in few; then
    products by torch, scattered by us, and what torch brings. Interpreted, one serial way.
    """
    descriptors = current_device().prefers_descriptors
    kinds = (descriptors, not descriptors)
    fused = [
        config(gemm_config=each, persistent=persistent)
        for persistent in kinds
        for each in get_config_space(persistent)
    ]
    exchanged = [
        config(gemm_config=each, persistent=persistent, exchange=True)
        for persistent in kinds
        for each in tiles_to_owners(persistent)
    ]
    pushed = [
        config(gemm_config=each, persistent=descriptors, fuse_scatter=False, num_chunks=num_chunks)
        for number, each in enumerate(tile_shapes(get_config_space(descriptors))[:_PUSHED_TILES])
        for num_chunks in (_CHUNKS if number < _LARGEST_TILES else _FEW_CHUNKS)
    ]
    shapes = _SERIAL_SHAPES[:1] if current_device().name == "cpu" else _SERIAL_SHAPES
    serial = [
        config(exchange=None, num_chunks=shape.num_pieces)
        | {"serial": True, "num_ctas": shape.num_ctas, "block_bytes": shape.block_bytes}
        for shape in shapes
    ]
    torchs = [
        config(fuse_scatter=None, exchange=None, num_chunks=None, method=method)
        for method in vendor.candidates_here()
    ]
    return fused + exchanged + pushed + serial + torchs


def config(
    *,
    gemm_config: triton.Config | None = None,
    persistent: bool | None = None,
    fuse_scatter: bool | None = True,
    exchange: bool | None = False,
    num_chunks: int | None = 1,
    method: VendorMethod | None = None,
) -> dict[str, Any]:
    """All tunables but those of ``serial`` alone, without which results of the others are found as
    before; a way has ``None`` for what it does not know."""
    return {
        "gemm_config": gemm_config,
        "persistent": persistent,
        "fuse_scatter": fuse_scatter,
        "exchange": exchange,
        "num_chunks": num_chunks,
        "method": method,
    }


def prune_fn(
    config: Mapping[str, Any],
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: Any,
    *args: Any,
    reduce_st: bool | None = None,
    **kwargs: Any,
) -> bool:
    """What is dropped goes by the most rows of the key, since a winner serves all of them."""
    is_vendor = config.get("method") is not None
    adds = ctx.reduce_st if reduce_st is None else reduce_st
    is_serial, is_exchange = config.get("serial"), config.get("exchange")
    is_plain = not is_vendor and config.get("fuse_scatter", True)
    is_plain = is_plain and not is_exchange and not is_serial
    # One rank scatters nothing, and a choice for the sum is one against the others.
    if not is_plain and (ctx.num_ranks == 1 or adds):
        return False
    if is_vendor:
        return True
    rows = row_bucket(A.shape[0] // ctx.num_ranks)
    if is_exchange or is_serial:
        M = rows * ctx.num_ranks
        nbytes = M * B.shape[1] * B.element_size()
        # Not by the rows of this context: others have the same key.
        if nbytes > EXCHANGED_BYTES:
            return False
        if is_serial:
            shape = shape_of(config["num_ctas"], config["block_bytes"], config["num_chunks"])
            return is_worth_trying(shape, nbytes // ctx.num_ranks)
        if not suits_rows(config["gemm_config"], M):
            return False
    num_chunks = config.get("num_chunks") or 1
    if num_chunks > 1:
        chunks = chunks_of_slab(config["gemm_config"], rows, B.shape[1], num_chunks)
        if len(chunks.rows) < num_chunks:  # the same as with fewer
            return False
    # A has all rows here: not to be multiplied by the context's ranks.
    return suits_gemm(config, A, B)
