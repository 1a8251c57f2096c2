"""Timing a call."""

from __future__ import annotations

import time

import pytest
import torch

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.device import current_device
from triton_dist.runtime.profiling import (
    get_torch_prof_ctx,
    perf_func,
    perf_func_with_l2_reset,
)


def test_perf_func_gives_the_last_output_and_the_mean():
    calls = []

    def work():
        calls.append(len(calls))
        time.sleep(0.3 if len(calls) <= 2 else 0.01)  # the first two are warm-up
        return len(calls)

    output, milliseconds = perf_func(work, iters=5, warmup_iters=2)
    assert output == len(calls) == 7
    assert 10 <= milliseconds < 60


@pytest.mark.parametrize("timed", [perf_func, perf_func_with_l2_reset])
def test_no_call_has_no_mean(timed):
    for iters in (0, -1, 1.5):
        with pytest.raises(InvalidArgument, match=f"{timed.__name__}: iters is {iters}, expected"):
            timed(pytest.fail, iters, warmup_iters=1)


def test_the_cache_is_flushed_before_each_call_and_outside_of_its_time(monkeypatch):
    events = []
    monkeypatch.setattr(
        current_device(), "flush_cache", lambda: (events.append(0), time.sleep(0.2))
    )
    output, milliseconds = perf_func_with_l2_reset(lambda: events.append(1) or 7, 3, 2)
    assert events == [1, 1] + [0, 1] * 3
    assert output == 7
    assert milliseconds < 150


def test_a_profile_of_this_rank_alone():
    with get_torch_prof_ctx(True) as profile:
        torch.ones(8).sum()
    assert any(event.key == "aten::sum" for event in profile.key_averages())
    with get_torch_prof_ctx(False) as nothing:
        assert nothing is None
