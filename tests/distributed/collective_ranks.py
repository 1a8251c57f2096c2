"""What every rank does in the tests of the plain collectives, on CPU ranks and on GPUs alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.collective_calls import (
    ALGORITHMS,
    NAN,
    OPS,
    Calls,
    addend,
    algorithm,
    expected_result,
    sum_in_order,
)
from tests.distributed.compiled_ahead import compiled_ahead
from triton_dist.errors import WaitTimeout
from triton_dist.kernels.common.exchange import packets, protocol, sums
from triton_dist.kernels.common.exchange.buffer import MAX_CHUNKS, MAX_CTAS
from triton_dist.kernels.common.peers import flag_count, flag_value
from triton_dist.kernels.nvidia import AllReduceMethod, all_reduce, create_allreduce_ctx
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing.assertions import assert_bitwise_equal
from triton_dist.testing.timing import captured

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROOM = 1 << 16  # bytes of a workspace
# (programs, bytes of a block, pieces): shares of none, one and several blocks.
SHAPES = ((1, 512, 1), (8, 512, 1), (3, 2048, 4), (2, 1024, 16))


def shape(number: int) -> dict[str, int]:
    names = ("num_ctas", "block_bytes", "num_chunks")
    return dict(zip(names, SHAPES[number % len(SHAPES)], strict=True))


@compiled_ahead
def every_size(op: str, dtypes: Sequence[torch.dtype] = DTYPES, turns: int = 2) -> int:
    """Ways x dtypes x sizes x shapes of the launch, whole vectors and not; in each turn a size has
    another shape."""
    calls = Calls(op, ROOM)
    for name in ALGORITHMS[op]:
        for dtype in dtypes:
            for number, elements in enumerate((1, 7, 128, 1000, 1024, 2047)):
                for turn in range(turns):
                    calls(
                        elements, dtype, misaligned=(number + turn) % 3 == 2,
                        **algorithm(op, name), **shape(number + turn),
                    )  # fmt: skip
    return calls.finish()


@compiled_ahead
def back_to_back(op: str, rounds: int) -> int:
    """Different calls one after another in two contexts; nothing lines the ranks up in between."""
    first, second = Calls(op, ROOM), Calls(op, ROOM)
    for number in range(rounds):
        name = ALGORITHMS[op][number % len(ALGORITHMS[op])]
        first(1 + 613 * number % 2000, **algorithm(op, name), **shape(number))
        if number % 3 == 0:
            second(1 + number, torch.float32, **algorithm(op, name), **shape(number + 1))
        if number % 5 == 0:
            first(64, **algorithm(op, "collective"))
    return first.finish() + second.finish()


@compiled_ahead
def in_place_and_large() -> int:
    """Sums that replace x, and sums that take several launches."""
    calls = Calls("all_reduce", 4096)
    for name in ALGORITHMS["all_reduce"]:
        for elements in (5, 2048, 4097):  # the last of three launches sums one
            calls(elements, in_place=True, num_ctas=2, **algorithm("all_reduce", name))
        calls(1025, torch.float32, num_ctas=2, **algorithm("all_reduce", name))
    calls(77, in_place=True, **algorithm("all_reduce", "collective"))
    return calls.finish()


@compiled_ahead
def large_in_one_shot(elements: int) -> int:
    """A sum of more bf16 than many ranks take in one launch, which two do."""
    calls = Calls("all_reduce", 2 * elements)
    calls(elements, num_ctas=64, block_bytes=16384, **algorithm("all_reduce", "one_shot"))
    in_a_launch = calls.ctx.chunk_elements(AllReduceMethod.ONE_SHOT, 2)
    assert (in_a_launch == elements) == (dist.get_world_size() == 2)
    return calls.finish()


@compiled_ahead
def stragglers(op: str) -> int:
    """Each rank in turn is late: on its stream within a call, and on the host before one."""
    cycles = 50_000_000  # 30 ms on a GPU, and on CPU ranks
    calls = Calls(op, ROOM)
    for late in range(dist.get_world_size()):
        for name in ALGORITHMS[op]:
            calls(1000, straggler_option=(late, cycles), **algorithm(op, name), **shape(late))
        if dist.get_rank() == late:
            time.sleep(0.05)
        calls(300, **algorithm(op, ALGORITHMS[op][0]), **shape(late))
    return calls.finish()


def late_readers(op: str) -> int:
    """One rank, by turns, sleeps between its waits and its reads (in packets, which are both:
    before), while the others may go on to the next call: what it has yet to read is not
    overwritten. Only interpreted kernels can sleep."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = [name for name in ALGORITHMS[op] if name != "copy_engine"]
    calls = Calls(op, ROOM)
    flags, lines, late = protocol.await_peers, packets.await_lines, [0]

    def sleep(seconds: float) -> None:
        time.sleep(seconds if rank == late[0] else 0.0)

    def wait_and_sleep(*args: Any) -> Any:
        token = flags(*args)
        sleep(0.1)
        return token

    def sleep_and_wait(*args: Any) -> Any:
        sleep(0.1)
        return lines(*args)

    protocol.await_peers = sums.await_peers = wait_and_sleep
    packets.await_lines = sleep_and_wait
    for number in range(4 * len(names)):
        late[0] = number // 2 % size
        calls(300, num_ctas=1, **algorithm(op, names[number % len(names)]))
    return calls.finish()


