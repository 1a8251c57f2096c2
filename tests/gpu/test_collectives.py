"""The plain collectives on GPUs: compiled kernels, NVLink; what CPU ranks check, and graphs."""

from __future__ import annotations

import pytest

from tests.distributed import collective_ranks
from tests.distributed.collective_calls import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    ReduceScatter,
)
from tests.distributed.test_collectives import (  # noqa: F401
    test_in_place_and_in_several_launches,
    test_nothing_old_is_read,
)
from tests.gpu.op_suite import GPUSlotSuite, GPUSuite
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]
EACH = pytest.mark.parametrize("kind", COLLECTIVES.values(), ids=COLLECTIVES)


class TestAllReduce(GPUSuite):
    kind = AllReduce


class TestReduceScatter(GPUSlotSuite):
    kind = ReduceScatter


class TestAllGather(GPUSlotSuite):
    kind = AllGather


@few_ranks
@EACH
def test_every_size_and_shape(on_gpus, kind):
    assert set(on_gpus(collective_ranks.every_size, kind)) == {24 * len(kind.names)}


@few_ranks
def test_sizes_that_fill_gpu_and_links(on_gpus, alternate):
    number = 12 if alternate else 30  # each algorithm of the all-reduce has each of three shapes
    assert set(on_gpus(collective_ranks.large_calls, number)) == {len(COLLECTIVES) * number}


def test_two_ranks_sum_more_in_one_shot(on_gpus):
    assert set(on_gpus(collective_ranks.large_in_one_shot, 15 << 20)) == {1}


def test_all_ranks_and_algorithms_give_the_same_bits(on_gpus, rounds):
    number = rounds(20)
    assert set(on_gpus(collective_ranks.same_bits, number)) == {number * len(AllReduce.names)}


@EACH
def test_calls_are_counted_without_end(on_gpus, kind):
    assert all(checked == 6 for _, checked in on_gpus(collective_ranks.calls_without_end, kind))
