"""Capturing a call in a graph."""

from __future__ import annotations

import gc

import pytest
import torch

from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.cuda import _no_collection
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
def test_memory_of_graphs_that_are_gone_comes_back():
    device, total = current_device(), torch.cuda.get_device_properties(0).total_memory
    source = torch.ones(total // 64, dtype=torch.uint8, device=device.torch_device)
    device.capture(lambda: source + 1, 30.0)()
    for _ in range(64):  # which leave the whole memory twice
        device.capture(lambda: (source + 1) * 2, 30.0)()
        device.synchronize(30.0)
    assert torch.cuda.memory_reserved() < total // 4


class Synchronizing:
    """An object in a cycle whose end asks of the driver what a capture forbids."""

    def __init__(self):
        self.me = self

    def __del__(self):
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_garbage_is_not_collected_in_a_capture():
    device = current_device()
    counter = torch.zeros(4, device=device.torch_device)

    def call():
        Synchronizing()
        kept = [[each] for each in range(100_000)]  # which starts a collection, if there are any
        counter.add_(len(kept) / 100_000)

    replay = device.capture(call, 30.0)
    assert gc.isenabled()
    replay()
    device.synchronize(30.0)
    assert counter.tolist() == [2.0] * 4


def test_captures_of_several_threads_forbid_collection_until_the_last_is_over():
    first, second = _no_collection(), _no_collection()
    with first:
        second.__enter__()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with _no_collection():
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