@compiled_ahead
def poisoned(rounds: int) -> int:
    """What peers write to is overwritten between calls, when no rank is in one: nothing of a call
    before is read."""
    count = 0
    for op in OPS:
        calls = Calls(op, ROOM)
        for number in range(rounds):
            for name in ALGORITHMS[op]:
                calls(500 + number, **algorithm(op, name), **shape(number))
            current_device().synchronize()
            dist.barrier()
            calls.poison()
            dist.barrier()
        count += calls.finish()
    return count


def same_bits(rounds: int) -> int:
    """Every algorithm and shape gives the bits of a sum in the order of ranks, on every rank,
    whichever rank is late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = 0
    with create_allreduce_ctx(ROOM, rank, size, size) as ctx:
        for number in range(rounds):
            parts = [addend(100 * number + peer, 1111, torch.bfloat16) for peer in range(size)]
            for name in ALGORITHMS["all_reduce"]:
                late = (number % size, 10_000_000)
                options = algorithm("all_reduce", name) | shape(number)
                result = all_reduce.fn(parts[rank], ctx, straggler_option=late, **options)
                current_device().synchronize()
                assert_bitwise_equal(result, sum_in_order(parts))
                seen += 1
    return seen


@compiled_ahead
def every_config(op: str, elements: int = 3000) -> int:
    """Every candidate of the tuner, and the defaults of those that are not given."""
    calls = Calls(op, ROOM)
    for config in calls.op.config_space:
        arguments = dict(config)
        if current_device().name == "cpu" and arguments.get("num_ctas", 0) > 4:
            arguments["num_ctas"] = 4  # the interpreter's programs that have nothing to do
        calls(elements, **arguments)
    calls(elements)
    calls(elements, tuned=True, autotune=False)
    return calls.finish()


def tuned(op: str) -> tuple[int, int]:
    """Tuned calls of two sizes, of an all-reduce in place; (tunings, checked calls)."""
    calls = Calls(op, ROOM)
    before = calls.op.tuning_count
    for _ in range(3):
        calls(400, tuned=True, in_place=op == "all_reduce")
        calls(33, torch.float32, tuned=True)
    return calls.op.tuning_count - before, calls.finish()


def tuned_for_a_method() -> list[str]:
    """What a method that the caller names is tuned to."""
    calls = Calls("all_reduce", ROOM)
    found = []
    for method in (AllReduceMethod.OneShot, AllReduceMethod.TwoShot, AllReduceMethod.DoubleTree):
        calls(512, tuned=True, method=method)
        x = torch.zeros(512, dtype=torch.float16, device=current_device().torch_device)
        found.append(calls.op.best_config(x, calls.ctx, method=method)["algorithm"])
    calls.finish()
    return found


def in_groups(members: Sequence[Sequence[int]]) -> int:
    """Disjoint groups at once, each with contexts of its own."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    count = 0
    for op in OPS:
        calls = Calls(op, ROOM, group=groups[mine])
        for number in range(3):
            name = ALGORITHMS[op][number % len(ALGORITHMS[op])]
            calls(100 + mine + number, **algorithm(op, name), **shape(number))
        calls(10, **algorithm(op, "collective"))
        count += calls.finish()
    return count


