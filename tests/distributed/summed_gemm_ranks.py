"""What every rank does in the tests of ops that sum products over ranks, on CPU ranks and on GPUs
alike; ``kind`` says which op."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist

from tests.distributed.ag_gemm_calls import LAYOUTS, NAN, default_tiles, some_configs, uniform
from tests.distributed.compiled_ahead import compiled_ahead
from tests.distributed.held_multiprocessors import held_multiprocessors
from tests.distributed.summed_gemm_calls import Algorithm, SummedCalls
from triton_dist.errors import WaitTimeout
from triton_dist.kernels.common.peers import flag_count, flag_value
from triton_dist.kernels.common.scatter import algorithms as scatter_algorithms
from triton_dist.kernels.common.scatter.partials import MAX_CHUNKS
from triton_dist.kernels.common.slots import epochs
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing.assertions import assert_allclose, assert_bitwise_equal
from triton_dist.testing.opinfo.base import tolerance
from triton_dist.testing.timing import captured

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Kind: TypeAlias = type[SummedCalls]


@compiled_ahead
def every_algorithm(kind: Kind, turns: int) -> int:
    """Ways x kernels, every other call with a bias and the next turn's without, M changing from
    call to call: no multiples of anything, row blocks that are short or empty, tiles that are
    clipped."""
    calls = kind(max_rows=kind.every_rows[0], columns=72, K=72, **kind.options)
    rows = itertools.cycle(kind.every_rows)
    for turn in range(turns):
        for number, algorithm in enumerate(kind.algorithms, turn):
            for persistent in (True, False):
                has_bias = persistent is (number % 2 == 0)
                calls(next(rows), persistent=persistent, has_bias=has_bias, **algorithm)
    return calls.finish()


@compiled_ahead
def every_operand(
    kind: Kind, dtypes: Sequence[torch.dtype] = DTYPES, first: int = 0, step: int = 1
) -> int:
    """Dtypes x sizes x layouts of B x kernels, and layouts of A; of the four sizes, every ``step``
    from the ``first`` on."""
    count = 0
    # An odd K, or an odd N, cannot be read or written through descriptors.
    shapes = ((72, 72), (24, 16), (65, 33), (1, 1))
    for dtype in dtypes:
        sizes = list(zip(kind.operand_algorithms, shapes, strict=True))
        for (rows, algorithms), (columns, K) in sizes[first::step]:
            calls = kind(rows, columns, K, dtype)
            for layout, algorithm in zip(LAYOUTS, itertools.cycle(kind.layout_algorithms)):
                calls(rows, layout, **algorithm)
            calls(rows, "column-major", persistent=False)
            for number, a_layout in enumerate(("column-major", "misaligned slice", "every second")):
                calls(rows, a_layout=a_layout, **algorithms[number % len(algorithms)])
            count += calls.finish()
    return count


@compiled_ahead
def back_to_back(kind: Kind, rounds: int) -> int:
    """Different calls one after another on two contexts; nothing lines the ranks up in between."""
    first = kind(max_rows=kind.many, columns=72, K=72, **kind.options)
    second = kind(max_rows=8, columns=65, K=33, dtype=torch.float32)
    algorithms, tiled = kind.algorithms, kind.tiled
    for number in range(rounds):
        rows = 1 + 13 * number % kind.many
        first(rows, **algorithms[number % len(algorithms)], persistent=number % 4 > 0)
        if number % 3 == 0:
            second(1 + number % 8, **tiled[number % len(tiled)])
    return first.finish() + second.finish()


@compiled_ahead
def stragglers(kind: Kind) -> int:
    """Each rank in turn is late: on its stream within a call, and on the host before one."""
    cycles = 50_000_000  # 30 ms on a GPU, and on CPU ranks
    calls = kind(max_rows=kind.many, columns=72, K=72, **kind.options)
    for late in range(dist.get_world_size()):
        for algorithm in kind.algorithms:
            calls(kind.many, straggler_option=(late, cycles), **algorithm)
        if dist.get_rank() == late:
            time.sleep(0.05)
        calls(11, **kind.algorithms[late % len(kind.algorithms)])
    return calls.finish()


def same_bits(kind: Kind, rounds: int) -> int:
    """The same operands again and again, another rank late each time: the same bits, which are
    those of the rounded parts added in fp32 in the order of ranks, then the bias."""
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = kind(max_rows=kind.many, columns=72, K=72)
    device, count = current_device(), 0
    B = torch.eye(72, dtype=torch.float16).to(device.torch_device)
    shape, mine = (kind.rows_of_a(kind.many, size), 72), kind.own_rows(kind.many, rank)
    for turn in range(rounds):
        parts = [uniform(10 * turn + peer, shape, torch.float16) for peer in range(size)]
        bias = None
        if turn % 2:
            bias = uniform(10 * turn + 9 + kind.bias_seed(rank), (1, 72), torch.float16)[0]
        # A @ 1 is A: what is added is known to the bit.
        total = torch.zeros(kind.many, 72, device=device.torch_device)
        for part in parts:
            total += part[mine].float()
        if bias is not None:
            total += bias.float()
        for number, algorithm in enumerate(kind.tiled):
            late = (turn + number) % size
            C = kind.op.fn(
                parts[rank], B, calls.ctx, default_tiles(), bias=bias,
                straggler_option=(late, 20_000_000), **algorithm,
            )  # fmt: skip
            device.synchronize()
            assert_bitwise_equal(C, total.half())
            count += 1
    calls.finish()
    return count


@compiled_ahead
def every_config(kind: Kind) -> int:
    """Every candidate of the tuner, and the defaults of those that are not given."""
    calls = kind(max_rows=kind.many, columns=136, K=96)
    for config in kind.config_space():
        calls(kind.many, **config)
    calls(kind.many)
    calls(kind.many, op=kind.op, autotune=False)
    return calls.finish()


def tuned(kind: Kind) -> tuple[int, int]:
    """Tuned calls, each layout on its own; (tunings, checked calls)."""
    before = kind.op.tuning_count
    calls = kind(max_rows=11, columns=72, K=72, **kind.options)
    with some_configs(kind.op):
        for _ in range(3):
            for arguments in kind.tuned_calls:
                calls(op=kind.op, **arguments)
    return kind.op.tuning_count - before, calls.finish()


@compiled_ahead
def chunked(kind: Kind, rounds: int) -> int:
    """Row blocks in any number of chunks, some of them clipped, and in fewer than asked for."""
    calls = kind(max_rows=kind.chunked_rows[0], columns=72, K=40)
    for number in range(rounds):
        for rows in kind.chunked_rows:
            num_chunks = 1 + number % MAX_CHUNKS
            calls(rows, **kind.row_blocks, num_chunks=num_chunks, persistent=number % 3 > 0)
    return calls.finish()


def a_kernel_that_raises(kind: Kind) -> int:
    """A GEMM of row blocks that fails to be launched on all ranks leaves the context as it was."""
    calls = kind(max_rows=37, columns=72, K=72)
    for number in range(3):
        with mock.patch.object(scatter_algorithms, "scattered_gemm", side_effect=ZeroDivisionError):
            try:
                calls(30 + number, **kind.row_blocks)
            except ZeroDivisionError:
                calls.skip()
        calls(30 + number, **kind.row_blocks, num_chunks=2)
        calls(30 + number, **kind.tiled[number % len(kind.tiled)])
    return calls.finish()


@compiled_ahead
def many_tiles(kind: Kind, rounds: int) -> int:
    """Shapes that keep a whole GPU busy while tiles travel; too much for the interpreter."""
    most = max(kind.full_rows(algorithm) for algorithm in kind.algorithms)
    calls = kind(most, columns=1536, K=1024, dtype=torch.bfloat16, **kind.options)
    for number in range(rounds):
        for algorithm in kind.algorithms:
            calls(
                kind.full_rows(algorithm) * (11 - number % 5) // 11,
                layout=("row-major", "column-major")[number % 2],
                persistent=number % 3 < 2,
                straggler_option=(number % dist.get_world_size(), 1_000_000),
                **algorithm,
            )
    return calls.finish()


def in_groups(kind: Kind, members: Sequence[Sequence[int]]) -> int:
    """Disjoint groups at once, each with a context of its own, of different sizes."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    calls = kind(max_rows=5 + mine, columns=40, K=72 - 8 * mine, group=groups[mine])
    for number in range(4):
        calls(1 + number, **kind.tiled[number % len(kind.tiled)])
    return calls.finish()


