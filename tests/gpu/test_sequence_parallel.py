"""Sequence parallelism on GPUs: compiled kernels, and what CPU ranks check."""

from __future__ import annotations

import pytest

from tests.distributed import sp_attention_ranks, ulysses_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


def test_random_exchanges(on_gpus):
    assert set(on_gpus(ulysses_ranks.random_calls, 1, 2)) == {6}


def test_random_attention(on_gpus):
    assert set(on_gpus(sp_attention_ranks.random_calls, 1, 4)) == {12}


def test_replays_of_graphs(on_gpus, rounds):
    number = rounds(20)
    assert set(on_gpus(sp_attention_ranks.replayed, number)) == {10 * number}
