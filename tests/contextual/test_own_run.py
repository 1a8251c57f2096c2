"""Subclasses of Triton's ``Autotuner`` that replace ``run``."""

from __future__ import annotations

import warnings

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from tests.contextual.kernels import (
    LoneTuner,
    Spy,
    SuperTuner,
    TableTuner,
    configs,
    scale,
    scale_kernel,
    tuned_by,
)
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import TuningWarning

X = torch.arange(64.0)
ONCE = {"n_repeat": 1, "n_warmup": 1}
RUNS = {kind: kind.run for kind in (TableTuner, SuperTuner, LoneTuner)}


@pytest.fixture(autouse=True)
def left_as_it_was():
    yield
    assert {kind: kind.run for kind in RUNS} == RUNS


def test_one_with_a_table_of_its_own_is_stepped():
    """Its table is neither looked at nor written to, in any state of the function."""
    kernel = tuned_by(TableTuner, scale_kernel, configs(16, 32))
    spy = Spy(kernel)
    function = contextual_autotune(**ONCE)(lambda x: scale(kernel, x))
    assert torch.equal(function(X), 2 * X)
    assert function.tuning_calls == 4
    assert spy.blocks[:4] == [16, 16, 32, 32]
    (winner,) = function.choices().values()
    assert torch.equal(function(X), 2 * X)  # settled: no more than a launch
    assert spy.blocks[4:] == [winner.kwargs["BLOCK"]] * 2
    assert kernel.best_config is winner
    assert torch.equal(function(X[:40]), 2 * X[:40])  # a new key, in a settled function
    assert function.tuning_calls == 8
    assert kernel.benched == kernel.cache.written == []
    assert torch.equal(scale(kernel, X), 2 * X)  # outside of it, it does as ever
    assert kernel.benched == [16, 32]
    assert all(isinstance(config, triton.Config) for config in kernel.cache.written)


def test_one_that_comes_to_tritons_run_is_stepped_there():
    kernel = tuned_by(SuperTuner, scale_kernel, configs(16, 32))
    spy = Spy(kernel)
    function = contextual_autotune(**ONCE)(lambda x: scale(kernel, x))
    assert torch.equal(function(X), 2 * X)
    assert spy.blocks[:4] == [16, 16, 32, 32]
    assert torch.equal(function(X[:40]), 2 * X[:40])
    assert function.tuning_calls == 8
    assert kernel.around == len(spy.blocks)
    stored = {str(config) for config in kernel.cache.written}
    assert stored <= {str(config) for config in kernel.configs}  # and no placeholder


def test_one_that_comes_to_nothing_of_tritons_is_left_alone_with_one_warning():
    kernels = [tuned_by(LoneTuner, scale_kernel, configs(16, 32)) for _ in range(2)]
    function = contextual_autotune(**ONCE)(lambda x: scale(kernels[0], scale(kernels[1], x)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(function(X), 4 * X)
        assert torch.equal(function(X[:40]), 4 * X[:40])
    (warning,) = [each for each in caught if issubclass(each.category, TuningWarning)]
    assert "kernels.LoneTuner, such as of scale_kernel, tunes in a run() of its own" in str(
        warning.message
    )
    assert function.tuning_calls == 0
    assert function.choices() == {}


def test_a_class_that_comes_later_is_seen_after_the_next_tuning():
    """It is defined while the function runs, as by an import there."""
    kernels = []

    def load():
        class Late(TableTuner):
            def run(self, *args, **kwargs):
                return TableTuner.run(self, *args, **kwargs)

        kernels.append(tuned_by(Late, scale_kernel, configs(16, 32)))

    @contextual_autotune(**ONCE)
    def function(x):
        if not kernels:
            load()
        return scale(kernels[0], x)

    for _ in range(2):
        assert torch.equal(function(X), 2 * X)
    assert function.tuning_calls == 4


def test_one_whose_pruning_is_asked_by_others_gets_configs():
    """Only Triton's own run is led away: a config that stands for nothing is for nobody else."""
    kernel = triton.autotune(configs(16, 32), ["n"])(scale_kernel)
    asked = []

    @contextual_autotune(**ONCE)
    def function(x):
        kernel.nargs = {}
        asked.append(kernel.prune_configs({"warmup": False}))
        return x

    for _ in range(2):
        function(X)
    assert asked == [kernel.configs] * 2
    assert Autotuner.prune_configs.__module__ == "triton.runtime.autotuner"
