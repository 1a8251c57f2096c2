"""Scenarios of ranks for the plain collectives alone, on CPU ranks and on GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.distributed.calls import DTYPES
from tests.distributed.collective_calls import (
    COLLECTIVES,
    ROOM,
    AllReduce,
    Collective,
    addend,
    shape,
    sum_in_order,
)
from tests.distributed.compiled_ahead import compiled_ahead
from triton_dist.kernels.common.exchange import packets, protocol, sums
from triton_dist.kernels.common.exchange.buffer import MAX_CHUNKS, MAX_CTAS
from triton_dist.kernels.nvidia import AllReduceMethod, all_reduce, create_allreduce_ctx
from triton_dist.runtime.device import current_device
from triton_dist.testing.assertions import assert_bitwise_equal


@compiled_ahead
def every_size(
    kind: type[Collective], dtypes: Sequence[torch.dtype] = DTYPES, turns: int = 2
) -> int:
    """Call each algorithm with each dtype and size, aligned or not; each turn has other shapes."""
    calls = kind()
    for algorithm in kind.algorithms:
        for dtype in dtypes:
            for number, elements in enumerate((1, 7, 1024, 2047)):
                for turn in range(turns):
                    calls(
                        elements, dtype=dtype, misaligned=(number + turn) % 3 == 2,
                        **algorithm, **shape(number + turn),
                    )  # fmt: skip
    return calls.finish()


@compiled_ahead
def in_place_and_large() -> int:
    """Replace x by the sum, and sum in several launches."""
    calls = AllReduce(4096)
    for algorithm in AllReduce.algorithms:
        for elements in (5, 2048, 4097):  # the last of three launches sums one element
            calls(elements, in_place=True, num_ctas=2, **algorithm)
        calls(1025, dtype=torch.float32, num_ctas=2, **algorithm)
    calls(77, in_place=True, algorithm="collective")
    return calls.finish()


@compiled_ahead
def large_in_one_shot(elements: int) -> int:
    """Sum more bf16 than many ranks can in one launch; two ranks need one launch."""
    calls = AllReduce(2 * elements)
    calls(elements, num_ctas=64, block_bytes=16384, **AllReduce.algorithm("one_shot"))
    in_a_launch = calls.ctx.chunk_elements(AllReduceMethod.ONE_SHOT, 2)
    assert (in_a_launch == elements) == (dist.get_world_size() == 2)
    return calls.finish()


def late_readers(kind: type[Collective]) -> int:
    """Let one rank in turn sleep between its waits and its reads while the others continue.

    Packets are waited for and read together, so the rank sleeps before. Data that a rank has yet to
    read must not be overwritten. Only interpreted kernels can sleep.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    algorithms = [kind.algorithm(name) for name in kind.names if name != "copy_engine"]
    calls = kind()
    flags, lines, late = protocol.await_peers, packets.await_lines, [0]

    def sleep() -> None:
        time.sleep(0.1 if rank == late[0] else 0.0)

    def wait_and_sleep(*args: Any) -> Any:
        token = flags(*args)
        sleep()
        return token

    def sleep_and_wait(*args: Any) -> Any:
        sleep()
        return lines(*args)

    with ExitStack() as patches:
        for module, name, patch in (
            (protocol, "await_peers", wait_and_sleep),
            (sums, "await_peers", wait_and_sleep),
            (packets, "await_lines", sleep_and_wait),
        ):
            patches.enter_context(mock.patch.object(module, name, patch))
        for number in range(4 * len(algorithms)):
            late[0] = number // 2 % size
            calls(300, num_ctas=1, **algorithms[number % len(algorithms)])
    return calls.finish()


@compiled_ahead
def poisoned(rounds: int) -> int:
    """Overwrite memory that peers write between calls, so that old data would be noticed."""
    count = 0
    for kind in COLLECTIVES.values():
        calls = kind()
        for number in range(rounds):
            for algorithm in kind.algorithms:
                calls(500 + number, **algorithm, **shape(number))
            current_device().synchronize()
            dist.barrier()
            calls.poison()
            current_device().synchronize()
            dist.barrier()
        count += calls.finish()
    return count


def same_bits(rounds: int) -> int:
    """Compare each algorithm and shape with the sum in the order of ranks, to the bit, on every
    rank, whichever rank is late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = 0
    with create_allreduce_ctx(ROOM, rank, size, size) as ctx:
        for number in range(rounds):
            parts = [addend(100 * number + peer, 1111, torch.bfloat16) for peer in range(size)]
            late = (number % size, 10_000_000)
            for algorithm in AllReduce.algorithms:
                options = {**algorithm, **shape(number)}
                result = all_reduce.fn(parts[rank], ctx, straggler_option=late, **options)
                current_device().synchronize()
                assert_bitwise_equal(result, sum_in_order(parts))
                seen += 1
    return seen


def calls_without_end(kind: type[Collective]) -> tuple[int, int]:
    """Count calls beyond 32 bits; return the difference of the count and the number of calls."""
    calls = kind()
    before = 2**33 - 3
    memory = calls.ctx.buffer.memory
    memory["calls"].local.fill_(before * MAX_CTAS)
    memory["arrivals"].local.fill_(before * MAX_CHUNKS)
    current_device().synchronize()
    dist.barrier()
    names = [name for name in kind.names if name != "copy_engine"]  # which has its own epochs
    for number in range(6):
        calls(700, **kind.algorithm(names[number % len(names)]), **shape(number))
    count = calls.check()
    reached = int(memory["calls"].local[0])
    assert reached % MAX_CTAS == 0
    calls.ctx.finalize()
    return reached // MAX_CTAS - before, count


@compiled_ahead
def large_calls(rounds: int) -> int:
    """Use sizes that keep a whole GPU and its links busy; too large for the interpreter."""
    count = 0
    for kind in COLLECTIVES.values():
        calls = kind(64 << 20)
        for number in range(rounds):
            name = kind.names[number % len(kind.names)]
            turn = number // len(kind.names) % 3
            calls(
                (1 << 20) + 997 * (number % 4), dtype=torch.bfloat16,
                num_ctas=(16, 64, 128)[turn], block_bytes=16384,
                num_chunks=(1, 4, 8)[turn] if name != "one_shot" else 1,
                straggler_option=(number % dist.get_world_size(), 1_000_000),
                **kind.algorithm(name),
            )  # fmt: skip
        count += calls.finish()
    return count
