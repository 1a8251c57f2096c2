"""What most tests on GPUs run on."""

from __future__ import annotations

import functools

import pytest

from triton_dist.testing import spawn_ranks


@pytest.fixture(
    params=[pytest.param(count, marks=pytest.mark.gpu(count=count)) for count in (2, 4)]
)
def on_gpus(request):
    """``on_gpus(fn, *args)``: what ``fn`` returns, by rank; one rank per GPU."""
    return functools.partial(spawn_ranks, request.param, device="cuda", timeout=500)
