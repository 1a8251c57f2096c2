"""Baselines of overlapped ops, their limit, and interleaved timing."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import some_configs
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.libraries import all_gather_matmul, all_gather_rows
from triton_dist.kernels.nvidia import AllGatherMethod, ep_dispatch
from triton_dist.kernels.nvidia.allgather_gemm.algorithms import ALGORITHMS
from triton_dist.testing.assertions import assert_allclose, count_mismatches
from triton_dist.testing.opinfo import GEMM_OPINFOS, OPINFOS
from triton_dist.testing.opinfo.allgather_gemm import AG_GEMM, gather_alone
from triton_dist.testing.opinfo.base import RECIPES, Baseline
from triton_dist.testing.opinfo.expert_parallel import MultipliedTokenShape, TokenShape
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.testing.opinfo.moe import GroupedShape
from triton_dist.testing.opinfo.sequence_parallel import HeadsShape, ProjectedShape
from triton_dist.testing.overlap import overlap_limit_ms
from triton_dist.testing.timing import Samples, capture_graph, time_interleaved

KINDS = {
    "ag_gemm": {
        "GEMM alone": "gemm",
        "all-gather alone": "transfer",
        "copy-engine all-gather alone": "transfer",
        "all-gather + matmul": "baseline",
    },
    "gemm_ar": {
        "GEMM alone": "gemm",
        "all-reduce alone": "transfer",
        "matmul + all-reduce": "baseline",
    },
    "gemm_rs": {
        "GEMM alone": "gemm",
        "reduce-scatter alone": "transfer",
        "matmul + reduce-scatter": "baseline",
    },
}
ON_GPUS = {
    "ag_gemm": {"torch async-TP"},
    "gemm_ar": {"matmul + torch one-shot", "matmul + torch two-shot"},
    "gemm_rs": {"torch async-TP"},
}


def everything_there_is(device="cpu"):
    """Kinds of the baselines of each GEMM; all baselines of all dtypes return what they should."""
    kinds = {}
    for number, (name, info) in enumerate(GEMM_OPINFOS.items()):
        shape = info.shape_from_rank(3, 8, 16, 2)
        found = checked_baselines(info, shape, torch.float32, has_bias=info.sums_over_ranks)
        kinds[name] = {each: baseline.kind for each, baseline in found.items()}
        # Interpreted products take long: on CPU ranks each op has another recipe.
        for recipe in RECIPES if device == "cuda" else [*RECIPES][number : number + 1]:
            # cuBLAS needs 4 * n blocks of K on each rank, and N in steps of 16.
            shape = Shape(12, 48, 544) if device == "cpu" else Shape(12, 64, 1024)
            scaled = checked_baselines(info.with_dtype(recipe), shape, torch.bfloat16)
            assert scaled.keys() == found.keys() or device != "cpu"
    for name, recipe in (
        ("ag_group_gemm", "fp8-row"), ("grouped_gemm", "fp8-tensor"),
        ("run_moe_reduce_ar", "fp8-row"), ("run_moe_reduce_rs", "fp8-block"),
    ):  # fmt: skip
        info, K = OPINFOS[name].with_dtype(recipe), 288 if device == "cpu" else 1024
        checked_baselines(info, GroupedShape(6, 192, K, 3, 2), torch.bfloat16)
    for name in ("ep_combine", "ep_dispatch"):
        checked_baselines(OPINFOS[name], TokenShape(6, 40, 2), torch.bfloat16)
    shape = MultipliedTokenShape(6, 40, 2, 16)
    with some_configs(ep_dispatch, 1):  # which the baseline tunes
        checked_baselines(OPINFOS["ep_dispatch_group_gemm"], shape, torch.bfloat16)
    for name in ("sp_ag_attention", "ulysses_post_attn", "ulysses_pre_attn"):
        checked_baselines(OPINFOS[name], HeadsShape(8, 4, 2, 8), torch.bfloat16)
    for name in ("ulysses_gemm_pre_attn", "ulysses_post_attn_gemm"):
        checked_baselines(OPINFOS[name], ProjectedShape(8, 4, 2, 8, 24), torch.bfloat16)
    return kinds


def checked_baselines(info, shape, dtype, **options):
    """Baselines of operands that change after the baselines are created."""
    with info.context(shape, dtype) as ctx:
        operands = info.operands(shape, dtype, 2, **options)
        baselines = info.baselines(operands, ctx)
        info.refill(operands, 2)
        args, kwargs = info.arguments(operands, ctx)
        tolerance = info.tolerance(dtype, 2)
        op = Baseline(
            "own",
            lambda: info.output(info.op(*args, **kwargs)),
            lambda: info.reference(operands),
        )
        for each in (*baselines.values(), op):
            if each.expected is not None:
                assert_allclose(each.call(), each.expected(), tolerance, tolerance)
            elif each.kind != "transfer":
                each.call()
    return baselines


def what_a_rank_gets():
    """The transfer of AllGather-GEMM alone."""
    shape = Shape(6, 16, 16)
    with AG_GEMM.context(shape, torch.float32) as ctx:
        A = AG_GEMM.operands(shape, torch.float32, 2)["A"]
        rows = gather_alone(A, ctx)
        shards = [torch.empty_like(A) for _ in range(2)]
        dist.all_gather(shards, A)
        peer = 1 - dist.get_rank()
        torch.testing.assert_close(rows[3 * peer : 3 * peer + 3], shards[peer])


def test_baselines_return_what_they_should(spawn_ranks):
    untuned = {"TRITON_DIST_AUTOTUNE": "0"}
    assert spawn_ranks(2, everything_there_is, env=untuned) == [KINDS, KINDS]


def test_every_gemm_is_in_the_table():
    assert list(GEMM_OPINFOS) == list(KINDS)


def test_the_transfer_alone_brings_the_rows_of_peers(spawn_ranks):
    spawn_ranks(2, what_a_rank_gets)


@pytest.mark.gpu(count=2)
def test_torch_has_baselines_on_gpus(spawn_ranks):
    untuned = {"TRITON_DIST_AUTOTUNE": "0"}
    for kinds in spawn_ranks(
        2, everything_there_is, "cuda", device="cuda", timeout=110, env=untuned
    ):
        for op, names in ON_GPUS.items():
            assert {kinds[op][name] for name in names} == {"baseline"}


@pytest.mark.parametrize(
    ("gemm", "transfers", "limit"), [(5.0, (7.0, 3.0), 5.0), (2.0, (7.0, 3.0), 3.0)]
)
def test_the_limit_is_the_slower_part_at_its_fastest(gemm, transfers, limit):
    times = {"g": gemm, "t0": transfers[0], "t1": transfers[1], "o": 1.0}
    kinds = {"g": "gemm", "t0": "transfer", "t1": "transfer", "o": "own"}
    candidates = {name: Baseline(kind, torch.Tensor) for name, kind in kinds.items()}
    samples = {name: Samples((time,) * 3) for name, time in times.items()}
    assert overlap_limit_ms(candidates, samples) == limit


def test_own_algorithms_are_distinguished_from_library_algorithms():
    own = {
        algorithm for algorithm in ALGORITHMS if AG_GEMM.is_our_algorithm({"algorithm": algorithm})
    }
    assert own == {method.value for method in AllGatherMethod}


def test_mismatches_are_counted():
    expected = torch.tensor([0.0, 1.0, 100.0, float("nan"), 1.0], dtype=torch.bfloat16)
    actual = torch.tensor([0.0, 1.5, 101.0, 1.0, float("nan")], dtype=torch.bfloat16)
    assert int(count_mismatches(actual, expected, rtol=0.02, atol=0.0)) == 3
    assert int(count_mismatches(actual, expected, rtol=0.0, atol=0.5)) == 3
    assert int(count_mismatches(expected[:3], expected[:3], rtol=0.0, atol=0.0)) == 0


def test_quantiles_of_samples():
    samples = Samples(tuple(float(value) for value in range(11)))
    assert samples.quantile(0.1) == pytest.approx(1.0)
    assert samples.quantile(0.5) == samples.median
    assert samples.quantile(0.9) == pytest.approx(9.0)


def time_two_candidates():
    order = []

    def candidate(name, seconds):
        def call():
            order.append(name)
            time.sleep(seconds * (1 + dist.get_rank()))

        return call

    samples = time_interleaved(
        {"short": candidate("short", 0.002), "long": candidate("long", 0.01)},
        rounds=3,
        warmup_rounds=1,
    )
    return order, samples


def test_candidates_take_turns_and_the_slowest_rank_counts(spawn_ranks):
    (order, samples), (_, same) = spawn_ranks(2, time_two_candidates)
    assert order == ["short", "long"] * 4
    assert samples == same
    assert [len(sample.milliseconds) for sample in samples.values()] == [3, 3]
    assert 4 <= samples["short"].median < 15
    assert 20 <= samples["long"].median < 60


def test_no_round_has_no_samples():
    with pytest.raises(InvalidArgument, match="rounds is 0, expected an int, 1 or more"):
        time_interleaved({"call": pytest.fail}, rounds=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_nothing_is_captured():
    calls = []
    capture_graph(lambda: calls.append(1))()
    assert calls == [1]


def gather():
    rank = dist.get_rank()
    shard = torch.full((2, 3), float(rank))
    out = torch.empty(2 * dist.get_world_size(), 3)
    rows = all_gather_rows(shard, out=out)
    assert rows is out
    assert torch.equal(rows, all_gather_rows(shard))
    return rows[:, 0].tolist(), all_gather_matmul(shard, torch.eye(3))[:, 1].tolist()


def test_references_stack_the_shards_by_rank(spawn_ranks):
    expected = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert spawn_ranks(3, gather) == [(expected, expected)] * 3
