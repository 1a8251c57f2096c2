"""``TRITON_DIST_AUTOTUNE=0``: every kernel runs with its first config, and nothing is kept."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.autotuner import Autotuner

from tests.contextual.kernels import Spy, autotuned, configs, scale, scale_kernel, scaling
from triton_dist import knobs, tune
from triton_dist.autotuner import contextual_autotune

X = torch.arange(64.0)
ONCE = {"n_repeat": 1, "n_warmup": 1}
RUN = Autotuner.run


@pytest.fixture
def off(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "0")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")


def switch_on(monkeypatch):
    monkeypatch.delenv("TRITON_DIST_AUTOTUNE")
    monkeypatch.delenv("TRITON_DIST_AUTOTUNE_FROZEN")


def test_a_whole_run_can_go_without_tuning(off, monkeypatch, logs):
    function = scaling(32, 16, 64)
    for _ in range(2):
        assert torch.equal(function(X), 2 * X)
    assert function.spy.blocks == [32, 32]
    assert (function.tuning_calls, function.choices(), dict(function.kernel.cache)) == (0, {}, {})
    assert Autotuner.run is RUN
    assert not list(knobs.cache_dir.get().rglob("*.json"))
    assert not logs.exists()
    switch_on(monkeypatch)
    function(X)
    assert function.tuning_calls == 6
    assert len(function.kernel.cache) == 1


def test_a_settled_function_goes_on_and_takes_the_first_config_for_a_new_key(off):
    function = scaling(32, 16)
    with tune.autotuning():  # as if the variables were not set
        function(X)
    cached = len(function.kernel.cache)
    function.spy.blocks.clear()
    for _ in range(2):
        function(torch.arange(128.0))
    assert (function.spy.blocks, len(function.kernel.cache)) == ([32, 32], cached)
    assert function.tuning_calls == 4
    function(X)  # what is known stays known


def test_a_function_that_calls_itself_and_another(off):
    kernel, inner = autotuned(scale_kernel, configs(32, 16)), scaling(32, 16)
    spies = [Spy(kernel), inner.spy]

    @contextual_autotune(**ONCE)
    def outer(x, depth=1):
        y = scale(kernel, inner(x))
        return outer(y, depth - 1) if depth else y

    assert torch.equal(outer(X), 16 * X)
    assert [spy.blocks for spy in spies] == [[32, 32], [32, 32]]


def test_an_error_leaves_nothing_replaced(off):
    function = scaling(32, 16, fails=(32,))
    with pytest.raises(Exception, match="out of resource"):
        function(X)
    assert Autotuner.run is RUN
