"""Older keywords that name a way are heeded where nothing is tuned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia import (
    AllGatherMethod,
    AllReduceMethod,
    GatherMethod,
    GEMMAllReduceMethod,
    LibraryAlgorithm,
    ReduceScatterMethod,
    ag_gemm,
    all_gather,
    all_reduce,
    create_ag_gemm_context,
    create_all_gather_ctx,
    create_allreduce_ctx,
    create_gemm_ar_context,
    create_gemm_rs_context,
    create_reduce_scatter_ctx,
    gemm_ar,
    gemm_rs,
    reduce_scatter,
)
from triton_dist.kernels.nvidia.allgather_gemm.algorithms import ALGORITHMS as AG_GEMM_ALGORITHMS
from triton_dist.kernels.nvidia.allreduce.algorithms import ALGORITHMS as ALL_REDUCE_ALGORITHMS
from triton_dist.kernels.nvidia.gemm_allreduce.algorithms import ALGORITHMS as GEMM_AR_ALGORITHMS
from triton_dist.kernels.nvidia.gemm_reduce_scatter.algorithms import (
    ALGORITHMS as GEMM_RS_ALGORITHMS,
)
from triton_dist.kernels.nvidia.shard_collectives.algorithms import AllGatherCall, ReduceScatterCall
from triton_dist.testing.assertions import assert_allclose

FP32 = torch.float32
ALGORITHMS = (
    AG_GEMM_ALGORITHMS,
    GEMM_RS_ALGORITHMS,
    GEMM_AR_ALGORITHMS,
    ALL_REDUCE_ALGORITHMS,
    AllGatherCall.algorithms,
    ReduceScatterCall.algorithms,
)


def asked_for(rank: int, size: int) -> Iterator[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]]:
    """Op, context, operands, and by the name of a way what asks for it."""
    N, row = 8 * size, torch.full((4 * size, 8), rank + 1.0)
    operands, addends = (torch.ones(4, 8), torch.ones(8, 8)), (row, torch.ones(8, 8))
    ring = AllGatherMethod.RING_PUSH_1D
    with create_ag_gemm_context(N, N, 8, FP32, rank, size, all_gather_method=ring) as ctx:
        yield ag_gemm, ctx, operands, {ring.value: {}}
        methods = (*AllGatherMethod, LibraryAlgorithm.COLLECTIVE)
        yield ag_gemm, ctx, operands, {each.value: {"method": each} for each in methods}
    with create_gemm_rs_context(N, 8, rank, size, size, FP32) as ctx:
        asked = {"collective": {"method": LibraryAlgorithm.COLLECTIVE}}
        asked |= {"copy_engine": {"fuse_scatter": False}, "fused": {"fuse_scatter": True}}
        yield gemm_rs, ctx, addends, asked
    with create_gemm_ar_context(N, 8, rank, size, size, FP32) as ctx:
        yield gemm_ar, ctx, addends, {each.value: {"method": each} for each in GEMMAllReduceMethod}
    with create_allreduce_ctx(1 << 12, rank, size, size) as ctx:
        methods = [each for each in AllReduceMethod if each.replacement is None]
        yield all_reduce, ctx, (row,), {each.value: {"method": each} for each in methods}
    for op, create, kind in (
        (all_gather, create_all_gather_ctx, GatherMethod),
        (reduce_scatter, create_reduce_scatter_ctx, ReduceScatterMethod),
    ):
        with create(1 << 12, rank, size, size) as ctx:
            yield op, ctx, (row,), {each.value: {"method": each} for each in kind}


@contextmanager
def algorithms_that_run() -> Iterator[list[str]]:
    """Within, the names of ways that calls of any op run."""
    seen: list[str] = []

    def noted(algorithm: Any) -> Any:
        return lambda call, run=algorithm.run: (seen.append(algorithm.name), run(call))[1]

    each_algorithm = [algorithm for algorithms in ALGORITHMS for algorithm in algorithms.values()]
    for algorithm in each_algorithm:
        algorithm.run = noted(algorithm)
    try:
        yield seen
    finally:
        for algorithm in each_algorithm:
            del algorithm.run


def run_what_is_asked_for() -> tuple[list[tuple[str, str]], int]:
    """What was asked for where another way ran, in calls without tuning; and how many did run."""
    wrong, count = [], 0
    with algorithms_that_run() as seen:
        for op, ctx, operands, asked in asked_for(dist.get_rank(), dist.get_world_size()):
            expected = op(*operands, ctx, autotune=False)
            for name, keywords in asked.items():
                seen.clear()
                assert_allclose(op(*operands, ctx, autotune=False, **keywords), expected)
                wrong += [(op.__name__, name)] if seen != [name] else []
                count += 1
    return wrong, count


def refused_untuned() -> list[str]:
    """Messages for what names no way, or one that cannot run here, while nothing is tuned."""
    messages = []
    with mock.patch.dict("os.environ", TRITON_DIST_AUTOTUNE="0"):
        for op, ctx, operands, _ in asked_for(dist.get_rank(), dist.get_world_size()):
            for method in ("one_shot", 5, LibraryAlgorithm.ASYNC_TP):
                try:
                    op(*operands, ctx, method=method)
                except InvalidArgument as error:
                    messages.append(str(error))
    return messages


def test_the_way_that_is_asked_for_runs(on_two):
    assert on_two(run_what_is_asked_for) == [([], 22)] * 2


def test_what_names_no_way_is_refused(on_two):
    for messages in on_two(refused_untuned):
        assert len(messages) == 3 * 7
        assert sum(": method is " in each for each in messages) == 3 * 7 - 3
        assert sum("algorithm is 'async_tp', expected another" in each for each in messages) == 3
