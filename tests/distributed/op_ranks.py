"""Scenarios of ranks that all ops across ranks share, on CPU ranks and on GPUs; ``kind`` is the
op's subclass of ``Calls``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist

from tests.distributed.calls import NAN, Calls, Options, some_configs
from tests.distributed.compiled_ahead import compiled_ahead
from tests.distributed.gemm_calls import GEMMCalls
from triton_dist.errors import WaitTimeout
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.peers import flag_count, flag_value
from triton_dist.kernels.common.slots.epochs import NUM_SLOTS
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing.timing import capture_graph

Kind: TypeAlias = type[Calls]


def few_programs(kind: Kind) -> Any:
    """Context manager: the interpreter runs few programs at a time, as if other streams had the
    rest of a GPU."""
    return mock.patch.dict("os.environ", TRITON_DIST_RESIDENT_PROGRAMS=str(kind.residents))


@compiled_ahead
def back_to_back(kind: Kind, rounds: int) -> int:
    """Make different calls in two contexts; nothing synchronises the ranks in between."""
    first, second = kind.first(), kind.second()
    with few_programs(kind):
        for number in range(rounds):
            first(1 + kind.row_step * number % kind.many, **kind.in_sequence(number))
            if number % 3 == 0:
                second(1 + number % 8, **kind.in_sequence(number, is_second=True))
    return first.finish() + second.finish()


@compiled_ahead
def stragglers(kind: Kind) -> int:
    """Delay each rank in turn: on its stream within a call, and on the host before a call.

    CPU ranks call each algorithm once. All ranks run the same program, so any late rank shows that
    a wait is missing.
    """
    cycles = 50_000_000  # 30 ms on a GPU, and on CPU ranks
    calls, size = kind.first(), dist.get_world_size()
    with few_programs(kind):
        for late in range(size):
            for number, algorithm in enumerate(kind.algorithms):
                if number % size == late or not current_device().interprets:
                    calls(kind.many, straggler_option=(late, cycles), **algorithm)
            if dist.get_rank() == late:
                time.sleep(0.05)
            calls(11, **kind.in_sequence(late))
    return calls.finish()


@compiled_ahead
def every_config(kind: Kind) -> tuple[int, int]:
    """Call every candidate of the tuner, and the defaults; return the candidates and the calls."""
    calls, space = kind.for_configs(), kind.config_space()
    for config in space:
        calls(kind.rows_of_config(config), **config)
    calls(kind.config_rows)
    calls(kind.config_rows, op=kind.op, autotune=False)
    return len(space), calls.finish()


def tuned(kind: Kind) -> tuple[int, int]:
    """Make tuned calls; return the number of tunings and of calls."""
    before = kind.op.num_tunings
    calls = kind.first()
    with kind.few_configs():
        for _ in range(3):
            for arguments in kind.tuned_calls:
                calls(op=kind.op, **arguments)
    return kind.op.num_tunings - before, calls.finish()


def in_groups(kinds: Sequence[Kind], members: Sequence[Sequence[int]], tune: bool = False) -> int:
    """Make calls in disjoint groups at the same time, each in its own context of its own size."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    count = 0
    for kind in kinds:
        calls = kind.in_group(mine, groups[mine])
        for number in range(3 + mine):  # groups are not in step
            if tune:
                with some_configs(kind.op, most=2):
                    calls(5 + mine, op=kind.op, autotune_pg=groups[mine])
            else:
                calls(1 + number % 5, **kind.in_sequence(number, is_second=True))
        count += calls.finish()
    return count


def epochs_wrap_around(kind: Kind, rounds: int) -> int:
    """Let flags of consumed data pass the largest int32, and other flags the limit of 32 bits."""
    calls, nearly = kind.first(), 2**31 - 3
    slots = calls.slots
    for region in kind.flags:
        for slot in range(NUM_SLOTS):
            words = slots.region_of_slot(slot, region).local
            words.fill_(nearly if region == "consumed" else flag_value(nearly, kind.few))
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


@compiled_ahead
def give_up_and_start_again(kind: Kind) -> list[str]:
    """Let rank 0 call alone with a limit on its waits; after a reset, all ranks call again."""
    overdue, calls = [], kind.first()
    calls(kind.few)
    calls.check()
    for options in kind.gives_up:
        if dist.get_rank() == 0:
            try:
                with bounded_waits(0.2):
                    calls(kind.few, **options)
            except WaitTimeout as error:
                overdue.append(error.flag.split("[")[0].rstrip("01"))
        else:
            calls.skip()
        dist.barrier()
        calls.ctx.reset()
        for rows in (5, kind.few, 11):
            calls(rows, **options)
    calls.finish()
    return overdue


def library_alternating(kind: type[GEMMCalls], rounds: int) -> int:
    """Alternate between the fused operators of torch and ours, with a changing number of rows."""
    calls = kind(32, 64, 64, **kind.context_options)
    for number in range(rounds):
        bias = {"has_bias": number % 2 == 0} if kind.bias else {}
        for method in libraries.supported_library_algorithms(kind.library):
            calls(16 + 8 * (number % 3), method=method, gemm_config=None, **bias)
            calls(32 - 8 * (number % 2), **kind.in_sequence(number))
    return calls.finish()


def replayed(kind: Kind, rounds: int) -> int:
    """Replay captured calls with fresh data, each twice, next to calls that are not captured.

    CPU ranks capture nothing: they call again.
    """
    eager, calls = kind.first(), kind.first()

    def capture(algorithm: Options) -> tuple[tuple[Any, ...], list[Any], Callable[[], object]]:
        calls.number += 2  # odd calls of ag_gemm have one more output
        options, outputs = dict(algorithm), list[Any]()
        calls.set_defaults(options)
        args, _ = calls.arguments(kind.few, "row-major", options)
        # With one call before it, a capture begins with a slot that was not used.
        replay = capture_graph(lambda: outputs.append(kind.op.fn(*args, **options)), warmup=1)
        return args, outputs, replay

    replays = [capture(algorithm) for algorithm in kind.algorithms]
    for turn in range(rounds):
        for number, (args, outputs, replay) in enumerate(replays):
            for _ in range(2):
                calls.number += 2
                fresh, expected = calls.arguments(kind.few, "row-major", {})
                for target, source in zip(args, fresh, strict=True):
                    if isinstance(source, torch.Tensor):
                        target.copy_(source)
                replay()
                args[0].fill_(NAN)
                what = f"round {turn}, {kind.algorithms[number]}"
                calls.results.append((what, outputs[-1].clone(), expected))
                calls.made += 1
            calls(kind.few, **kind.algorithms[number])
            calls.skip()  # a result in the context's memory is copied
            eager(11, **kind.in_sequence(turn + number))
    return calls.finish() + eager.finish()
