"""All-gather and reduce-scatter whose shards are pushed by copy engines, for many bytes.

Calls alternate between two slots by the protocol of ``slots/epochs.py``. On each rank a slot has
``shards`` uint8 [source rank, bytes of a shard] and ``arrivals`` int64 [MAX_CHUNKS, source rank].
``arrivals`` are flags, one per chunk. Copy engines of the source rank write both regions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from triton_dist.kernels.common.context import Check
from triton_dist.kernels.common.exchange.buffer import (
    MAX_CHUNKS,
    Exchange,
    exchange_lengths,
    make_plan,
    padded_shard_numel,
)
from triton_dist.kernels.common.exchange.pushed import Pushed, kernel_add_pushed
from triton_dist.kernels.common.peers import Disagreements
from triton_dist.kernels.common.slots.epochs import PUSH_STREAMS, EpochSlots, PushedSlots
from triton_dist.runtime.device.transfer import Copy, InputRows, Step
from triton_dist.runtime.launch import Launch

T = TypeVar("T")


class PushedShards(PushedSlots):
    """Slots for one shard of up to ``shard_bytes`` bytes per source. Creation is collective."""

    def __init__(
        self,
        shard_bytes: int,
        group: dist.ProcessGroup | None,
        name: str,
        disagreements: Disagreements | None = None,
    ) -> None:
        num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        regions = {
            "shards": ((num_ranks * shard_bytes,), torch.uint8),
            "arrivals": ((MAX_CHUNKS * num_ranks,), torch.int64),
        }
        slots = EpochSlots(
            f"{name}.pushed", regions, ("arrivals",), "a kernel of a collective", group,
            disagreements=disagreements,
        )  # fmt: skip
        super().__init__(slots)

    def push(
        self,
        call_tag: int,
        key: Hashable,
        steps: Callable[[], Iterable[Step]],
        tensors: Any,
        receive: Callable[[], T],
        num_chunks: Callable[[], int],
        queue_first: Callable[[], object] = lambda: None,
    ) -> T:
        """Push ``tensors`` and return ``receive()``, which queues kernels that wait for the peers.

        Args:
            call_tag: see ``EpochSlots.take``.
            key, steps: see ``transfer``. This function adds the slot to the key.
            num_chunks: function that returns the number of flags of each peer, called only for
                errors.
            queue_first: queues kernels whose end precedes the push. They may write to the slots of
                the peers.
        """
        slots, has_awaited_peers, transfer = self.slots, False, None
        slots.take(call_tag, copies_flag_word=True)
        stream = self._device.current_stream()
        try:
            queue_first()
            transfer = self.transfer((slots.index, key), steps)
            transfer.start(tensors, stream)
            result = receive()
            has_awaited_peers = True
        finally:
            if transfer is not None:
                transfer.join(stream)
            slots.finish(has_awaited_peers, lambda: {"arrivals": self.flags_of_peers(num_chunks())})
        return result

    def launch(self, exchange: Exchange, x: torch.Tensor, out: torch.Tensor) -> Launch:
        slots, params = self.slots, exchange.params
        shards, arrivals = slots["shards"].local.view(x.dtype), slots["arrivals"].local
        pushed = Pushed(shards, arrivals, slots.epoch)
        arguments = (x, out, pushed, exchange_lengths(exchange), exchange.call_tag, self.rank)
        plan = make_plan(self.num_ranks, params, x, params.num_chunks)
        options = {"plan": plan, "num_warps": params.num_warps}
        return Launch(exchange.kernel, (params.num_ctas,), arguments, options)

    def run(self, exchange: Exchange, x: torch.Tensor, out: torch.Tensor) -> None:
        """Push x, then add (``kernel_add_pushed``) or copy (``kernel_copy_pushed``) received
        shards.

        x and out are 1-D. Every rank must make the same call.
        """
        slots, key, item_bytes = self.slots, (exchange, x.dtype), x.element_size()

        def receive() -> None:
            tensors = {"x_ptr": x, "out_ptr": out}
            slots.launcher.run((slots.index, *key), lambda: self.launch(exchange, x, out), tensors)

        self.push(
            exchange.call_tag, key, lambda: self._push(exchange, x.dtype), x.view(-1, 1), receive,
            lambda: len(list(_chunks(exchange, item_bytes))),
        )  # fmt: skip

    def _push(self, exchange: Exchange, dtype: torch.dtype) -> Iterable[Step]:
        own_begin = self.rank * padded_shard_numel(exchange.shard_numel)
        scatters = exchange.kernel is kernel_add_pushed
        for chunk, (first, end) in enumerate(_chunks(exchange, dtype.itemsize)):
            for step in range(1, self.num_ranks):
                stream = (chunk * (self.num_ranks - 1) + step) % PUSH_STREAMS
                peer = (self.rank + step) % self.num_ranks
                target = (
                    self.slots["shards"]
                    .peers[peer]
                    .view(dtype)[own_begin + first : own_begin + end]
                )
                begin = peer * exchange.shard_numel if scatters else 0
                yield Copy(stream, target.view(-1, 1), InputRows(begin + first, begin + end))
                flag = chunk * self.num_ranks + self.rank
                arrivals = self.slots["arrivals"].peers[peer]
                yield Copy(stream, arrivals[flag : flag + 1], self.slots.epoch[:1])


def _chunks(exchange: Exchange, item_bytes: int) -> Iterable[tuple[int, int]]:
    """Yield (first element, end) of each chunk of a shard. The kernels use the same chunks."""
    params = exchange.params
    round_elements = params.num_ctas * params.block_bytes // item_bytes
    rounds = -(-exchange.shard_numel // round_elements)
    step = -(-rounds // params.num_chunks) * round_elements
    for first in range(0, exchange.shard_numel, step):
        yield first, min(first + step, exchange.shard_numel)


def heads_check(name: str, x: torch.Tensor) -> Iterator[Check]:
    """Yield the check that heads are contiguous and all tokens are equally far apart."""
    batch, tokens, heads, dim = x.shape
    in_row = x.stride(3) == 1 and (heads == 1 or x.stride(2) == dim)
    fits = in_row and (1 in (batch, tokens) or x.stride(0) == tokens * x.stride(1))
    expected = "contiguous heads, with one distance between all tokens"
    yield f"{name}.stride()", x.stride(), fits or x.is_contiguous(), expected


def row_stride(x: torch.Tensor) -> int:
    """Return the distance of two tokens of x [batch, tokens, heads, dim] in elements."""
    if x.is_contiguous():  # the strides of dimensions of size 1 are arbitrary
        return x.shape[2] * x.shape[3]
    return int(x.stride(1) if x.shape[1] > 1 else x.stride(0))


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return x [batch, tokens, heads, dim] as [batch * tokens, heads * dim], without gradient."""
    batch, tokens, heads, dim = x.shape
    return x.detach().as_strided((batch * tokens, heads * dim), (row_stride(x), 1))
