"""One process: which config each call of the function takes, and with which arguments."""

from __future__ import annotations

import torch
import triton
from triton.runtime.autotuner import Autotuner

from tests.contextual.kernels import Spy, autotuned, configs, scale, scale_kernel
from triton_dist.autotuner import contextual_autotune


def test_the_table_of_the_contract():
    """Two kernels with two and three configs, two iterations a config."""
    kernels = [
        autotuned(scale_kernel, configs(16, 32)),
        autotuned(scale_kernel, configs(16, 32, 64)),
    ]
    spies = [Spy(kernel) for kernel in kernels]
    x = torch.arange(100.0)

    @contextual_autotune(n_repeat=1, n_warmup=1)
    def function(x):
        return scale(kernels[1], scale(kernels[0], x))

    assert torch.equal(function(x), 4 * x)
    best = [
        kernel.cache[100, "torch.float32", "torch.float32"].kwargs["BLOCK"] for kernel in kernels
    ]
    assert spies[0].blocks == [16, 16, 32, 32, best[0], best[0], best[0]]
    assert spies[1].blocks == [16, 16, 32, 32, 64, 64, best[1]]
    assert function.tuning_calls == 6
    function(x)
    assert len(spies[0].blocks) == 8


def test_calls_of_the_default_counts():
    kernel = autotuned(scale_kernel, configs(16, 32, 64))
    calls = []

    @contextual_autotune()
    def function(x):
        calls.append(1)
        return scale(kernel, x)

    function(torch.ones(64))
    assert len(calls) == 3 * (3 + 5) + 1


def test_patch_is_in_force_only_inside():
    original = Autotuner.run, Autotuner.prune_configs
    kernel = autotuned(scale_kernel, configs(16, 32))
    seen = []

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def function(x):
        seen.append(Autotuner.run is original[0])
        return scale(kernel, x)

    function(torch.ones(64))
    assert (Autotuner.run, Autotuner.prune_configs) == original
    assert not any(seen)
    function(torch.ones(64))
    assert seen[-1]
    assert (Autotuner.run, Autotuner.prune_configs) == original


def test_a_race_of_24_configs():
    kernel = autotuned(scale_kernel, [triton.Config({"BLOCK": 64}, num_warps=n) for n in range(24)])
    function = contextual_autotune(race=True)(lambda x: scale(kernel, x))
    function(torch.ones(64))
    assert 24 * 2 < function.tuning_calls + 1 <= (24 * (3 + 5) + 1) / 2


def test_importing_patches_nothing():
    assert Autotuner.run.__module__ == Autotuner.prune_configs.__module__ == Autotuner.__module__


def test_each_key_has_its_own_context_and_arguments():
    kernel = autotuned(scale_kernel, configs(16, 32))
    short, long = torch.arange(40.0), torch.arange(100.0)

    @contextual_autotune(n_repeat=2, n_warmup=1)
    def function(offset):
        return scale(kernel, short + offset), scale(kernel, long - offset)

    for offset in (1.0, 2.0):
        first, second = function(offset)
        assert torch.equal(first, 2 * (short + offset))
        assert torch.equal(second, 2 * (long - offset))
    assert len(function.choices()) == 2
