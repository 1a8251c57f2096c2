"""Symmetric memory for exchanges (kernels that send shards to peers), and launch parameters."""

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
from triton_dist.kernels.common.peers import AWAITED, FLAG, Disagreements, Flags, TimeoutWords
from triton_dist.language.signals import CALL_TAG_BITS
from triton_dist.runtime import symmetric
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.device import current_device
from triton_dist.runtime.garbage import weak_method
from triton_dist.runtime.launch import Launch, Launcher
from triton_dist.runtime.ranks import group_for

MAX_CTAS: int = protocol.MAX_CTAS.value
MAX_CHUNKS: int = protocol.MAX_CHUNKS.value
VECTOR_BYTES = 16
LINE_BYTES: int = protocol.LINE_BYTES.value
TUNABLES = ("num_ctas", "block_bytes", "num_chunks")
_SHARD_ALIGNMENT: int = protocol.SHARD_ALIGNMENT.value
_PACKET_ALIGNMENT: int = protocol.PACKET_ALIGNMENT.value
_LINE_WORDS: int = protocol.LINE_WORDS.value
_NUM_SLOTS, _MAX_PHASES = 2, protocol.MAX_PHASES.value
_WORDS_PER_LINE = 16  # int64 words in a 128-byte line
VECTOR_ELEMENTS = 16  # Triton compiles vector accesses for sizes that are multiples of 16.