def epochs_wrap_around(kind: Kind, rounds: int) -> int:
    """Flags of what is consumed pass the largest int32, and other flags what 32 bits would hold."""
    calls = kind(max_rows=kind.few, columns=72, K=72, **kind.options)
    slots, nearly = calls.ctx.buffer.slots, 2**31 - 3
    for flags in kind.flags:
        for slot in range(epochs.SLOTS):
            words = slots.of_slot(slot, flags).local
            words.fill_(nearly if flags == "consumed" else flag_value(nearly, kind.few))
    # The present use, after `nearly`.
    counts = slots.memory["epoch"].local[:, 0].fill_(flag_value(nearly + 1, 0))
    current_device().synchronize()
    dist.barrier()
    for _ in range(rounds):
        for algorithm in kind.epoch_algorithms:
            calls(kind.few, **algorithm)
    count = calls.check()
    assert flag_count(int(counts.min())) > 2**31
    calls.ctx.finalize()
    return count


def replayed(kind: Kind, rounds: int) -> int:
    """Calls captured in CUDA graphs and replayed, beside calls that are not; fresh data each time.
    CPU ranks capture nothing: they call again."""
    rank, size, algorithms = dist.get_rank(), dist.get_world_size(), kind.algorithms
    eager, calls = (kind(kind.few, columns=72, K=72, **kind.options) for _ in range(2))
    shape, mine = (kind.rows_of_a(kind.few, size), 72), kind.own_rows(kind.few, rank)
    A = uniform(1, shape, torch.float16)
    B = uniform(100 + rank, (72, 72), torch.float16)
    everyone = [uniform(100 + peer, (72, 72), torch.float16).double() for peer in range(size)]
    outputs: dict[int, torch.Tensor] = {}

    def captured_call(number: int) -> Callable[[], object]:
        def call() -> None:
            outputs[number] = kind.op.fn(A, B, calls.ctx, default_tiles(), **algorithms[number])

        return captured(call, warmup=1)  # so that one of the two slots is new in the capture

    replays = [captured_call(number) for number in range(len(algorithms))]
    results = []
    for turn in range(rounds):
        for number, replay in enumerate(replays):
            addends = [
                uniform(1000 * turn + 10 * number + peer, shape, A.dtype) for peer in range(size)
            ]
            A.copy_(addends[rank])
            replay()
            A.fill_(NAN)
            expected = sum(a.double()[mine] @ b for a, b in zip(addends, everyone, strict=True))
            results.append((outputs[number].clone(), expected.half()))
            eager(11, **algorithms[(turn + number) % len(algorithms)])
    current_device().synchronize()
    limit = tolerance(torch.float16, size)
    for C, expected in results:  # a sum of products of U(-1, 1)
        assert_allclose(C, expected, rtol=limit, atol=limit * (K * size) ** 0.5 / 3)
    calls.ctx.finalize()
    return len(results) + eager.finish()


