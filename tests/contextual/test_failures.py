"""Configs that cannot be launched, and functions that raise."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from tests.contextual.kernels import (
    Spy,
    add,
    add_kernel,
    autotuned,
    configs,
    scale,
    scale_kernel,
    scaling,
)
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import NoValidConfig, TuningTimeout, TuningWarning, WaitTimeout
from triton_dist.runtime import waits
from triton_dist.runtime.device.cpu import CpuDevice, CpuTimer

RUN = Autotuner.run


def tuned_block(kernel, n=64):
    (config,) = (config for key, config in kernel.cache.items() if key[0] == n)
    return config.kwargs["BLOCK"]


@pytest.mark.filterwarnings("ignore:.*configs failed:triton_dist.errors.TuningWarning")
@pytest.mark.parametrize("fails", [(16,), (32,), (64,), (16, 32), (32, 64), (16, 64)])
def test_a_config_that_fails_is_left_out_wherever_it_stands(fails):
    function = scaling(16, 32, 64, fails=fails, n_repeat=2)
    x, blocks = torch.arange(64.0), function.spy.blocks
    assert torch.equal(function(x), 2 * x)
    assert tuned_block(function.kernel) not in fails
    assert all(blocks.count(block) == 1 for block in fails)
    assert torch.equal(function(x), 2 * x)
    assert blocks[-1] == tuned_block(function.kernel)


def test_a_choice_is_stored_before_a_warning_of_its_tuning_is_raised():
    function = scaling(16, 32, 64, fails=(16, 64))
    said = (
        r"scale_kernel key \(64, .* 2 of 3 configs failed, the first, .*'BLOCK': 16.*OutOfResources"
    )
    with pytest.raises(TuningWarning, match=said):  # pytest makes warnings errors
        function(torch.arange(64.0))
    function.spy.blocks.clear()
    function.clear()
    function(torch.arange(64.0))
    assert function.spy.blocks == [32]


def test_all_fail_then_the_next_call_starts_cleanly():
    function = scaling(16, 32, fails=(16, 32))
    x = torch.arange(64.0)
    for _ in range(2):
        with pytest.raises(NoValidConfig, match="OutOfResources") as failure:
            function(x)
        assert len(failure.value.causes) == 2
        assert Autotuner.run is RUN
    assert not function.kernel.cache
    function.spy.fails = ()
    assert torch.equal(function(x), 2 * x)


def test_an_exception_of_the_function_ends_the_tuning_and_restores():
    kernel = autotuned(scale_kernel, configs(16, 32))
    counter = autotuned(add_kernel, configs(16, 32), restore_value=["x_ptr"])
    spy = Spy(kernel)
    counts = torch.zeros(64)
    calls = []

    @contextual_autotune(n_repeat=2, n_warmup=1)
    def function(x):
        calls.append(1)
        add(counter, counts)
        y = scale(kernel, x)
        if len(calls) == 3:
            raise KeyError("mine")
        return y

    x = torch.arange(64.0)
    with pytest.raises(KeyError, match="mine"):
        function(x)
    assert Autotuner.run is RUN
    assert not kernel.cache
    assert torch.equal(counts, torch.zeros(64))
    spy.blocks.clear()
    assert torch.equal(function(x), 2 * x)
    assert spy.blocks[:4] == [16] + [32] * 3  # what was measured is known
    assert torch.equal(counts, torch.ones(64))


def test_an_exception_in_a_call_that_tunes_a_later_shape():
    kernel = autotuned(scale_kernel, configs(16, 32))

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def function(x, fail=False):
        y = scale(kernel, x)
        if fail:
            raise KeyError("mine")
        return y

    function(torch.ones(64))
    x = torch.arange(50.0)
    with pytest.raises(KeyError):
        function(x, fail=True)
    assert (50, "torch.float32", "torch.float32") not in kernel.cache
    assert torch.equal(function(x), 2 * x)
    assert len(kernel.cache) == 2


def test_a_config_whose_hook_raises_is_left_out():
    def refuse(arguments):
        raise RuntimeError("not this one")

    kernel = autotuned(scale_kernel, [*configs(16, pre_hook=refuse), *configs(32, 64)])

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def function(x):
        return scale(kernel, x)

    function(torch.ones(64))
    assert tuned_block(kernel) in (32, 64)


def test_a_function_that_swallows_the_failure_gets_it_at_the_end():
    kernel = autotuned(scale_kernel, configs(16, 32))
    Spy(kernel, 16, 32)

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def function(x):
        try:
            return scale(kernel, x)
        except NoValidConfig:
            return None

    with pytest.raises(NoValidConfig):
        function(torch.ones(64))


def test_meta_parameters_given_twice():
    kernel = autotuned(scale_kernel, configs(16, 32))

    @contextual_autotune()
    def function(x):
        kernel[(4,)](x, torch.empty_like(x), 64, BLOCK=16)

    with pytest.raises(NoValidConfig, match="Conflicting meta-parameters: BLOCK"):
        function(torch.ones(64))


def test_pruning_that_leaves_nothing():
    def none(configs, nargs, **kwargs):
        return []

    function = scaling(16, 32, prune_configs_by={"early_config_prune": none})
    with pytest.raises(triton.runtime.errors.AutotunerError):
        function(torch.ones(64))
    assert Autotuner.run is RUN


def test_a_config_that_the_device_does_not_finish_is_not_tried_again(monkeypatch):
    function = scaling(16, 32, 64, n_warmup=0)
    spy = function.spy

    def wait(device, seconds=None):
        if spy.blocks == [16, 32]:
            raise TimeoutError

    x = torch.arange(64.0)
    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "synchronize", wait)
        patch.setattr(CpuTimer, "is_done", lambda timer: spy.blocks != [16, 32])
        with pytest.raises(TuningTimeout, match=r"'BLOCK': 32.* its device has not finished"):
            function(x)
    spy.blocks.clear()
    assert torch.equal(function(x), 2 * x)
    assert spy.blocks[0] == 64
    assert 32 not in spy.blocks


@pytest.mark.parametrize("number", [0, 2])
def test_a_wait_that_gave_up_ends_the_tuning_at_the_end_of_its_call(number):
    kernel, calls, checks = autotuned(scale_kernel, configs(16, 32)), [], []
    overdue = WaitTimeout(rank=0, program="op", flag="ready[1]", expected=2, seen=1, seconds=1.0)

    def check():
        checks.append(len(calls))
        return overdue if len(calls) == number + 1 else None

    @contextual_autotune(n_repeat=2, n_warmup=1)
    def function(x):
        assert waits.defer(check), "nobody settles"
        calls.append(1)
        assert len(checks) == len(calls) - 1  # those of the calls before
        return scale(kernel, x)

    x = torch.arange(64.0)
    with pytest.raises(WaitTimeout, match=r"ready\[1\]"):
        function(x)
    assert len(calls) == number + 1
    assert Autotuner.run is RUN
    assert not waits.defer(check)
    assert not kernel.cache
