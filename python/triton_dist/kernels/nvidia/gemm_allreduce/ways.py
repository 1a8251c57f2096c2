"""What GEMM-AllReduce tries: tiles, and how products are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from triton_dist.kernels.common.exchange.shapes import (
    SMALL_SHAPES,
    Shape,
    is_worth_trying,
    shape_of,
)
from triton_dist.kernels.common.gemm.rows import row_bucket
from triton_dist.kernels.common.gemm.spaces import (
    LOW,
    get_config_space,
    suits_rows,
    tile_shapes,
    tiles_to_all,
)
from triton_dist.kernels.common.scatter.launch import chunks_of_slab, slab_rows
from triton_dist.kernels.common.scatter.packets import bytes_of_row
from triton_dist.kernels.nvidia.allreduce import (
    ONE_SHOT_BYTES,
    PACKET_BYTES,
    AllReduceMethod,
)
from triton_dist.kernels.nvidia.gemm import prune_fn as suits_gemm
from triton_dist.kernels.nvidia.gemm_allreduce.context import SUMMED_BYTES, GEMMAllReduceMethod
from triton_dist.runtime.device import current_device

_CHUNKS, _CHUNKED_TILES = (2, 4), 7
_SERIAL: dict[AllReduceMethod, Sequence[Shape]] = {
    AllReduceMethod.ONE_SHOT: (Shape(16, 2048), Shape(64, 2048), Shape(64, 8192)),
    AllReduceMethod.TWO_SHOT: (
        SMALL_SHAPES[0],
        Shape(32, 8192),
        Shape(128, 8192),
        Shape(64, 16384, 4),
        Shape(128, 16384),
    ),
}


def config_space() -> list[dict[str, Any]]:
    """The default, whose way goes by size; then tiles that go to all, tiles that go to their
    owners, whole products, and what torch brings. Interpreted, of each a few."""
    device = current_device()
    descriptors, interpreted = device.prefers_descriptors, device.name == "cpu"
    first = get_config_space(descriptors)[0]
    one_shot, two_shot = GEMMAllReduceMethod.ONE_SHOT, GEMMAllReduceMethod.TWO_SHOT
    space = [config(gemm_config=first, persistent=descriptors, method=None)]
    for persistent in (descriptors, not descriptors):
        tiles = get_config_space(persistent)
        space += [
            config(gemm_config=each, persistent=persistent, method=one_shot)
            for each in tiles_to_all(persistent)
        ]
        space += [
            config(gemm_config=each, persistent=persistent, method=one_shot, packets=True)
            for each in tiles_to_all(persistent)
            if each.kwargs["BLOCK_SIZE_M"] == LOW
        ]
        space += [
            config(gemm_config=each, persistent=persistent, method=two_shot) for each in tiles
        ]
        space += [
            config(gemm_config=each, persistent=persistent, method=two_shot, exchange=True)
            for each in tile_shapes(tiles)
        ]
    chunked = tile_shapes(get_config_space(descriptors))
    space += [
        config(gemm_config=each, persistent=descriptors, method=two_shot, num_chunks=num_chunks)
        for each in chunked[: 1 if interpreted else _CHUNKED_TILES]
        for num_chunks in _CHUNKS
    ]
    space += [
        config(
            method=GEMMAllReduceMethod.SERIAL,
            reduction=reduction,
            num_chunks=shape.num_pieces,
            num_ctas=shape.num_ctas,
            block_bytes=shape.block_bytes,
        )
        for reduction, shapes in _SERIAL.items()
        for shape in (shapes[:1] if interpreted else shapes)
    ]
    return [*space, config(method=GEMMAllReduceMethod.COLLECTIVE)]


def config(
    *,
    gemm_config: triton.Config | None = None,
    persistent: bool | None = None,
    method: GEMMAllReduceMethod | None,
    packets: bool = False,
    exchange: bool = False,
    num_chunks: int = 1,
    reduction: AllReduceMethod | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
) -> dict[str, Any]:
    """All tunables; a way has ``None`` for what it does not know."""
    return {
        "gemm_config": gemm_config,
        "persistent": persistent,
        "method": method,
        "packets": packets,
        "exchange": exchange,
        "num_chunks": num_chunks,
        "reduction": reduction,
        "num_ctas": num_ctas,
        "block_bytes": block_bytes,
    }


def prune_fn(
    config: Mapping[str, Any],
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: Any,
    *args: Any,
    **kwargs: Any,
) -> bool:
    """What is dropped goes by the largest M of the key, since a winner serves all of them."""
    method = config["method"]
    if ctx.num_ranks == 1:  # a plain product, by torch
        return method is GEMMAllReduceMethod.COLLECTIVE
    rows, N = row_bucket(A.shape[0]), B.shape[1]
    nbytes = rows * N * A.element_size()
    if method is GEMMAllReduceMethod.COLLECTIVE:
        # CPU ranks are there to run our kernels.
        return current_device().name == "cuda"
    if method is GEMMAllReduceMethod.SERIAL:
        return _is_worth_reducing(config, nbytes, ctx.num_ranks)
    tiles = config["gemm_config"]
    if method is None or tiles is None:
        return False
    if method is GEMMAllReduceMethod.ONE_SHOT:
        if nbytes > ONE_SHOT_BYTES or config["num_chunks"] > 1:
            return False
        if config["packets"] and rows * bytes_of_row(N, A.element_size()) > PACKET_BYTES:
            return False
    elif config["exchange"]:
        # Not by the rows of this context: others have the same key.
        whole = -(-rows // ctx.num_ranks) * ctx.num_ranks
        if whole * N * A.element_size() > SUMMED_BYTES:
            return False
    else:
        rows = slab_rows(rows, ctx.num_ranks)
        chunks = chunks_of_slab(tiles, rows, N, config["num_chunks"])
        if len(chunks.rows) < config["num_chunks"]:  # the same as with fewer
            return False
    return suits_rows(tiles, rows) and suits_gemm({"gemm_config": tiles}, A, B)


def _is_worth_reducing(config: Mapping[str, Any], nbytes: int, num_ranks: int) -> bool:
    if config["reduction"] is None:
        return False
    if config["reduction"] is AllReduceMethod.ONE_SHOT:
        if nbytes > ONE_SHOT_BYTES:
            return False
    else:
        nbytes = -(-nbytes // num_ranks)
    shape = shape_of(config["num_ctas"], config["block_bytes"], config["num_chunks"])
    return is_worth_trying(shape, nbytes)
