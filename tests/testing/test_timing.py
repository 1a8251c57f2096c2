"""Interleaved timing, and the references to measure beside."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.libraries import all_gather_matmul, all_gather_rows
from triton_dist.testing.timing import captured, interleaved


def time_two_candidates():
    order = []

    def candidate(name, seconds):
        def call():
            order.append(name)
            time.sleep(seconds * (1 + dist.get_rank()))

        return call

    samples = interleaved(
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
        interleaved({"call": pytest.fail}, rounds=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_nothing_is_captured():
    calls = []
    captured(lambda: calls.append(1))()
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
