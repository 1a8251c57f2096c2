"""Sum of a tensor over ranks, on every rank, in one shot or two: the launches, how far each goes,
and memory for them.

One shot sends everything to everybody, who all add everything; very few bytes go in packets. In two
shots every rank adds a shard and sends it to all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from triton_dist.kernels.common.exchange.buffer import (
    DEFAULT_SHAPE,
    VECTOR_ELEMENTS,
    Exchange,
    ExchangeBuffer,
    Shape,
    shape_of,
    shard_bytes,
    shard_elements,
)
from triton_dist.kernels.common.exchange.kernels import (
    kernel_all_reduce_one_shot,
    kernel_all_reduce_two_shot,
)
from triton_dist.kernels.common.exchange.packets import kernel_all_reduce_packets
from triton_dist.kernels.common.guard import Disagreements
from triton_dist.kernels.common.peers import folded
from triton_dist.runtime.ranks import group_for

ONE_SHOT, TWO_SHOT = "one_shot", "two_shot"
# Largest tensor of a one-shot launch of many ranks: a slot holds one for each rank, and above it
# one shot never wins. Two ranks send as much in two shots, and take as much memory.
ONE_SHOT_BYTES = 4 << 20
# The same in packets, which take twice the memory and the link's time.
PACKET_BYTES = 256 << 10
# Up to what size packets are the default of one shot, and how they are then laid out.
PACKETS_UP_TO = 64 << 10
PACKET_SHAPE = Shape(32, 2048)
# From what size on two shots are the default; which one is faster, tuning finds out.
TWO_SHOT_FROM = 256 << 10


def one_shot_bytes(num_ranks: int) -> int:
    """Bytes of the largest tensor of a one-shot launch."""
    return 8 * ONE_SHOT_BYTES if num_ranks == 2 else ONE_SHOT_BYTES


def slot_bytes(nbytes: int, num_ranks: int) -> int:
    """Bytes of a slot for tensors of up to ``nbytes`` a launch: addends of up to a few MB from each
    rank; or addends of a shard, then sums of all shards."""
    one_shot = shard_bytes(min(nbytes, one_shot_bytes(num_ranks)), 1)
    return num_ranks * max(one_shot, 2 * shard_bytes(nbytes, num_ranks))


def packet_bytes(nbytes: int, num_ranks: int) -> int:
    """The same of packets."""
    return min(nbytes, PACKET_BYTES) if num_ranks > 1 else 0


def most_elements(
    nbytes: int, item_bytes: int, num_ranks: int, one_shot: bool, in_packets: bool = False
) -> int:
    """Elements of ``item_bytes`` that one launch can sum in memory for ``nbytes``: whole vectors,
    if that many fit."""
    if one_shot:
        nbytes = min(nbytes, PACKET_BYTES if in_packets else one_shot_bytes(num_ranks))
    most = nbytes // item_bytes
    return max(1, most // VECTOR_ELEMENTS * VECTOR_ELEMENTS or most)


def in_one_shot(total: int, shape: Shape, size: int, in_packets: bool) -> Exchange:
    """Describe a launch for ``total`` elements; ``size``: what peers compare."""
    if in_packets:
        return Exchange(kernel_all_reduce_packets, total, total, shape, size, 0, in_packets=True)
    return Exchange(kernel_all_reduce_one_shot, total, total, shape, size)


def in_two_shots(total: int, num_ranks: int, shape: Shape, size: int) -> Exchange:
    """The same for the other."""
    shard = shard_elements(-(-total // num_ranks))
    return Exchange(kernel_all_reduce_two_shot, shard, total, shape, size, phases=2)


class SumBuffer(ExchangeBuffer):
    """Symmetric memory in which products of an op are summed: of up to ``sum_nbytes`` in a launch,
    larger ones in several."""

    def __init__(
        self,
        sum_nbytes: int,
        group: dist.ProcessGroup | None,
        name: str,
        disagreements: Disagreements,
    ) -> None:
        size = group_for(group).size
        slot, packets = slot_bytes(sum_nbytes, size), packet_bytes(sum_nbytes, size)
        super().__init__(slot, group, name, packets, disagreements)
        self.sum_nbytes = sum_nbytes

    def sum(
        self, product: torch.Tensor, reduction: str | None, *layout: int | None
    ) -> torch.Tensor:
        """The sum over ranks of ``product`` [M, N], contiguous.

        reduction: ``ONE_SHOT`` or ``TWO_SHOT``; ``None``: by size. layout: ``TUNABLES`` of the
        launch; default: by size."""
        total = torch.empty_like(product)
        x, out = product.view(-1), total.view(-1)
        for part, exchange in self._exchanges(product, reduction, *layout):
            self.run(exchange, x[part], out[part])
        return total

    def compile_sum(
        self, product: torch.Tensor, reduction: str | None, *layout: int | None
    ) -> None:
        """Compile and load what ``sum`` launches; of several launches, the first."""
        part, exchange = next(self._exchanges(product, reduction, *layout))
        x = product.view(-1)[part]
        self.launch(exchange, x, x.new_empty(x.shape)).compile()

    def _exchanges(
        self,
        product: torch.Tensor,
        reduction: str | None,
        num_ctas: int | None = None,
        block_bytes: int | None = None,
        num_pieces: int | None = None,
    ) -> Iterator[tuple[slice, Exchange]]:
        """Describe each launch, and which elements it sums."""
        elements, nbytes = product.numel(), product.nbytes
        one_shot = nbytes < TWO_SHOT_FROM if reduction is None else reduction == ONE_SHOT
        in_packets = one_shot and nbytes <= PACKETS_UP_TO
        default = PACKET_SHAPE if in_packets else DEFAULT_SHAPE
        shape = shape_of(num_ctas, block_bytes, 1 if one_shot else num_pieces, default)
        size = folded(product.shape[0])
        item_bytes = product.element_size()
        step = most_elements(self.sum_nbytes, item_bytes, self.num_ranks, one_shot, in_packets)
        for first in range(0, elements, step):
            total = min(step, elements - first)
            part = slice(first, first + total)
            if one_shot:
                yield part, in_one_shot(total, shape, size, in_packets)
            else:
                yield part, in_two_shots(total, self.num_ranks, shape, size)
