"""What every rank does in the tests of AllGather-GEMM, on CPU ranks and on GPUs alike."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import DTYPES, NAN
from tests.distributed.compiled_ahead import compiled_ahead
from tests.distributed.gemm_calls import LAYOUTS, AllGatherGEMM, default_tiles, uniform
from tests.distributed.op_ranks import few_programs
from triton_dist.errors import InvalidArgument, WaitTimeout
from triton_dist.kernels.common.gemm.launch import fused_push_candidates, split_k_tiles
from triton_dist.kernels.common.gemm.spaces import warp_specialized_tiles
from triton_dist.kernels.common.slots.epochs import kernel_await_consumption
from triton_dist.kernels.common.slots.gathered import AllGatherMethod
from triton_dist.kernels.nvidia import LibraryAlgorithm, ag_gemm
from triton_dist.kernels.nvidia.allgather_gemm import (
    ag_gemm_persistent,
    local_copy_and_barrier_all,
)
from triton_dist.kernels.nvidia.allgather_gemm import context as allgather_gemm_context
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits, deferred_checks
from triton_dist.testing import assert_allclose

# (streams, chunks); 8 chunks are more than the smallest shards have rows.
SCHEDULES = ((1, 1), (2, 2), (1, 3), (3, 8))


@compiled_ahead
def every_schedule() -> int:
    """Methods x streams and chunks, by both kernels in turn, M changing from call to call: each
    method and each schedule has both."""
    calls = AllGatherGEMM(max_rows=37, columns=40, K=72)
    rows = itertools.cycle((5, 37, 1, 20))
    with few_programs(AllGatherGEMM):
        for turn, method in enumerate(AllGatherMethod):
            for number, (num_streams, num_chunks) in enumerate(SCHEDULES, turn):
                calls(
                    next(rows), method=method, num_streams=num_streams, num_chunks=num_chunks,
                    persistent=number % 2 == 0,
                )  # fmt: skip
    return calls.finish()


@compiled_ahead
def every_operand(dtypes: Sequence[torch.dtype] = DTYPES) -> int:
    """Dtypes x sizes x layouts of B, by both kernels in turn; no size is a multiple of a tile's."""
    count = 0
    for dtype in dtypes:
        # An odd K, or an odd N of a row-major B, cannot be read through descriptors.
        shapes = (37, 72, 72), (1, 24, 16), (33, 65, 33), (3, 1, 1)
        for turn, (rows, columns, K) in enumerate(shapes):
            calls = AllGatherGEMM(rows, columns, K, dtype)
            for number, layout in enumerate(LAYOUTS, turn // 2 + turn):
                calls(rows, layout, persistent=number % 2 == 0)
            count += calls.finish()
    return count


@compiled_ahead
def split_tiles() -> int:
    """Cut tiles along K, and visit shards together: odd sizes, a late rank, several schedules.

    Configs alternate on one workspace. On CPU ranks with 3 SMs, the last wave of two calls in three
    is not full.
    """
    calls = AllGatherGEMM(max_rows=70, columns=40, K=104)
    calls.ctx.split_workspace.partials.fill_(NAN)
    tiled = (method for method in AllGatherMethod if method is not AllGatherMethod.SERIAL)
    methods, late = itertools.cycle(tiled), itertools.cycle(range(dist.get_world_size()))
    for config in split_k_tiles():
        for rows in (70, 1, 33):
            calls(
                rows,
                "column-major" if rows == 33 else "row-major",
                gemm_config=config,
                method=next(methods),
                num_chunks=1 + rows % 3,
                local_copy=rows != 1,
                straggler_option=(next(late), 20_000_000),
            )
        calls(33)
    count = calls.check()
    assert not calls.ctx.split_workspace.counters.any()
    calls.ctx.finalize()
    return count


@compiled_ahead
def fused_push(rounds: int) -> int:
    """Shards that the consumer sends itself: odd sizes, of which a config has another in each
    round, chunks that are empty, both kernels, each rank late in turn, and configs that take turns
    with each other and with other methods."""
    calls = AllGatherGEMM(max_rows=70, columns=72, K=136)
    narrow = AllGatherGEMM(max_rows=5, columns=16, K=8, dtype=torch.bfloat16)
    push, size = AllGatherMethod.FUSED_PUSH, dist.get_world_size()
    others = itertools.cycle(method for method in AllGatherMethod if method is not push)
    layouts = itertools.cycle(("row-major", "column-major", "misaligned slice"))
    late_ranks = itertools.cycle(range(size))
    for number in range(rounds):
        for turn, (tiles, num_comm_sms, num_chunks) in enumerate(fused_push_candidates(), number):
            rows = (70, 1, 33)[turn % 3]
            calls(
                rows,
                next(layouts),
                gemm_config=tiles,
                method=push,
                num_comm_sms=num_comm_sms,
                num_chunks=num_chunks,
                local_copy=rows != 33,
                straggler_option=(next(late_ranks), 20_000_000),
            )
            narrow(1 + number % 5, gemm_config=tiles, method=push, num_chunks=8)
        calls(33, method=next(others), num_chunks=2)
        if dist.get_rank() == number % size:
            time.sleep(0.02)
        for persistent in (True, False):
            calls(20, method=push, num_chunks=1 + number % 8, persistent=persistent)
        calls(33, method=push, gemm_config=split_k_tiles()[number % len(split_k_tiles())])
    return calls.finish() + narrow.finish()


@compiled_ahead
def specialized_warps() -> list[int]:
    """Every tile for specialised warps, which only GPUs have: shards of a few clipped tiles and
    such of more tiles than a GPU has SMs, each rank late in turn, on all schedules."""
    methods = itertools.cycle(method for method in AllGatherMethod if method.uses_copy_engines)
    late = itertools.cycle(range(dist.get_world_size()))
    counts = []
    for most, columns, K, dtype in (
        (300, 520, 200, torch.bfloat16),
        (1021, 2000, 520, torch.float16),
        (129, 2048, 4096, torch.float16),
    ):
        calls = AllGatherGEMM(most, columns, K, dtype)
        calls.ctx.split_workspace.partials.fill_(NAN)
        tiles = [*warp_specialized_tiles(), *split_k_tiles()]
        for config in tiles:
            for rows in (most, 1, most // 2 + 1) if "WARP_SPECIALIZED" in config.kwargs else ():
                calls(
                    rows,
                    "slice of column-major" if rows == most else "row-major",
                    gemm_config=config,
                    method=next(methods),
                    num_streams=1 + rows % 2,
                    num_chunks=1 + rows % 3,
                    local_copy=rows != 1,
                    straggler_option=(next(late), 2_000_000),
                )
        counts.append(calls.check())
        assert not calls.ctx.split_workspace.counters.any()
        calls.ctx.finalize()
    return counts


def specialized_warps_give_up() -> list[str]:
    """Rank 0 calls alone, with a limit on its waits, which are those of one warp; after a reset all
    ranks call again."""
    overdue = []
    calls = AllGatherGEMM(max_rows=300, columns=520, K=200)
    for config in warp_specialized_tiles():
        if dist.get_rank() == 0:
            try:
                with bounded_waits(0.2):
                    calls(300, gemm_config=config, num_chunks=2)
            except WaitTimeout as error:
                overdue.append(error.flag.split("[")[0])
        else:
            calls.skip()
        dist.barrier()
        calls.ctx.buffer.reset()
        for rows in (5, 300):
            calls(rows, gemm_config=config)
    calls.finish()
    return overdue


def counts_are_reset() -> list[int]:
    """A launch that broke off left counts behind; after a reset all ranks call again."""
    calls = AllGatherGEMM(max_rows=33, columns=72, K=104)
    counters = calls.ctx.split_workspace.counters
    counters.fill_(1)
    calls.ctx.reset()
    left = int(counters.sum())
    for config in split_k_tiles():
        calls(33, gemm_config=config)
    return [left, calls.finish()]


def too_many_rows_for_serial() -> str:
    """What a call of more rows than one launch gathers is told."""
    room = 5 * dist.get_world_size() * 72 * torch.float16.itemsize
    with mock.patch.object(allgather_gemm_context, "MAX_GATHERED_BYTES", room):
        calls = AllGatherGEMM(max_rows=6, columns=40, K=72)
    with pytest.raises(InvalidArgument) as raised:
        calls(6, method=AllGatherMethod.SERIAL)
    calls(5, method=AllGatherMethod.SERIAL)
    calls.finish()
    return str(raised.value)


def copies_held_up() -> int:
    """Rank 1 leaves out a call of a ring whose consumer is launched nowhere: nothing gives up but
    the reset lets copies go on that wait for what rank 1 would have sent."""
    calls = AllGatherGEMM(max_rows=20, columns=40, K=72)
    calls(20)
    calls.check()
    buffer, device = calls.ctx.buffer, current_device()
    with deferred_checks(device, 20.0):
        if dist.get_rank() != 1:
            with bounded_waits(1.0):
                buffer.start(uniform(1, (20, 72), calls.dtype), AllGatherMethod.RING_PUSH_1D, 2, 2)
                with suppress(WaitTimeout):  # of a copy stream on CPU, when it is joined
                    buffer.finish()
        with bounded_waits(20.0):  # rank 1 is here at once
            buffer.reset()
    for method in AllGatherMethod:
        calls(11, method=method, num_chunks=2)
    return calls.finish()


LOOKS = [1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0]
"""What ``looks_at_peers`` gives, wherever it runs."""


def looks_at_peers() -> list[int]:
    """How often a call looked whether its peers are done with a slot, after each kind of call."""
    calls = AllGatherGEMM(max_rows=20, columns=40, K=72)
    buffer, looks = calls.ctx.buffer, []
    run = buffer.slots.launcher.run

    def counted(key: Any, *rest: Any, **options: Any) -> None:
        looks[-1] += key[0] is kernel_await_consumption
        run(key, *rest, **options)

    buffer.slots.launcher.run = counted  # type: ignore[method-assign]

    def call(**options: Any) -> None:
        looks.append(0)
        calls(20, **options)

    for _ in range(3):  # the first of each slot looks, those that follow need not
        call()
    call(method=LibraryAlgorithm.COLLECTIVE, gemm_config=None)
    with bounded_waits(20.0):  # trials, and the first call after them
        call()
    call()
    call(method=AllGatherMethod.RING_PUSH_1D)
    shard = uniform(1, (20, 72), torch.float16)
    looks.append(0)
    buffer.start(shard, AllGatherMethod.FULL_MESH_PUSH, 1, 1)
    buffer.finish()  # nobody waited for what arrives
    call()
    call()
    for seconds in (None, 20.0):  # a call that uses none of the memory
        looks.append(0)
        with bounded_waits(seconds) if seconds else nullcontext():
            assert buffer.slots.run_without_slots(lambda: "done") == "done"
    call()
    call()
    fused = AllGatherMethod.FUSED_PUSH  # looks by itself, inside the consumer
    call(method=fused)
    call()
    with bounded_waits(20.0):
        call(method=fused)
    call()
    call(method=fused)
    calls.finish()
    return looks


def from_another_thread() -> int:
    """Calls that are laid out on one thread and repeated on another."""
    calls = AllGatherGEMM(max_rows=20, columns=40, K=72)
    for _ in range(4):
        calls(20)
    failures: list[Exception] = []
    device = current_device()

    def more() -> None:
        try:
            if device.name == "cuda":  # a new thread's current GPU is number 0
                torch.cuda.set_device(device.torch_device)
            for _ in range(3):
                calls(20)
        except Exception as failure:
            failures.append(failure)

    thread = threading.Thread(target=more)
    thread.start()
    thread.join()
    assert not failures, failures
    return calls.finish()


@compiled_ahead
def many_tiles(rounds: int) -> int:
    """Shapes that keep a whole GPU busy while shards arrive; too much for the interpreter."""
    calls = AllGatherGEMM(max_rows=1021, columns=1536, K=1024)
    narrow = AllGatherGEMM(max_rows=129, columns=2048, K=4096, dtype=torch.bfloat16)
    for number in range(rounds):
        for method in AllGatherMethod:
            for num_streams, num_chunks in SCHEDULES:
                calls(
                    1021 - 97 * (number % 5),
                    layout=("row-major", "column-major")[number % 2],
                    method=method,
                    num_streams=num_streams,
                    num_chunks=num_chunks,
                    persistent=number % 3 < 2,
                    straggler_option=(number % dist.get_world_size(), 1_000_000),
                )
            narrow(129 - number, method=method, local_copy=number % 2 == 0)
    return calls.finish() + narrow.finish()


def consumer_alone() -> None:
    """The pieces that scripts put together themselves: transfer, persistent consumer, own rows."""
    calls = AllGatherGEMM(max_rows=20, columns=40, K=72)
    ctx = calls.ctx
    shards = [uniform(rank, (20, 72), torch.float16) for rank in range(ctx.num_ranks)]
    B = uniform(100 + ctx.rank, (72, 40), torch.float16)
    C = torch.empty(20 * ctx.num_ranks, 40, dtype=torch.float16, device=B.device)
    own = shards[ctx.rank]
    gathered = ctx.buffer.start(own, AllGatherMethod.FULL_MESH_PUSH, 1, 2)
    ag_gemm_persistent(own, B, C, ctx.rank, ctx.num_ranks, gathered, default_tiles())
    ctx.buffer.finish()
    expected = (torch.cat(shards).double() @ B.double()).half()
    current_device().synchronize()
    assert_allclose(C, expected, rtol=2e-3, atol=2e-3)
    local_copy_and_barrier_all(own, ctx)
    current_device().synchronize()
    assert torch.equal(ctx.own_rows(20), own)
    ctx.finalize()


def strides_of_one_row() -> int:
    """With one row a rank, any stride of A counts as contiguous."""
    calls = AllGatherGEMM(max_rows=1, columns=40, K=72)
    ctx = calls.ctx
    results = []
    for options in (
        {"persistent": True},
        {"persistent": False},
        {"method": AllGatherMethod.SERIAL},
    ):
        shards = [uniform(rank, (1, 72), torch.float16) for rank in range(ctx.num_ranks)]
        B = uniform(100 + ctx.rank, (72, 40), torch.float16)
        wide = torch.full((1, 144), NAN, dtype=torch.float16, device=B.device)
        A = wide[:, :72].copy_(shards[ctx.rank])
        assert A.is_contiguous()
        assert A.stride() == (144, 1)
        C = ag_gemm.fn(A, B, ctx, default_tiles(), **options)
        results.append((C, (torch.cat(shards).double() @ B.double()).half()))
    current_device().synchronize()
    for C, expected in results:
        assert_allclose(C, expected, rtol=2e-3, atol=2e-3)
    return calls.finish()
