"""All-reduce kernels in one shot and in two shots, and memory for them.

In one shot every rank sends all its data to all ranks, and every rank computes the whole sum. In
two shots every rank computes the sum of one shard and sends this sum to all ranks. Few bytes are
sent in packets, which contain their own flags (``exchange/packets.py``).
``exchange/protocol.py`` describes the protocol and the arguments; x and out are [total].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.buffer import (
    DEFAULT_PARAMS,
    VECTOR_ELEMENTS,
    Exchange,
    ExchangeBuffer,
    LaunchParams,
    checked_params,
    padded_shard_bytes,
    padded_shard_numel,
)
from triton_dist.kernels.common.exchange.packets import (
    kernel_all_reduce_packets,
    kernel_all_reduce_two_shot_packets,
)
from triton_dist.kernels.common.exchange.protocol import (
    add_shards,
    await_peers,
    begin_exchange,
    block_begin,
    blocks_per_chunk,
    chunk_flag,
    copy_shards,
    notify_ranks,
    send_block,
    send_to_all,
    send_to_owners,
)
from triton_dist.kernels.common.peers import Disagreements, fold_to_tag
from triton_dist.runtime.ranks import group_for

ONE_SHOT, TWO_SHOT = "one_shot", "two_shot"
TWO_SHOT_IN_PACKETS = "two_shot_in_packets"
# Maximum bytes of a tensor in a one-shot launch. It limits the memory: a slot holds one tensor per
# rank. For two ranks the limit is 8 times as large, because two shots would not reduce the bytes.
MAX_ONE_SHOT_BYTES = 4 << 20
# Maximum bytes of a tensor sent in packets, which take twice the memory and link time.
MAX_PACKET_BYTES = 256 << 10
# Maximum bytes of a tensor sent in packets in two shots, for more than two ranks.
MAX_TWO_SHOT_PACKET_BYTES = 2 << 20
# Bytes of a tensor up to which one shot uses packets by default, and the parameters of the launch.
DEFAULT_MAX_PACKET_BYTES = 64 << 10
PACKET_PARAMS = LaunchParams(32, 2048)
TWO_SHOT_PACKET_CANDIDATES = tuple(
    LaunchParams(*each) for each in ((32, 2048), (64, 2048), (128, 1024), (128, 2048), (128, 4096))
)
# Bytes of a tensor from which two shots are the default. Tuning finds the faster algorithm.
DEFAULT_MIN_TWO_SHOT_BYTES = 256 << 10


@jit(do_not_specialize=["call_tag", "rank"])
def kernel_all_reduce_one_shot(
    x_ptr, out_ptr, slots, peers, lengths, call_tag, rank, plan: tl.constexpr
):
    """Send all of x to all ranks and add the received tensors. A shard is the full tensor here.

    ``NUM_CHUNKS`` is 1, because a program sets one flag for all its data.
    """
    tl.static_assert(plan.NUM_CHUNKS == 1)
    # Load x before ``begin``, which waits for the atomic add to the call counter.
    index = block_begin(0, plan.BLOCK) + tl.arange(0, plan.BLOCK)
    mask = index < lengths.shard
    x = tl.load(x_ptr + index, mask=mask)
    call = begin_exchange(slots, peers, call_tag, rank, plan)
    blocks = blocks_per_chunk(lengths.shard, plan)
    send_block(x, index, mask, slots, call.offset, lengths.stride, rank, plan)
    send_to_all(x_ptr, None, slots, call, 1, blocks, lengths, plan)
    value = chunk_flag(call, 0)
    notify_ranks(call, 0, value, plan)
    token = await_peers(peers, 0, value, plan)
    add_shards(
        x_ptr, out_ptr, slots.data, call.offset, 0, 0, blocks, token, lengths, rank, plan
    )  # fmt: skip


@jit(do_not_specialize=["call_tag", "rank"])
def kernel_all_reduce_two_shot(
    x_ptr, out_ptr, slots, peers, lengths, call_tag, rank, plan: tl.constexpr
):
    """Sum this rank's shard of x over all ranks, and send the sum to all ranks.

    The last shards of x may be shorter or empty. A slot holds shards [NUM_RANKS, stride], then sums
    [NUM_RANKS, stride]. Each step processes three chunks: it sends chunk n, adds chunk n - 1 and
    sends its sums, and copies the received sums of chunk n - 2 to out.
    """
    call = begin_exchange(slots, peers, call_tag, rank, plan)
    blocks = blocks_per_chunk(lengths.shard, plan)
    sums = call.offset + plan.NUM_RANKS * lengths.stride.to(tl.int64)
    shard_begin = rank.to(tl.int64) * lengths.shard
    for chunk in range(plan.NUM_CHUNKS + 2):
        first = chunk * blocks
        if chunk < plan.NUM_CHUNKS:
            send_to_owners(x_ptr, slots, call, first, first + blocks, lengths, plan)
            notify_ranks(call, 0, chunk_flag(call, chunk), plan)
        if (chunk >= 1) & (chunk <= plan.NUM_CHUNKS):
            token = await_peers(peers, 0, chunk_flag(call, chunk - 1), plan)
            add_shards(
                x_ptr + shard_begin, out_ptr + shard_begin, slots.data, call.offset, shard_begin,
                first - blocks, first, token, lengths, rank, plan, slots, sums,
            )  # fmt: skip
            notify_ranks(call, 1, chunk_flag(call, chunk - 1), plan)
        if chunk >= 2:
            token = await_peers(peers, 1, chunk_flag(call, chunk - 2), plan)
            copy_shards(
                out_ptr, slots.data, sums, first - 2 * blocks, first - blocks, token, lengths,
                rank, plan,
            )  # fmt: skip


def max_one_shot_bytes(num_ranks: int) -> int:
    return 8 * MAX_ONE_SHOT_BYTES if num_ranks == 2 else MAX_ONE_SHOT_BYTES


def slot_bytes(nbytes: int, num_ranks: int) -> int:
    """Return the bytes of a slot for tensors of up to ``nbytes`` per launch.

    A slot holds one full tensor per rank in one shot, or shards and sums in two shots.
    """
    one_shot = padded_shard_bytes(min(nbytes, max_one_shot_bytes(num_ranks)), 1)
    return num_ranks * max(one_shot, 2 * padded_shard_bytes(nbytes, num_ranks))


def packet_bytes(nbytes: int, num_ranks: int) -> int:
    """Return the maximum bytes that a rank sends to a peer in packets, for launches of up to
    ``nbytes``.

    A rank sends all elements in one shot, or a shard of addends and a shard of sums in two shots.
    """
    if num_ranks == 1:
        return 0
    two_shot = padded_shard_bytes(min(nbytes, max_two_shot_packet_bytes(num_ranks)), num_ranks)
    return max(min(nbytes, MAX_PACKET_BYTES), 2 * two_shot)


def max_two_shot_packet_bytes(num_ranks: int) -> int:
    # Two ranks would send as many bytes in one shot.
    return MAX_PACKET_BYTES if num_ranks == 2 else MAX_TWO_SHOT_PACKET_BYTES


def max_elements(
    nbytes: int, item_bytes: int, num_ranks: int, one_shot: bool, in_packets: bool = False
) -> int:
    """Return the maximum number of elements of a launch in a buffer for sums of ``nbytes`` bytes.

    The number is a multiple of ``VECTOR_ELEMENTS``, if that many elements fit.
    """
    if one_shot:
        nbytes = min(nbytes, MAX_PACKET_BYTES if in_packets else max_one_shot_bytes(num_ranks))
    elif in_packets:
        nbytes = min(nbytes, max_two_shot_packet_bytes(num_ranks))
    max_total = nbytes // item_bytes
    return max(1, max_total // VECTOR_ELEMENTS * VECTOR_ELEMENTS or max_total)


def one_shot_exchange(
    total: int, params: LaunchParams, call_tag: int, in_packets: bool
) -> Exchange:
    """Describe a one-shot launch for ``total`` elements.

    Flags and packets contain ``call_tag``, which is computed from the number of rows. Ranks compare
    it to detect calls of different sizes.
    """
    if in_packets:
        return Exchange(
            kernel_all_reduce_packets, total, total, params, call_tag, 0, in_packets=True
        )
    return Exchange(kernel_all_reduce_one_shot, total, total, params, call_tag)


def two_shot_exchange(
    total: int, num_ranks: int, params: LaunchParams, call_tag: int, in_packets: bool = False
) -> Exchange:
    """Describe a two-shot launch for ``total`` elements. See ``one_shot_exchange``."""
    shard = padded_shard_numel(-(-total // num_ranks))
    if in_packets:
        kernel = kernel_all_reduce_two_shot_packets
        return Exchange(kernel, shard, total, params, call_tag, num_phases=2, in_packets=True)
    return Exchange(kernel_all_reduce_two_shot, shard, total, params, call_tag, num_phases=2)


class SumBuffer(ExchangeBuffer):
    """Symmetric memory in which an op sums its products. One launch sums up to ``sum_nbytes``
    bytes; larger products take several launches."""

    def __init__(
        self,
        sum_nbytes: int,
        group: dist.ProcessGroup | None,
        name: str,
        disagreements: Disagreements,
    ) -> None:
        num_ranks = group_for(group).size
        slot, packets = slot_bytes(sum_nbytes, num_ranks), packet_bytes(sum_nbytes, num_ranks)
        super().__init__(slot, group, name, packets, disagreements)
        self.sum_nbytes = sum_nbytes

    def sum(
        self, product: torch.Tensor, reduction: str | None, *launch_params: int | None
    ) -> torch.Tensor:
        """Return the sum of ``product`` [M, N], contiguous, over ranks.

        Args:
            reduction: ``ONE_SHOT``, ``TWO_SHOT``, ``TWO_SHOT_IN_PACKETS``, or ``None`` to choose by
                size.
            launch_params: num_ctas, block_bytes and num_chunks; missing values are chosen by size.
        """
        total = torch.empty_like(product)
        x, out = product.view(-1), total.view(-1)
        for chunk, exchange in self._exchanges(product, reduction, *launch_params):
            self.run(exchange, x[chunk], out[chunk])
        return total

    def compile_sum(
        self, product: torch.Tensor, reduction: str | None, *launch_params: int | None
    ) -> None:
        """Compile and load the kernel that ``sum`` launches first."""
        chunk, exchange = next(self._exchanges(product, reduction, *launch_params))
        x = product.view(-1)[chunk]
        self.launch(exchange, x, x.new_empty(x.shape)).compile()

    def _exchanges(
        self,
        product: torch.Tensor,
        reduction: str | None,
        num_ctas: int | None = None,
        block_bytes: int | None = None,
        num_chunks: int | None = None,
    ) -> Iterator[tuple[slice, Exchange]]:
        """Yield, for each launch, the slice of elements that it sums, and its description."""
        elements, item_bytes = product.numel(), product.element_size()
        # Round up the number of rows. Ranks with different numbers then usually launch the same
        # kernel, which detects the difference.
        nbytes = triton.next_power_of_2(product.shape[0]) * product.shape[1] * item_bytes
        one_shot = (
            nbytes < DEFAULT_MIN_TWO_SHOT_BYTES if reduction is None else reduction == ONE_SHOT
        )
        in_packets = (
            nbytes <= DEFAULT_MAX_PACKET_BYTES if one_shot else reduction == TWO_SHOT_IN_PACKETS
        )
        default = PACKET_PARAMS if in_packets else DEFAULT_PARAMS
        params = checked_params(
            "gemm_ar", num_ctas, block_bytes, 1 if one_shot or in_packets else num_chunks, default
        )
        call_tag = fold_to_tag(product.shape[0])
        step = max_elements(self.sum_nbytes, item_bytes, self.num_ranks, one_shot, in_packets)
        for first in range(0, elements, step):
            total = min(step, elements - first)
            chunk = slice(first, first + total)
            if one_shot:
                yield chunk, one_shot_exchange(total, params, call_tag, in_packets)
            else:
                yield chunk, two_shot_exchange(total, self.num_ranks, params, call_tag, in_packets)
