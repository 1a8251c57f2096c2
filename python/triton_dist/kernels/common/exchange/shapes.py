"""Layouts of launches of the plain collectives, and those that are tried."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.exchange import packets
from triton_dist.kernels.common.exchange import protocol as exchange

MAX_CTAS: int = exchange.MAX_CTAS.value
MAX_PIECES: int = exchange.MAX_PIECES.value
VECTOR_BYTES = 16
LINE_BYTES: int = packets.LINE_BYTES.value
TUNABLES = ("num_ctas", "block_bytes", "num_pieces")
"""Names of what lays a launch out, in configs."""


@dataclass(frozen=True)
class Shape:
    """Layout of a launch.

    num_ctas: programs, at most ``MAX_CTAS``. block_bytes: what a program moves at a time, a power
    of two from 512 on. num_pieces: in how many pieces its share travels, at most ``MAX_PIECES``.
    """

    num_ctas: int
    block_bytes: int
    num_pieces: int = 1

    @property
    def values(self) -> tuple[int, int, int]:
        """Values of ``TUNABLES``."""
        return self.num_ctas, self.block_bytes, self.num_pieces

    @property
    def num_warps(self) -> int:
        """A vector of 16 bytes for each thread, up to 16 warps; then several."""
        return max(1, min(16, self.block_bytes // (32 * VECTOR_BYTES)))

    @property
    def num_warps_in_packets(self) -> int:
        """A line for each thread, up to 32 warps; then several, which costs shared memory."""
        return max(1, min(32, self.block_bytes // (32 * LINE_BYTES)))


DEFAULT_SHAPE = Shape(32, 8192)
SMALL_SHAPES = (
    *(Shape(ctas, 2048) for ctas in (8, 16, 32, 64)),
    *(Shape(ctas, 8192) for ctas in (16, 32, 64, 128)),
)
"""For few bytes: what counts is how soon the last program is done."""
PACKET_SHAPES = (
    *(Shape(ctas, 2048) for ctas in (8, 16, 32, 64, 128)),
    Shape(32, 512),
    Shape(64, 1024),
    Shape(64, 4096),
)
"""For packets: a line for each thread."""
LARGE_SHAPES = tuple(Shape(ctas, 16384, pieces) for ctas in (32, 64, 128) for pieces in (1, 4, 8))
"""For many: what counts is how many bytes are under way."""


def shape_in(config: Mapping[str, Any]) -> Shape:
    """The shape in a config that has one."""
    return Shape(config["num_ctas"], config["block_bytes"], config.get("num_pieces", 1))


@functools.cache
def shape_of(
    num_ctas: int | None,
    block_bytes: int | None,
    num_pieces: int | None,
    default: Shape = DEFAULT_SHAPE,
) -> Shape:
    """The shape of tunables; what is ``None`` is as in ``default``.

    Raises:
        InvalidArgument: a number that no launch can have.
    """
    asked = {"num_ctas": num_ctas, "block_bytes": block_bytes, "num_pieces": num_pieces}
    shape = replace(default, **{name: n for name, n in asked.items() if n is not None})
    if not 1 <= shape.num_ctas <= MAX_CTAS:
        raise InvalidArgument("shape_of", "num_ctas", shape.num_ctas, f"1 to {MAX_CTAS}")
    if shape.block_bytes < 512 or shape.block_bytes & (shape.block_bytes - 1):
        expected = "a power of two from 512 on"
        raise InvalidArgument("shape_of", "block_bytes", shape.block_bytes, expected)
    if not 1 <= shape.num_pieces <= MAX_PIECES:
        raise InvalidArgument("shape_of", "num_pieces", shape.num_pieces, f"1 to {MAX_PIECES}")
    return shape


def is_worth_trying(shape: Shape, shard_bytes: int) -> bool:
    """Say whether a shard of so many bytes has a block for each program and piece. The smallest
    shape is always worth it: something has to be left."""
    blocks = -(-shard_bytes // shape.block_bytes)
    return shape == SMALL_SHAPES[0] or blocks >= shape.num_ctas * shape.num_pieces
