from __future__ import annotations

import pytest

from tests.tuning.fakes import FakeDevice
from triton_dist._tuning.measure import DeviceBenchmarker
from triton_dist._tuning.search import Exhaustive
from triton_dist._tuning.values import Config, Measurement, Policy


def test_warm_up_runs_are_not_samples():
    device, durations = FakeDevice(), iter([50.0, 40.0, 1.0, 2.0, 3.0])
    measured = DeviceBenchmarker(device, 1.0).measure(
        lambda: device.advance(next(durations)), Policy(warmup=2, repeat=3), lambda: None
    )
    assert measured == Measurement((1.0, 2.0, 3.0), 2)
    assert measured.median == 2.0
    assert device.flushes == 5


def test_the_default_is_three_and_ten():
    device, runs = FakeDevice(), []
    measured = DeviceBenchmarker(device, 1.0).measure(
        lambda: runs.append(1), Policy(), lambda: None
    )
    assert len(runs) == 13
    assert len(measured.samples) == 10


def test_what_happens_while_aligning_is_not_timed():
    device = FakeDevice()
    measured = DeviceBenchmarker(device, 1.0).measure(
        lambda: device.advance(1.0), Policy(0, 2), lambda: device.advance(100.0)
    )
    assert measured.samples == (1.0, 1.0)


def test_no_flush_when_the_policy_says_so():
    device = FakeDevice()
    DeviceBenchmarker(device, 1.0).measure(
        lambda: None, Policy(warmup=1, repeat=1, flush=False), lambda: None
    )
    assert device.flushes == 0


def test_a_call_that_fails_is_not_repeated_but_aligning_is():
    aligned, runs = [], []

    def call():
        runs.append(1)
        if len(runs) == 2:
            raise ValueError("second run")

    with pytest.raises(ValueError, match="second run"):
        DeviceBenchmarker(FakeDevice(), 1.0).measure(
            call, Policy(warmup=1, repeat=4), lambda: aligned.append(1)
        )
    assert (len(runs), len(aligned)) == (2, 5)


def test_a_device_that_does_not_finish_is_a_timeout():
    device = FakeDevice()
    device.synchronize_error = TimeoutError("not finished")
    with pytest.raises(TimeoutError):
        DeviceBenchmarker(device, 1.0).measure(lambda: None, Policy(), lambda: None)


def test_exhaustive_asks_for_each_once_in_order():
    configs = [Config({"n": n}) for n in (3, 1, 2)]
    search = Exhaustive(configs)
    asked = []
    while (config := search.ask()) is not None:
        search.tell(config, Measurement((1.0,), 0))
        asked.append(config)
    assert asked == configs
    assert search.ask() is None
