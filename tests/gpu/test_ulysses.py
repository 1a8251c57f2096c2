"""The Ulysses ops on GPUs: compiled kernels, and what CPU ranks check."""

from __future__ import annotations

import pytest

from tests.distributed import ulysses_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


def test_random_calls(on_gpus):
    assert set(on_gpus(ulysses_ranks.random_calls, 1, 2)) == {6}