def looks_at_peers(kind: Kind) -> list[int]:
    """How often a call looked whether its peers are done with a slot, after each kind of call."""
    calls = kind(max_rows=20, columns=72, K=72)
    launcher, looks = calls.ctx.buffer.slots.launcher, []
    run = launcher.run

    def counted(key: Any, *rest: Any, **options: Any) -> None:
        looks[-1] += key[0] is epochs.kernel_await_consumption
        run(key, *rest, **options)

    launcher.run = counted  # type: ignore[method-assign]

    def call(algorithm: Algorithm) -> None:
        looks.append(0)
        calls(20, **algorithm)

    for algorithm in kind.in_turn:
        call(algorithm)
    with bounded_waits(20.0):  # trials, whatever the way, and the first call after them
        for algorithm in kind.in_trials:
            call(algorithm)
    call(algorithm)
    call(algorithm)
    calls.finish()
    return looks


@compiled_ahead
def give_up_and_start_again(kind: Kind) -> list[str]:
    """Rank 0 calls alone, with a limit on its waits; after a reset all ranks call again."""
    overdue = []
    calls = kind(max_rows=kind.few, columns=72, K=72, **kind.options)
    calls(kind.few)
    calls.check()
    for algorithm in kind.algorithms:
        for persistent in (True, False):
            if dist.get_rank() == 0:
                try:
                    with bounded_waits(0.2):
                        calls(kind.few, persistent=persistent, **algorithm)
                except WaitTimeout as error:
                    overdue.append(error.flag.split("[")[0].rstrip("01"))
            else:
                calls.skip()
            dist.barrier()
            calls.reset()
            for rows in (5, kind.few, 11):
                calls(rows, persistent=persistent, **algorithm)
    calls.finish()
    return overdue


# What a caller can get wrong. All ranks make the same mistakes.

ROWS, COLUMNS, K = 6, 40, 24


def on_few_multiprocessors(kind: Kind, free: int, num_holding: int) -> int:
    """Calls on GPUs of which the first ``num_holding`` have ``free`` multiprocessors, and the
    others all: programs that have yet to begin are waited for by some that run.

    More are free for torch.matmul: its clusters, of programs that begin side by side, did not begin
    at all on 1 or 2, and on 4 in 3 of 4 times (H200)."""
    rank, size, dtype = dist.get_rank(), dist.get_world_size(), torch.bfloat16
    most = max(kind.full_rows(algorithm) for algorithm in kind.algorithms)
    calls = kind(most, columns=1536, K=1024, dtype=dtype, **kind.options)
    count = 0
    for algorithm in kind.algorithms:
        left = max(free, 40) if kind.multiplies_by_torch(algorithm) else free
        held = current_device().num_sms - left if rank < num_holding else 1
        rows = kind.rows_of_a(kind.full_rows(algorithm), size)
        A, B = uniform(rank, (rows, 1024), dtype), uniform(100 + rank, (1024, 1536), dtype)
        for persistent in (True, False):
            options = {"persistent": persistent, **algorithm}

            def call(A: torch.Tensor = A, B: torch.Tensor = B, options: Algorithm = options) -> Any:
                C = kind.op.fn(A, B, calls.ctx, default_tiles(dtype), **options)
                return C.clone()  # one in the context's memory is soon another one's

            expected, _ = call(), call()  # compiled, and loaded, for both slots
            with held_multiprocessors(held, str(options)):
                results = [call() for _ in range(4)]
            for C in results:
                try:
                    assert_allclose(C, expected, rtol=6e-2, atol=6e-2 * 3)
                except AssertionError as error:
                    raise AssertionError(f"{options}: {error}") from None
            count += len(results)
    calls.ctx.finalize()
    return count
