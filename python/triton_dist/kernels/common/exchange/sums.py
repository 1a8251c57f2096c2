"""Sum of a tensor over ranks, on every rank, in one shot or two: kernels and their launches, how
far each goes, and memory for them.

One shot sends everything to everybody, who all add everything; very few bytes go in packets. In two
shots every rank adds a shard and sends it to all. ``exchange/protocol.py`` says how kernels work
and what they take; x and out are [total]. Blocks of ``plan.BLOCK`` elements go round the programs.
Grid: (up to ``MAX_CTAS``,).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from triton_dist._jit import jit
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
from triton_dist.kernels.common.exchange.packets import kernel_all_reduce_packets
from triton_dist.kernels.common.exchange.protocol import (
    add_parts,
    await_peers,
    begin,
    chunks_of,
    copy_shards,
    first_of,
    flag_of_chunk,
    notify_ranks,
    push_shards,
    send_block,
    send_copies,
)
from triton_dist.kernels.common.peers import Disagreements, folded
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


@jit(do_not_specialize=["size", "rank"])
def kernel_all_reduce_one_shot(
    x_ptr, out_ptr, slots, peers, lengths, size, rank, plan: tl.constexpr
):
    """Every rank sends all of x to all, and adds what it gets; a shard is the whole.

    Once: a flag a program and peer, so ``NUM_CHUNKS`` is 1."""
    tl.static_assert(plan.NUM_CHUNKS == 1)
    # What needs no number of the call comes first, so that it is under way while that is counted.
    index = first_of(0, plan.BLOCK) + tl.arange(0, plan.BLOCK)
    mask = index < lengths.shard
    x = tl.load(x_ptr + index, mask=mask)
    call = begin(slots, peers, size, rank, plan)
    blocks = chunks_of(lengths.shard, plan)
    send_block(x, index, mask, slots, call.offset, lengths.room, rank, plan)
    send_copies(x_ptr, None, slots, call, 1, blocks, lengths, plan)
    value = flag_of_chunk(call, 0)
    notify_ranks(call, 0, value, plan)
    token = await_peers(peers, 0, value, plan)
    add_parts(
        x_ptr, out_ptr, slots.data, call.offset, 0, 0, blocks, token, lengths, rank, plan
    )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_all_reduce_two_shot(
    x_ptr, out_ptr, slots, peers, lengths, size, rank, plan: tl.constexpr
):
    """Every rank adds its shard of x and sends the sum to all. Shards follow one another in x; the
    last ones may be shorter, or empty.

    A slot is parts [NUM_RANKS, room], then sums [NUM_RANKS, room]. While one piece of the parts
    is sent, the one before it is added and its sums sent, and the one before that copied out.
    """
    call = begin(slots, peers, size, rank, plan)
    blocks = chunks_of(lengths.shard, plan)
    sums = call.offset + plan.NUM_RANKS * lengths.room.to(tl.int64)
    own = rank.to(tl.int64) * lengths.shard
    for chunk in range(plan.NUM_CHUNKS + 2):
        first = chunk * blocks
        if chunk < plan.NUM_CHUNKS:
            push_shards(x_ptr, slots, call, first, first + blocks, lengths, plan)
            notify_ranks(call, 0, flag_of_chunk(call, chunk), plan)
        if (chunk >= 1) & (chunk <= plan.NUM_CHUNKS):
            token = await_peers(peers, 0, flag_of_chunk(call, chunk - 1), plan)
            add_parts(
                x_ptr + own, out_ptr + own, slots.data, call.offset, own, first - blocks, first,
                token, lengths, rank, plan, slots, sums,
            )  # fmt: skip
            notify_ranks(call, 1, flag_of_chunk(call, chunk - 1), plan)
        if chunk >= 2:
            token = await_peers(peers, 1, flag_of_chunk(call, chunk - 2), plan)
            copy_shards(
                out_ptr, slots.data, sums, first - 2 * blocks, first - blocks, token, lengths,
                rank, plan,
            )  # fmt: skip


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
        num_chunks: int | None = None,
    ) -> Iterator[tuple[slice, Exchange]]:
        """Describe each launch, and which elements it sums."""
        elements, item_bytes = product.numel(), product.element_size()
        # Ranks with other rows of the same range launch the same kernel: then they find out.
        nbytes = triton.next_power_of_2(product.shape[0]) * product.shape[1] * item_bytes
        one_shot = nbytes < TWO_SHOT_FROM if reduction is None else reduction == ONE_SHOT
        in_packets = one_shot and nbytes <= PACKETS_UP_TO
        default = PACKET_SHAPE if in_packets else DEFAULT_SHAPE
        shape = shape_of("gemm_ar", num_ctas, block_bytes, 1 if one_shot else num_chunks, default)
        size = folded(product.shape[0])
        step = most_elements(self.sum_nbytes, item_bytes, self.num_ranks, one_shot, in_packets)
        for first in range(0, elements, step):
            total = min(step, elements - first)
            part = slice(first, first + total)
            if one_shot:
                yield part, in_one_shot(total, shape, size, in_packets)
            else:
                yield part, in_two_shots(total, self.num_ranks, shape, size)
