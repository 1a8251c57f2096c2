"""Capturing a call in a graph."""

from __future__ import annotations

import gc

import pytest
import torch

from tests import garbage
from triton_dist.runtime.device import cuda, current_device
from triton_dist.runtime.garbage import uncollected
from triton_dist.testing.timing import captured


@pytest.mark.gpu
def test_a_captured_call_is_run_once_and_then_replayed():
    device = current_device()
    counter = torch.zeros(4, device=device.torch_device)
    replay = device.capture(lambda: counter.add_(1), 30.0)
    device.synchronize(30.0)
    assert counter.tolist() == [1.0] * 4
    replay()
    replay()
    device.synchronize(30.0)
    assert counter.tolist() == [3.0] * 4


@pytest.mark.gpu
def test_what_cannot_be_captured_says_why_and_breaks_nothing():
    device = current_device()
    counter = torch.zeros(4, device=device.torch_device)
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(lambda: counter.add_(1).sum().item(), 30.0)
    assert torch.cuda.current_stream() == stream
    counter.add_(1)
    device.synchronize(30.0)
    assert counter.tolist() == [2.0] * 4
    device.capture(lambda: counter.add_(1), 30.0)()
    device.synchronize(30.0)
    assert counter.tolist() == [4.0] * 4


@pytest.mark.gpu
def test_the_exception_of_the_call_itself_is_raised():
    device, runs = current_device(), []

    def call():
        runs.append(1)
        if len(runs) == 2:
            raise KeyError("in the capture")

    with pytest.raises(KeyError, match="in the capture"):
        device.capture(call, 30.0)
    assert not device.is_capturing()


@pytest.mark.gpu
def test_memory_of_graphs_that_are_gone_comes_back(monkeypatch):
    # A sixteenth of what is kept otherwise: other tests need the GPU's memory, too.
    monkeypatch.setattr(cuda, "_KEPT_FOR_GRAPHS", 256)
    device, most = current_device(), torch.cuda.get_device_properties(0).total_memory // 16
    source = torch.ones(most // 64, dtype=torch.uint8, device=device.torch_device)
    device.capture(lambda: source + 1, 30.0)()
    for _ in range(64):  # which leave twice the most
        device.capture(lambda: (source + 1) * 2, 30.0)()
        device.synchronize(30.0)
    assert torch.cuda.memory_reserved() < most // 4


@pytest.mark.gpu
def test_garbage_is_not_collected_in_a_capture():
    device = current_device()
    counter = torch.zeros(4, device=device.torch_device)

    def call():
        counter.add_(garbage.leave() / 100_000)

    replay = device.capture(call, 30.0)
    assert gc.isenabled()
    replay()
    device.synchronize(30.0)
    assert counter.tolist() == [2.0] * 4


def test_captures_of_several_threads_forbid_collection_until_the_last_is_over():
    first, second = uncollected(), uncollected()
    with first:
        second.__enter__()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()  # as the program wants it
    finally:
        gc.enable()


@pytest.mark.gpu
def test_runs_before_a_capture_come_after_what_is_queued():
    device, seen = current_device(), []
    flag = torch.zeros(4, device=device.torch_device)
    device.sleep_milliseconds(50.0)
    flag.add_(1)
    captured(lambda: seen.append(flag.clone()), warmup=3)
    device.synchronize(30.0)
    assert [each.tolist() for each in seen[:3]] == [[1.0] * 4] * 3  # the fourth never ran
