"""Decode attention on GPUs: compiled kernels; what CPU ranks check, and graphs."""

from __future__ import annotations

import pytest

from tests.distributed import decode_ranks
from tests.distributed.test_decode_attention import (  # noqa: F401
    test_different_arguments_are_an_error_on_every_rank,
)
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@pytest.mark.parametrize("name", decode_ranks.EVERY)
def test_kinds_of_caches(on_few, name):
    results = on_few(decode_ranks.every_kind, (name,), ("packets", "all_to_all"), 4, 900)
    assert results == [[]] * len(results)


def test_replays_serve_any_lengths_and_late_ranks(on_gpus, rounds):
    number = rounds(1000)
    assert set(on_gpus(decode_ranks.replayed, number)) == {number}


@few_ranks
def test_a_call_that_gave_up_leaves_nothing_behind(on_gpus):
    first, *others = on_gpus(decode_ranks.give_up_and_start_again)
    assert first == ["sp_decode_attn.packets"]
    assert others == [[]] * len(others)


@few_ranks
def test_tuned_over_the_ranks(on_gpus):
    assert set(on_gpus(decode_ranks.tuned)) == {1}


def test_layer_for_scripts(on_few):
    on_few(decode_ranks.layer)
