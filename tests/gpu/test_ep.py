"""Expert parallelism on GPUs: compiled kernels; what CPU ranks check, and graphs."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.distributed import deep_ep_ranks, ep_names_ranks, ep_ranks
from tests.distributed.test_ep import (  # noqa: F401
    test_different_arguments_are_an_error_on_every_rank,
    test_every_rank_raises_what_one_did_wrong,
    test_rows_stay_until_the_next_call,
)
from tests.distributed.test_ep_names import UNTUNED
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


def test_random_routings(on_gpus):
    assert set(on_gpus(ep_ranks.random_calls, 1, 4)) == {12}


def test_replays_serve_any_routing(on_gpus, rounds):
    number = rounds(30)
    assert set(on_gpus(ep_ranks.replayed, number)) == {3 * number}


def test_any_rank_may_be_late(on_gpus, rounds):
    number = rounds(400)
    assert set(on_gpus(ep_ranks.replayed, number, True)) == {3 * number}
    number = rounds(1000)
    assert set(on_gpus(ep_ranks.stragglers, number)) == {number}


def test_the_stream_of_wait_follows_the_stream_of_the_send(on_gpus):
    assert set(on_gpus(ep_ranks.on_two_streams, 10)) == {10}


@few_ranks
def test_two_contexts_on_two_streams_do_not_deadlock(on_gpus):
    assert set(on_gpus(ep_ranks.two_contexts, 8)) == {16}


@pytest.mark.stress
@pytest.mark.parametrize("num_ranks", [2, 4, 8], indirect=True)
def test_a_thousand_late_calls_where_ranks_share_a_gpu(on_gpus, alternate):
    if not alternate:
        pytest.skip("each rank has a GPU: the test above makes a thousand")
    assert set(on_gpus(ep_ranks.replayed, 334, True)) == {1002}
    assert set(on_gpus(ep_ranks.stragglers, 1000)) == {1000}


def test_every_candidate_gives_the_same(on_few):
    (calls,) = set(on_few(ep_ranks.every_config))
    assert calls > 20


@few_ranks
def test_a_call_that_gave_up_leaves_nothing_behind(on_gpus):
    first, *others = on_gpus(ep_ranks.give_up_and_start_again)
    assert len(first) == 4
    assert others == [[]] * len(others)


@few_ranks
def test_tuned_over_the_ranks(on_gpus):
    assert set(on_gpus(ep_ranks.tuned)) == {(1, 1)}


@pytest.mark.gpu(count=2)
def test_names_that_scripts_import(on_ranks):
    """PyTorch's all-to-all, the reference, requires a GPU for each rank."""
    run = functools.partial(on_ranks(2), env=UNTUNED)
    for dtype, has_scale in ((torch.bfloat16, True), (torch.int8, False)):
        run(ep_names_ranks.sorted_rows, dtype, has_scale)
    for flag in (True, False):
        run(ep_names_ranks.layer, flag)
        run(ep_names_ranks.low_latency_layer, flag)
    run(ep_names_ranks.splits_in_2d, torch.int8)
    run(ep_names_ranks.own_script, True)
    run(deep_ep_ranks.many_tokens)
    run(deep_ep_ranks.few_tokens)
