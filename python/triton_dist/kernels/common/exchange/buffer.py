"""Symmetric memory of the plain collectives, their launches, and how these are laid out."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.exchange import protocol
from triton_dist.kernels.common.exchange.protocol import (
    Lengths,
    Packets,
    Peers,
    Plan,
    Slots,
    kernel_all_gather,
    kernel_reduce_scatter,
)
from triton_dist.kernels.common.launch import Launch, Launcher
from triton_dist.kernels.common.peers import (
    AWAITED,
    FLAG,
    Disagreements,
    Flags,
    TimeoutWord,
    size_in,
)
from triton_dist.language.signals import SIZE_BITS
from triton_dist.runtime import symmetric
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.device import current_device
from triton_dist.runtime.garbage import weak
from triton_dist.runtime.ranks import group_for

MAX_CTAS: int = protocol.MAX_CTAS.value
MAX_CHUNKS: int = protocol.MAX_CHUNKS.value
VECTOR_BYTES = 16
LINE_BYTES: int = protocol.LINE_BYTES.value
TUNABLES = ("num_ctas", "block_bytes", "num_chunks")
"""Names of what lays a launch out, in configs."""
_SHARD_ALIGNMENT: int = protocol.SHARD_ALIGNMENT.value
_PART_ALIGNMENT: int = protocol.PART_ALIGNMENT.value
_LINE_WORDS: int = protocol.LINE_WORDS.value
_TURNS, _PHASES = 2, protocol.PHASES.value
_LINE = 16  # int64 in a cache line
VECTOR_ELEMENTS = 16  # for sizes that are multiples of it Triton compiles whole vectors


@dataclass(frozen=True)
class Shape:
    """Layout of a launch.

    num_ctas: programs, at most ``MAX_CTAS``. block_bytes: what a program moves at a time, a power
    of two from 512 on. num_chunks: in how many pieces its share travels, at most ``MAX_CHUNKS``.
    """

    num_ctas: int
    block_bytes: int
    num_chunks: int = 1

    @property
    def values(self) -> tuple[int, int, int]:
        """Values of ``TUNABLES``."""
        return self.num_ctas, self.block_bytes, self.num_chunks

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
LARGE_SHAPES = tuple(Shape(ctas, 16384, chunks) for ctas in (32, 64, 128) for chunks in (1, 4, 8))
"""For many: what counts is how many bytes are under way."""


def shape_in(config: Mapping[str, Any]) -> Shape:
    """The shape in a config that has one."""
    return Shape(config["num_ctas"], config["block_bytes"], config.get("num_chunks", 1))


@functools.cache
def untuned(shape: Shape = DEFAULT_SHAPE) -> Shape:
    """``shape``; where kernels are interpreted, of no more programs than run at a time there."""
    device = current_device()
    most = device.num_sms if device.interprets else shape.num_ctas
    return replace(shape, num_ctas=min(shape.num_ctas, most))


def small_shape(nbytes: int) -> Shape:
    """The first of ``SMALL_SHAPES`` that moves so many bytes at once, or the last; untuned."""
    at_once = (each for each in SMALL_SHAPES if each.num_ctas * each.block_bytes >= nbytes)
    return untuned(next(at_once, SMALL_SHAPES[-1]))


@functools.cache
def shape_of(
    function: str,
    num_ctas: int | None,
    block_bytes: int | None,
    num_chunks: int | None,
    default: Shape = DEFAULT_SHAPE,
) -> Shape:
    """The shape of tunables of ``function``; what is ``None`` is as in ``default``, untuned.

    Raises:
        InvalidArgument: a number that no launch can have.
    """
    asked = {"num_ctas": num_ctas, "block_bytes": block_bytes, "num_chunks": num_chunks}
    shape = replace(untuned(default), **{name: n for name, n in asked.items() if n is not None})
    if shape.num_ctas not in range(1, MAX_CTAS + 1):
        raise InvalidArgument(function, "num_ctas", shape.num_ctas, f"1 to {MAX_CTAS}")
    nbytes = shape.block_bytes
    if not isinstance(nbytes, int) or nbytes < 512 or nbytes & (nbytes - 1):
        raise InvalidArgument(function, "block_bytes", nbytes, "a power of two from 512 on")
    if shape.num_chunks not in range(1, MAX_CHUNKS + 1):
        raise InvalidArgument(function, "num_chunks", shape.num_chunks, f"1 to {MAX_CHUNKS}")
    return shape


def is_worth_trying(shape: Shape, shard_bytes: int) -> bool:
    """Say whether a shard of so many bytes has a block for each program and piece. The smallest
    shape is always worth it: something has to be left."""
    blocks = -(-shard_bytes // shape.block_bytes)
    return shape == SMALL_SHAPES[0] or blocks >= shape.num_ctas * shape.num_chunks


@dataclass(frozen=True)
class Exchange:
    """One launch of a kernel of an exchange: shards of ``elements`` elements, ``total`` in all.

    size: what all ranks have to come with alike; a number that says in errors what is wrong.
    phases: how often a program waits for the flags that every peer sets after a piece.
    in_packets: the kernel is one of ``exchange/packets.py``, which waits for no flag.
    """

    kernel: Any
    elements: int
    total: int
    shape: Shape
    size: int
    phases: int = 1
    in_packets: bool = False


def shard_elements(elements: int) -> int:
    """Elements that a shard of ``elements`` elements takes in a slot."""
    return -(-elements // _SHARD_ALIGNMENT) * _SHARD_ALIGNMENT


def shard_bytes(nbytes: int, num_ranks: int) -> int:
    """Most bytes that a shard of ``nbytes`` bytes takes in a slot, whatever the dtype."""
    return max(shard_elements(-(-nbytes // (item * num_ranks))) * item for item in (2, 4))


def bytes_of_parts(elements: int, dtype: torch.dtype, num_ranks: int) -> int:
    """Bytes of a slot with a part of ``elements`` elements from each rank; one rank sends nothing,
    but there is memory."""
    nbytes = num_ranks * shard_elements(elements) * dtype.itemsize
    return max(1, nbytes) if num_ranks > 1 else 1


def lengths_of(exchange: Exchange) -> Lengths:
    """Lengths of an exchange, as its kernel takes them."""
    return Lengths(exchange.elements, shard_elements(exchange.elements), exchange.total)


def plan_of(num_ranks: int, shape: Shape, x: torch.Tensor, num_chunks: int = 1) -> Plan:
    """Constants of an exchange of elements like those of x, as its kernel takes them."""
    lanes = triton.next_power_of_2(num_ranks)
    return Plan(num_ranks, lanes, shape.block_bytes // x.element_size(), num_chunks)


def scattering(addend: torch.Tensor, num_ranks: int, shape: Shape) -> tuple[Exchange, torch.Tensor]:
    """Describe the launch that sums ``addend`` [M, N] over ranks, and where the own rows go, those
    of one rank; M is a multiple of the ranks."""
    M, N = addend.shape
    rows = addend.new_empty((M // num_ranks, N))
    return Exchange(kernel_reduce_scatter, M // num_ranks * N, M * N, shape, M), rows


def gathering(
    shard: torch.Tensor, num_ranks: int, shape: Shape, size: int, rows: torch.Tensor | None = None
) -> tuple[Exchange, torch.Tensor]:
    """Describe the launch that gathers ``shard`` [m, N] of all ranks, and where they go: ``rows``,
    or a new matrix. ``size``: what peers compare."""
    if rows is None:
        rows = shard.new_empty((shard.shape[0] * num_ranks, shard.shape[1]))
    return Exchange(kernel_all_gather, shard.numel(), rows.numel(), shape, size), rows


class ExchangeBuffer:
    """Two slots of ``slot_bytes`` bytes that peers write to, and the flags of the exchanges that
    use them (``kernels/common/exchange/protocol.py``). Creation is collective.

    On each rank:
        slots uint8 [2 * slot_bytes], shards and sums of the last two calls: written by peers.
        arrivals int64 [turn, phase, program, source rank], flags: by the source's kernels.
        packets int64 [2, source rank, part_words], lines of packets: by the source's kernels.
        calls int64 [control words], of which the first counts programs of calls: by this rank's
            kernels.
        guard int64 [control words]: by this rank's kernels and host.

    Args:
        name: says in errors whose memory it is.
        packet_bytes: the largest tensor that goes in packets
            (``kernels/common/exchange/packets.py``). These have slots of their own, since ordinary
            data might look like one of theirs.
        disagreements: of the context; default: of this memory alone.
    """

    def __init__(
        self,
        slot_bytes: int,
        group: dist.ProcessGroup | None,
        name: str,
        packet_bytes: int = 0,
        disagreements: Disagreements | None = None,
    ) -> None:
        ranks = group_for(group)
        self.rank, self.num_ranks = ranks.rank, ranks.size
        self.device = current_device()
        unit = 4 * _SHARD_ALIGNMENT  # a slot holds whole shards of every dtype
        self.slot_bytes = -(-slot_bytes // unit) * unit
        words = max(1, -(-packet_bytes // LINE_BYTES)) * _LINE_WORDS
        self.part_words = -(-words // _PART_ALIGNMENT) * _PART_ALIGNMENT
        self.memory = symmetric.allocate(
            name,
            {
                "slots": ((2 * self.slot_bytes,), torch.uint8),
                "arrivals": ((_TURNS * _PHASES * MAX_CTAS * self.num_ranks,), torch.int64),
                "calls": ((_LINE,), torch.int64),
                "guard": ((_LINE,), torch.int64),
                "packets": ((2, self.num_ranks, self.part_words), torch.int64),
            },
            group,
        )
        # In one cache line: a program that has looked up where its flags go has both.
        self._tables = torch.cat(
            [self.memory[region].pointers for region in ("slots", "arrivals")]
        ).split(self.num_ranks)
        self.launcher = Launcher()
        self.disagreements = disagreements or Disagreements(f"the elements of x in {name}", group)
        self.timeout_words = TimeoutWord(
            name, "a kernel of a collective", self.memory["guard"].local.view(1, _LINE), 0, _PHASES,
            weak(self._late), weak(self._flags), self.disagreements, ranks,
        )  # fmt: skip
        self._last: tuple[int, int, int] | None = None

    def regions(self, dtype: torch.dtype) -> tuple[Slots, Peers]:
        """Arguments of every kernel; slots as of ``dtype``."""
        slots, arrivals = self.memory["slots"], self.memory["arrivals"]
        slots_table, arrivals_table = self._tables
        calls, timeout_words = self.memory["calls"].local, self.memory["guard"].local
        elements = self.slot_bytes // dtype.itemsize
        return (
            Slots(slots.local.view(dtype), slots_table, elements),
            Peers(arrivals.local, arrivals_table, calls, timeout_words),
        )

    def packet_regions(self) -> Packets:
        """Argument of every kernel that sends packets."""
        words = self.memory["packets"]
        calls, timeout_words = self.memory["calls"].local, self.memory["guard"].local
        return Packets(words.local, words.pointers, calls, timeout_words, self.part_words)

    def launch(self, exchange: Exchange, x: torch.Tensor, out: torch.Tensor) -> Launch:
        """The launch of an exchange; x and out contiguous."""
        shape = exchange.shape
        arguments: tuple[Any, ...] = (x, out)
        if exchange.in_packets:
            arguments += (self.packet_regions(), exchange.elements)
            plan, num_warps = plan_of(self.num_ranks, shape, x), shape.num_warps_in_packets
        else:
            arguments += (*self.regions(x.dtype), lengths_of(exchange))
            plan = plan_of(self.num_ranks, shape, x, shape.num_chunks)
            num_warps = shape.num_warps
        options = {"plan": plan, "num_warps": num_warps}
        arguments += (exchange.size, self.rank)
        return Launch(exchange.kernel, (shape.num_ctas,), arguments, options)

    def run(self, exchange: Exchange, x: torch.Tensor, out: torch.Tensor) -> None:
        """Launch an exchange; every rank launches the same.

        Raises:
            RankDisagreement: ranks have come with different sizes; of a GPU, told by a later call.
            WaitTimeout: while candidates are tried, when a wait of this call gave up and nobody
                settles such things later.
        """
        shape = exchange.shape
        self.begin(exchange.phases, shape.num_ctas, shape.num_chunks)
        tensors = {"x_ptr": x, "out_ptr": out}
        self.launcher.run((exchange, x.dtype), lambda: self.launch(exchange, x, out), tensors)
        self.timeout_words.end()

    def begin(self, phases: int, num_ctas: int, num_chunks: int) -> None:
        """Prepare for a launch: ``num_ctas`` programs wait in each phase for ``num_chunks`` pieces
        from every peer. Waits that use the guard time out as trials require.

        Raises:
            RankDisagreement: ranks have come to an earlier call with different sizes.
        """
        self.timeout_words.begin()
        self._last = phases, num_ctas, num_chunks

    def reset(self) -> None:
        """Bring all ranks back to the same state after a call that failed on some rank.
        Collective."""
        with self.timeout_words.resetting():
            for region in ("arrivals", "calls", "guard", "packets"):
                self.memory[region].local.zero_()

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""
        self.timeout_words.free()
        self.memory.free()

    def _flags(self, slot: int) -> list[Flags]:
        flags, words = (self.memory[region].local for region in ("arrivals", "packets"))
        return [
            (flags, lambda index: index % self.num_ranks),
            (words, lambda index: index // self.part_words % self.num_ranks),
        ]

    def _late(self, gave_up: Mapping[int, Sequence[int]]) -> tuple[str, int, int]:
        """The word of a packet, or else the first flag, that the last call waited for in vain."""
        assert self._last is not None
        return self._late_word(gave_up[0]) or self._overdue(*self._last)

    def _late_word(self, timeout_words: Sequence[int]) -> tuple[str, int, int] | None:
        """Name, by slot, source rank and place, of a word of a packet that the last call waited for
        in vain, and the tags that it had to have, and has. ``None``: it waited for none."""
        address = timeout_words[FLAG]
        if not address:
            return None
        words, epoch = self.memory["packets"].local, int(self.memory["calls"].local[0]) // MAX_CTAS
        word = int(words.view(-1)[(address - words.data_ptr()) // words.element_size()])
        tag = protocol.tag_number(epoch, size_in(timeout_words[AWAITED]))
        return describe_address(address), tag, (word >> 32) & 0xFFFFFFFF

    def _overdue(self, phases: int, num_ctas: int, num_chunks: int) -> tuple[str, int, int]:
        """The first flag that the last call waited for in vain: its name, what it had to count, and
        what it counts."""
        epoch = int(self.memory["calls"].local[0]) // MAX_CTAS
        expected = epoch * MAX_CHUNKS + num_chunks - 1
        flags = self.memory["arrivals"].local.view(_TURNS, _PHASES, MAX_CTAS, self.num_ranks)
        flags = flags[epoch % _TURNS]
        seen = flags[:phases, :num_ctas] >> SIZE_BITS.value
        late = seen < expected
        late[..., self.rank] = False
        found = late.nonzero()
        if not len(found):
            return "which has arrived since", expected, expected
        phase, program, source = found[0].tolist()
        address = flags[phase, program, source].data_ptr()
        return describe_address(address), expected, int(seen[phase, program, source])