@dataclass(frozen=True)
class LaunchParams:
    """Parameters of a launch.

    Attributes:
        num_ctas: number of programs, at most ``MAX_CTAS``.
        block_bytes: bytes that a program moves at a time, a power of two, at least 512.
        num_chunks: number of chunks into which a program's blocks are divided, at most
            ``MAX_CHUNKS``. A program sends one chunk while it waits for another.
    """

    num_ctas: int
    block_bytes: int
    num_chunks: int = 1

    @property
    def tunable_values(self) -> tuple[int, int, int]:
        """Values of the parameters in the order of ``TUNABLES``."""
        return self.num_ctas, self.block_bytes, self.num_chunks

    @property
    def num_warps(self) -> int:
        """Warps of a launch: one 16-byte vector per thread, up to 16 warps."""
        return max(1, min(16, self.block_bytes // (32 * VECTOR_BYTES)))

    @property
    def num_warps_in_packets(self) -> int:
        """Warps of a launch with packets: one line (8 bytes of data) per thread, up to 32 warps.
        More lines per thread would require shared memory."""
        return max(1, min(32, self.block_bytes // (32 * LINE_BYTES)))


DEFAULT_PARAMS = LaunchParams(32, 8192)
SMALL_PARAMS = (
    *(LaunchParams(ctas, 2048) for ctas in (8, 16, 32, 64)),
    *(LaunchParams(ctas, 8192) for ctas in (16, 32, 64, 128)),
)
"""For few bytes, where latency determines the time of a call."""
LARGE_PARAMS = tuple(
    LaunchParams(ctas, 16384, chunks) for ctas in (32, 64, 128) for chunks in (1, 4, 8)
)
"""For many bytes, where the number of bytes in flight determines the time of a call."""


def params_from_config(config: Mapping[str, Any]) -> LaunchParams:
    return LaunchParams(config["num_ctas"], config["block_bytes"], config.get("num_chunks", 1))


def params_for_device(params: LaunchParams = DEFAULT_PARAMS) -> LaunchParams:
    """Return ``params``; in the interpreter, with at most as many programs as run concurrently."""
    device = current_device()
    if not device.interprets:
        return params
    return replace(params, num_ctas=min(params.num_ctas, device.num_sms))


def small_params(nbytes: int) -> LaunchParams:
    """Return the first of ``SMALL_PARAMS`` whose grid moves ``nbytes`` in one block per program, or
    else the last."""
    sufficient = (each for each in SMALL_PARAMS if each.num_ctas * each.block_bytes >= nbytes)
    return params_for_device(next(sufficient, SMALL_PARAMS[-1]))


@functools.cache
def checked_params(
    function: str,
    num_ctas: int | None,
    block_bytes: int | None,
    num_chunks: int | None,
    default: LaunchParams = DEFAULT_PARAMS,
    max_ctas: int = MAX_CTAS,
) -> LaunchParams:
    """Return the parameters that a caller passed; ``default`` has the values for ``None``.

    ``function`` is the name of the caller's function, for errors.
    """
    passed = {"num_ctas": num_ctas, "block_bytes": block_bytes, "num_chunks": num_chunks}
    changes = {name: n for name, n in passed.items() if n is not None}
    params = replace(params_for_device(default), **changes)
    if params.num_ctas not in range(1, max_ctas + 1):
        raise InvalidArgument(function, "num_ctas", params.num_ctas, f"1 to {max_ctas}")
    if not isinstance(nbytes := params.block_bytes, int) or nbytes < 512 or nbytes & (nbytes - 1):
        raise InvalidArgument(function, "block_bytes", nbytes, "a power of two, at least 512")
    if params.num_chunks not in range(1, MAX_CHUNKS + 1):
        raise InvalidArgument(function, "num_chunks", params.num_chunks, f"1 to {MAX_CHUNKS}")
    return params


def is_worth_trying(params: LaunchParams, shard_bytes: int) -> bool:
    """Return whether a shard of ``shard_bytes`` has a block for more than half of the chunks of all
    programs. Otherwise half as many programs send the same blocks at the same time.

    The smallest parameters are always worth trying, so that at least one config is left.
    """
    blocks = -(-shard_bytes // params.block_bytes)
    return params == SMALL_PARAMS[0] or 2 * blocks > params.num_ctas * params.num_chunks


@dataclass(frozen=True)
class Exchange:
    """Description of one launch of an exchange kernel.

    Attributes:
        shard_numel, numel: number of elements of a shard and of the full tensor.
        call_tag: number computed from the sizes of the call. Flags contain the call tag. Ranks
            raise if their call tags differ.
        num_phases: how often a program waits for flags of every peer, per chunk.
        in_packets: whether the kernel sends packets (``exchange/packets.py``) instead of flags.
    """

    kernel: Any
    shard_numel: int
    numel: int
    params: LaunchParams
    call_tag: int
    num_phases: int = 1
    in_packets: bool = False


def padded_shard_numel(numel: int) -> int:
    """Return the number of elements that a shard of ``numel`` elements occupies in a slot."""
    return -(-numel // _SHARD_ALIGNMENT) * _SHARD_ALIGNMENT


def padded_shard_bytes(nbytes: int, num_ranks: int) -> int:
    """Return the bytes that a shard of ``nbytes / num_ranks`` bytes occupies, for any dtype."""
    return max(padded_shard_numel(-(-nbytes // (item * num_ranks))) * item for item in (2, 4))


def slot_bytes_for_shards(shard_numel: int, dtype: torch.dtype, num_ranks: int) -> int:
    """Return the bytes of a slot for a shard of each rank; at least 1."""
    nbytes = num_ranks * padded_shard_numel(shard_numel) * dtype.itemsize
    return max(1, nbytes) if num_ranks > 1 else 1


def exchange_lengths(exchange: Exchange) -> Lengths:
    stride = padded_shard_numel(exchange.shard_numel)
    return Lengths(exchange.shard_numel, stride, exchange.numel)


def make_plan(num_ranks: int, params: LaunchParams, x: torch.Tensor, num_chunks: int = 1) -> Plan:
    lanes = triton.next_power_of_2(num_ranks)
    return Plan(num_ranks, lanes, params.block_bytes // x.element_size(), num_chunks)


def reduce_scatter_exchange(
    addend: torch.Tensor, num_ranks: int, params: LaunchParams
) -> tuple[Exchange, torch.Tensor]:
    """Describe the launch that sums ``addend`` [M, N] over ranks.

    Also return a new tensor for this rank's rows of the sum.
    """
    M, N = addend.shape
    rows = addend.new_empty((M // num_ranks, N))
    return Exchange(kernel_reduce_scatter, M // num_ranks * N, M * N, params, M), rows


def all_gather_exchange(
    shard: torch.Tensor,
    num_ranks: int,
    params: LaunchParams,
    call_tag: int,
    rows: torch.Tensor | None = None,
) -> tuple[Exchange, torch.Tensor]:
    """Describe the launch that gathers ``shard`` [m, N] of all ranks; also return its result.

    The result is written to ``rows`` [m * num_ranks, N], or to a new tensor. Flags contain
    ``call_tag``, which ranks compare.
    """
    if rows is None:
        rows = shard.new_empty((shard.shape[0] * num_ranks, shard.shape[1]))
    return Exchange(kernel_all_gather, shard.numel(), rows.numel(), params, call_tag), rows


class ExchangeBuffer:
    """Memory of exchanges: two slots that peers write to, and their flags. Creation is collective.

    The protocol is in ``exchange/protocol.py``. On each rank:

        slots uint8 [2 * slot_bytes]: shards and sums of the last two calls, written by peers.
        arrivals int64 [slot, phase, program, source rank]: flags, written by kernels of the source.
        packets int64 [packet_slots, source rank, shard_words]: written by kernels of the source.
        calls int64 [16]: word 0 is the call counter. Expert parallelism also uses words 1 to 3.
        timeout_words int64 [16]: see ``language.wait``.

    Args:
        slot_bytes: bytes of one slot.
        name: name of the memory, for errors.
        packet_bytes: bytes of the largest tensor that is sent in packets. Packets have separate
            slots, because other data could look like packets.
        packet_slots: number of slots for packets; 2, unless several programs read one word.
        disagreements: collects calls with different call tags. Pass one object to all memories of a
            context; by default this memory has its own.
        regions: shapes and dtypes of further symmetric regions, by name.
    """

    def __init__(
        self,
        slot_bytes: int,
        group: dist.ProcessGroup | None,
        name: str,
        packet_bytes: int = 0,
        disagreements: Disagreements | None = None,
        regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
        packet_slots: int = 2,
    ) -> None:
        ranks, self.device = group_for(group), current_device()
        self.rank, self.num_ranks = ranks.rank, ranks.size
        alignment = 4 * _SHARD_ALIGNMENT  # so that a slot holds full shards of every dtype
        self.slot_bytes = -(-slot_bytes // alignment) * alignment
        words = max(1, -(-packet_bytes // LINE_BYTES)) * _LINE_WORDS
        self.shard_words = -(-words // _PACKET_ALIGNMENT) * _PACKET_ALIGNMENT
        self.memory = symmetric.allocate(
            name,
            {
                "slots": ((2 * self.slot_bytes,), torch.uint8),
                "arrivals": ((_NUM_SLOTS * _MAX_PHASES * MAX_CTAS * self.num_ranks,), torch.int64),
                "calls": ((_WORDS_PER_LINE,), torch.int64),
                "timeout_words": ((_WORDS_PER_LINE,), torch.int64),
                "packets": ((packet_slots, self.num_ranks, self.shard_words), torch.int64),
                **(regions or {}),
            },
            group,
        )
        # Both address tables share one cache line, so that one load fetches both.
        self._tables = torch.cat(
            [self.memory[region].pointers for region in ("slots", "arrivals")]
        ).split(self.num_ranks)
        self.launcher = Launcher()
        self.disagreements = disagreements or Disagreements(f"the elements of x in {name}", group)
        timeout_words = self.memory["timeout_words"].local.view(1, _WORDS_PER_LINE)
        self.timeout_words = TimeoutWords(
            name, "a kernel of a collective", timeout_words, 0, _MAX_PHASES,
            weak_method(self._find_late_flag), weak_method(self._flags), self.disagreements, ranks,
        )  # fmt: skip
        self._last_call: tuple[int, int, int] | None = None

    def regions(self, dtype: torch.dtype) -> tuple[Slots, Peers]:
        """Return the kernel arguments ``slots``, viewed as ``dtype``, and ``peers``."""
        slots, arrivals = self.memory["slots"], self.memory["arrivals"]
        slots_table, arrivals_table = self._tables
        calls, timeout_words = self.memory["calls"].local, self.memory["timeout_words"].local
        return (
            Slots(slots.local.view(dtype), slots_table, self.slot_bytes // dtype.itemsize),
            Peers(arrivals.local, arrivals_table, calls, timeout_words),
        )

    def packet_regions(self) -> Packets:
        words = self.memory["packets"]
        calls, timeout_words = self.memory["calls"].local, self.memory["timeout_words"].local
        return Packets(words.local, words.pointers, calls, timeout_words, self.shard_words)

    def launch(self, exchange: Exchange, x: torch.Tensor, out: torch.Tensor) -> Launch:
        """Return the launch of an exchange; x and out are contiguous."""
        params = exchange.params
        arguments: tuple[Any, ...] = (x, out)
        if exchange.in_packets:
            arguments += (self.packet_regions(), exchange_lengths(exchange))
            plan, num_warps = make_plan(self.num_ranks, params, x), params.num_warps_in_packets
        else:
            arguments += (*self.regions(x.dtype), exchange_lengths(exchange))
            plan = make_plan(self.num_ranks, params, x, params.num_chunks)
            num_warps = params.num_warps
        arguments += (exchange.call_tag, self.rank)
        options = {"plan": plan, "num_warps": num_warps}
        return Launch(exchange.kernel, (params.num_ctas,), arguments, options)

    def run(self, exchange: Exchange, x: torch.Tensor, out: torch.Tensor) -> None:
        """Launch an exchange. Every rank must launch an equal exchange.

        Raises:
            RankDisagreement, WaitTimeout: see ``TimeoutWords.end_call``.
        """
        params = exchange.params
        self.begin(exchange.num_phases, params.num_ctas, params.num_chunks)
        tensors = {"x_ptr": x, "out_ptr": out}
        self.launcher.run((exchange, x.dtype), lambda: self.launch(exchange, x, out), tensors)
        self.timeout_words.end_call()

    def begin(self, num_phases: int, num_ctas: int, num_chunks: int) -> None:
        """Prepare a launch in which ``num_ctas`` programs wait in each phase for ``num_chunks``
        chunks of every peer."""
        self.timeout_words.begin_call()
        self._last_call = num_phases, num_ctas, num_chunks

    def repeat(self, launch: Launch, num_ctas: int = 1, num_chunks: int = 1) -> None:
        """Launch a kernel in which ``num_ctas`` programs wait for ``num_chunks`` chunks of every
        peer."""
        self.begin(1, num_ctas, num_chunks)
        self.launcher.repeat(launch)
        self.timeout_words.end_call()

    def reset(self) -> None:
        with self.timeout_words.resetting():
            for region in ("arrivals", "calls", "timeout_words", "packets"):
                self.memory[region].local.zero_()

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""
        self.timeout_words.free()
        self.memory.free()

    def _flags(self, slot: int) -> list[Flags]:
        flags, words = (self.memory[region].local for region in ("arrivals", "packets"))
        return [
            (flags, lambda index: index % self.num_ranks),
            (words, lambda index: index // self.shard_words % self.num_ranks),
        ]

    def _find_late_flag(self, gave_up: Mapping[int, Sequence[int]]) -> tuple[str, int, int]:
        assert self._last_call is not None
        return self._late_packet(gave_up[0]) or self._late_flag(*self._last_call)

    def _late_packet(self, timeout_words: Sequence[int]) -> tuple[str, int, int] | None:
        """Return (name, expected tag, seen tag) of the late packet of the last call, if any."""
        address = timeout_words[FLAG]
        # Only waits for packets store the address of the late word.
        if not address:
            return None
        words = self.memory["packets"].local
        word = int(words.view(-1)[(address - words.data_ptr()) // words.element_size()])
        return describe_address(address), timeout_words[AWAITED], (word >> 32) & 0xFFFFFFFF

    def _late_flag(self, num_phases: int, num_ctas: int, num_chunks: int) -> tuple[str, int, int]:
        """Return (name, expected count, seen count) of the first late flag of the last call."""
        epoch = int(self.memory["calls"].local[0]) // MAX_CTAS
        expected = epoch * MAX_CHUNKS + num_chunks - 1
        flags = self.memory["arrivals"].local.view(
            _NUM_SLOTS, _MAX_PHASES, MAX_CTAS, self.num_ranks
        )
        flags = flags[epoch % _NUM_SLOTS]
        # The low bits of a flag are the call tag.
        seen = flags[:num_phases, :num_ctas] >> CALL_TAG_BITS.value
        late = seen < expected
        late[..., self.rank] = False
        positions = late.nonzero()
        if not len(positions):
            return "(it has arrived since)", expected, expected
        phase, program, source = positions[0].tolist()
        address = flags[phase, program, source].data_ptr()
        return describe_address(address), expected, int(seen[phase, program, source])
