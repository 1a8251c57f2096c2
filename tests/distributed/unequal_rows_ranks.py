"""Ranks that come to a call with different rows, behind calls with equal ones: the same on CPU
ranks and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.gemm_calls import (
    GEMMAllReduce,
    GEMMReduceScatter,
    default_tiles,
    uniform,
)
from triton_dist.debugging import races
from triton_dist.errors import RankDisagreement
from triton_dist.kernels.common.exchange import sums
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.nvidia import (
    AllGatherMethod,
    ag_gemm,
    ag_group_gemm,
    create_ag_gemm_context,
    create_ag_group_gemm_context,
    create_gemm_ar_context,
    create_gemm_rs_context,
    gemm_ar,
    gemm_rs,
)
from triton_dist.kernels.nvidia.gemm_allreduce import algorithms as gemm_ar_algorithms
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.transfer import AwaitFlag
from triton_dist.runtime.garbage import no_garbage_collection
from triton_dist.runtime.launch import Launcher
from triton_dist.testing import assert_allclose

K, N = 32, 48
MOST_ROWS = 40
SMALL = {"num_ctas": 2, "block_bytes": 512}
_SOON = 60.0  # seconds


@dataclass(frozen=True)
class Op:
    """create: of a context. rows_of_a: of a call with so many rows of a rank. own: this rank's part
    of the sum of products, or of all rows."""

    op: Any
    create: Callable[[int, int], Any]
    algorithms: Sequence[Mapping[str, Any]]
    gathers: bool = False
    scatters: bool = False

    def operands(self, number: int, rows: int, rank: int, size: int) -> tuple[torch.Tensor, ...]:
        M = rows if self.gathers else rows * size
        return uniform(100 * number + rank, (M, K), torch.float16), uniform(
            7 * number + rank, (K, N), torch.float16
        )

    def expected(self, number: int, rows: int, rank: int, size: int) -> torch.Tensor:
        pairs = [self.operands(number, rows, each, size) for each in range(size)]
        if self.gathers:
            gathered = torch.cat([A for A, _ in pairs]).double()
            return gathered @ pairs[rank][1].double()
        total = torch.stack([A.double() @ B.double() for A, B in pairs]).sum(0)
        return total[rank * rows : (rank + 1) * rows] if self.scatters else total


def _one_expert(
    A: torch.Tensor, B: torch.Tensor, ctx: Any, gemm_config: Any, **algorithm: Any
) -> torch.Tensor:
    """``ag_group_gemm`` of one expert, who has all tokens: ``ag_gemm``."""
    ids = torch.zeros(len(A) * ctx.num_ranks, 1, dtype=torch.int32, device=A.device)
    tiles = grouped_tiles()[-1]
    C: torch.Tensor = ag_group_gemm.fn(A, B[None], ctx, ids, gemm_config=tiles, **algorithm)
    return C


OPS = {
    "ag_group_gemm": Op(
        SimpleNamespace(fn=_one_expert),
        lambda rank, size: create_ag_group_gemm_context(
            MOST_ROWS * size, N, K, 1, 1, torch.float16, rank, size
        ),
        [
            {"gather": "full_mesh_push"},
            {"gather": "ring_push_1d"},
            {"algorithm": "serial"},
        ],
        gathers=True,
    ),
    "ag_gemm": Op(
        ag_gemm,
        lambda rank, size: create_ag_gemm_context(
            MOST_ROWS * size, N * size, K, torch.float16, rank, size
        ),
        [
            *({"method": method, "num_chunks": 2} for method in AllGatherMethod),
            {"method": AllGatherMethod.SERIAL},  # as many programs as the rows ask for
        ],
        gathers=True,
    ),
    "gemm_rs": Op(
        gemm_rs,
        lambda rank, size: create_gemm_rs_context(
            MOST_ROWS * size, N, rank, size, size, torch.float16, reduce_st=True
        ),
        (*GEMMReduceScatter.alone, GEMMReduceScatter.algorithms[5]),
        scatters=True,
    ),
    "gemm_ar": Op(
        gemm_ar,
        lambda rank, size: create_gemm_ar_context(
            MOST_ROWS * size, N, rank, size, size, torch.float16
        ),
        [
            *GEMMAllReduce.alone,
            *(
                {"algorithm": "serial", "reduction": reduction, **SMALL}
                for reduction in ("one_shot", "two_shot")
            ),
        ],
    ),
}


def unequal(name: str, mine: Sequence[int]) -> list[dict[int, object]]:
    """In each way of op ``name`` a call of equal rows, one of ``mine[rank]`` and, after a reset,
    two of equal rows again; what the error of each said."""
    op, rank, size = OPS[name], dist.get_rank(), dist.get_world_size()
    said: list[dict[int, object]] = []
    with op.create(rank, size) as ctx:
        for number, algorithm in enumerate(op.algorithms):

            def call(rows: int, number: int = number, algorithm: Any = algorithm) -> torch.Tensor:
                options = {"gemm_config": default_tiles(), **algorithm}
                return op.op.fn(*op.operands(number, rows, rank, size), ctx, **options)

            def check(rows: int, number: int = number, call: Any = call) -> None:
                expected = op.expected(number, rows, rank, size)
                assert_allclose(call(rows), expected.half(), atol=2e-2, rtol=2e-2)

            check(mine[0])
            with pytest.raises(RankDisagreement, match=f"the rows of A in {name}") as told:
                _settled(call, mine[rank], ctx)
            said.append(told.value.by_rank)
            with pytest.raises(RankDisagreement):  # until the reset
                call(mine[0])
            ctx.reset()
            for rows in (mine[1], mine[0]):
                check(rows)
    return said


def at_a_threshold(mine: Sequence[int], options: Mapping[str, Any]) -> dict[int, object]:
    """What a rank learns of rows with a size between them from which on ``gemm_ar`` takes another
    kernel."""
    rank, size = dist.get_rank(), dist.get_world_size()
    between = sum(mine) * N * torch.float16.itemsize // 2
    with ExitStack() as patches, OPS["gemm_ar"].create(rank, size) as ctx:
        for module, name in (
            (sums, "DEFAULT_MAX_PACKET_BYTES"),
            (sums, "DEFAULT_MIN_TWO_SHOT_BYTES"),
            (gemm_ar_algorithms, "_MIN_OVERLAPPED_BYTES"),
        ):
            patches.enter_context(mock.patch.object(module, name, between))

        def call(rows: int) -> torch.Tensor:
            A, B = torch.ones(rows, 1).half(), torch.ones(1, N).half()
            return gemm_ar.fn(A, B, ctx, gemm_config=default_tiles(), **options)

        assert call(mine[0]).eq(size).all()
        with pytest.raises(RankDisagreement) as told:
            _settled(call, mine[rank], ctx)
        ctx.reset()
        assert call(mine[1]).eq(size).all()
    return told.value.by_rank


def _settled(call: Callable[[int], object], rows: int, ctx: Any) -> None:
    with races.expected():  # parts lie as far apart as the rank has rows
        call(rows)
        ctx.check()


def replayed(name: str, mine: Sequence[int]) -> list[dict[int, object]]:
    """The same of a CUDA graph for each number of rows, of which ranks replay different ones."""
    op, rank, size = OPS[name], dist.get_rank(), dist.get_world_size()
    device, said = current_device(), []
    with op.create(rank, size) as ctx:
        for number, algorithm in enumerate(op.algorithms):
            options = {"gemm_config": default_tiles(), **algorithm}
            graphs = dict(_graphs(op, ctx, number, set(mine), options))
            for rows in (mine[0], mine[1], mine[0]):
                graphs[rows].replay()
            ctx.check()
            graphs[mine[rank]].replay()
            with pytest.raises(RankDisagreement) as told:
                ctx.check()
            said.append(told.value.by_rank)
            device.synchronize(60.0)
            ctx.reset()
    return said


@contextmanager
def told_in_between(really: bool) -> Iterator[None]:
    """A host that the device is ahead of, if ``really``: it learns of a disagreement before the
    rest of the call is launched."""
    launch = Launcher.run

    def run(self: Launcher, *args: Any, **options: Any) -> None:
        current_device().synchronize(_SOON)
        launch(self, *args, **options)

    with mock.patch.object(Launcher, "run", run if really else launch):
        yield


@contextmanager
def held_device() -> Iterator[None]:
    """Let the GPU begin only afterwards what is queued within. Its own kernels tell a rank of a
    disagreement, so the rank learns of none while it launches, however long that takes."""
    device, passed = current_device(), torch.cuda.Event()
    gate = device.host_word().view(torch.int32)  # of the host, which opens it without the GPU
    held = device.transfer([AwaitFlag(0, gate, 0, 1)], [device.copy_stream()])
    current = device.current_stream()
    held.fork(current)
    held.queue()
    held.join(current)
    passed.record()
    try:
        with no_garbage_collection():  # freeing memory waits for the GPU
            yield
    finally:
        gate[0] = 1
        passed.synchronize()


def queued_behind(name: str, mine: Sequence[int]) -> list[dict[int, object]]:
    """The same where all ranks but the last have queued the call of ``mine[rank]``, and one in
    every way behind it, while that one is told in the midst of its first."""
    op, rank, size = OPS[name], dist.get_rank(), dist.get_world_size()
    device, said, launched = current_device(), [], []
    with op.create(rank, size) as ctx:
        numbers = range(len(op.algorithms))
        each = {rows: op.operands(1, rows, rank, size) for rows in mine}

        def call(number: int, rows: int) -> None:
            options = {"gemm_config": default_tiles(), **op.algorithms[number]}
            op.op.fn(*each[rows], ctx, **options)

        def calls(first: int) -> None:
            if rank < size - 1:
                with held_device():
                    call(first, mine[rank])
                    for behind in numbers:
                        call(behind, mine[0])
                launched.append(first)
            else:
                with told_in_between(True):
                    call(first, mine[rank])
            device.synchronize(_SOON)
            ctx.check()

        for number in (*numbers, *numbers):  # with nothing left to compile
            call(number, mine[0])
            ctx.check()
        for number in numbers:
            with pytest.raises(RankDisagreement) as told:
                calls(number)
            said.append(told.value.by_rank)
            ctx.reset()
    assert launched == list(numbers if rank < size - 1 else ())
    return said


def _graphs(
    op: Op, ctx: Any, number: int, each: set[int], options: Mapping[str, Any]
) -> Iterator[tuple[int, Any]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    for rows in sorted(each):
        operands = op.operands(number, rows, rank, size)
        op.op.fn(*operands, ctx, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Symmetric memory that the collector frees during a capture ends the process.
        with no_garbage_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            op.op.fn(*operands, ctx, **options)
        yield rows, graph