def calls_without_end(op: str) -> tuple[int, int]:
    """Past what 32 bits can count: (the number that the calls got to, checked calls)."""
    calls = Calls(op, ROOM)
    before = 2**33 - 3
    memory = calls.ctx.buffer.memory
    memory["calls"].local.fill_(before * MAX_CTAS)
    memory["arrivals"].local.fill_(before * MAX_CHUNKS)
    current_device().synchronize()
    dist.barrier()
    for number in range(6):
        names = [
            name for name in ALGORITHMS[op] if name != "copy_engine"
        ]  # which has epochs of its own
        calls(700, **algorithm(op, names[number % len(names)]), **shape(number))
    count = calls.check()
    reached = int(memory["calls"].local[0])
    assert reached % MAX_CTAS == 0
    calls.ctx.finalize()
    return reached // MAX_CTAS - before, count


def pushed_epochs_wrap_around(op: str) -> int:
    """Flags and epochs of what copy engines push pass the largest of 32 bits."""
    calls, nearly = Calls(op, ROOM), 2**31 - 3
    memory = calls.ctx.pushed.slots.memory
    for flags in ("arrivals0", "arrivals1", "consumed0", "consumed1"):
        memory[flags].local.fill_(nearly if "consumed" in flags else flag_value(nearly, 700))
    # The present use, after `nearly`.
    counts = memory["epoch"].local[:, 0].fill_(flag_value(nearly + 1, 0))
    current_device().synchronize()
    dist.barrier()
    for number in range(6):
        calls(700, **algorithm(op, "copy_engine"), **shape(number))
    count = calls.check()
    assert flag_count(int(counts.min())) > 2**31
    calls.ctx.finalize()
    return count


def replayed(op: str, rounds: int) -> int:
    """Calls captured in CUDA graphs and replayed, several times one graph, beside calls that are
    not; fresh data each time. CPU ranks capture nothing: they call again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    eager, calls = Calls(op, ROOM), Calls(op, ROOM)
    x = addend(1, 240 * size, torch.float16)
    results = []
    outputs: dict[str, torch.Tensor] = {}

    def call_of(name: str) -> Callable[[], object]:
        def call() -> None:
            outputs[name] = calls.op.fn(x, calls.ctx, num_ctas=4, **algorithm(op, name))

        return captured(call)

    replays = {name: call_of(name) for name in ALGORITHMS[op]}
    for turn in range(rounds):
        for number, (name, replay) in enumerate(replays.items()):
            for again in range(2):
                seed = 1000 * turn + 100 * number + 10 * again
                parts = [addend(seed + peer, x.numel(), torch.float16) for peer in range(size)]
                x.copy_(parts[rank])
                replay()
                x.fill_(NAN)
                results.append((outputs[name].clone(), expected_result(op, parts, rank)))
            calls.op.fn(x, calls.ctx, num_ctas=4, **algorithm(op, ALGORITHMS[op][0]))
        eager(200 + turn, num_ctas=4, **algorithm(op, ALGORITHMS[op][1]))
    current_device().synchronize()
    for result, expected in results:
        assert_bitwise_equal(result, expected)
    calls.finish()
    return len(results) + eager.finish()


def give_up_and_start_again(op: str) -> list[str]:
    """Rank 0 calls alone, with a limit on its waits; after a reset all ranks call again."""
    overdue = []
    calls = Calls(op, ROOM)
    calls(300)
    calls.check()
    for name in ALGORITHMS[op]:
        for number in range(2):
            options = algorithm(op, name) | shape(2 * number)
            if dist.get_rank() == 0:
                try:
                    with bounded_waits(0.2):
                        calls(300, **options)
                except WaitTimeout as error:
                    overdue.append(error.flag.split("[")[0])
            else:
                calls.skip()
            dist.barrier()
            calls.ctx.reset()
            for elements in (5, 300, 1111):
                calls(elements, **options)
    calls.finish()
    return overdue


@compiled_ahead
def large_calls(rounds: int) -> int:
    """Sizes that keep a whole GPU and its links busy; too much for the interpreter."""
    count = 0
    for op in OPS:
        calls = Calls(op, 64 << 20)
        for number in range(rounds):
            name = ALGORITHMS[op][number % len(ALGORITHMS[op])]
            turn = number // len(ALGORITHMS[op]) % 3
            options = {"num_ctas": (16, 64, 128)[turn], "block_bytes": 16384}
            calls(
                (1 << 20) + 997 * (number % 4), torch.bfloat16,
                num_chunks=(1, 4, 8)[turn] if name != "one_shot" else 1,
                straggler_option=(number % dist.get_world_size(), 1_000_000),
                **algorithm(op, name), **options,
            )  # fmt: skip
        count += calls.finish()
    return count
