"""Which config each call of a function takes, and the order of launches by recorded times."""

from __future__ import annotations

import random

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from tests.contextual.kernels import Spy, autotuned, configs, scale, scale_kernel
from triton_dist._tuning.search.steps import OrderedPlan, RacingPlan
from triton_dist._tuning.values import Config
from triton_dist.autotuner import contextual_autotune


def candidates(count):
    return [Config({"config": triton.Config({"BLOCK": n})}) for n in range(count)]


def run(plan, time_of):
    """All steps, each told its time; (config, timed)."""
    taken = []
    while plan.current is not None:
        step = plan.current
        number = step.config["BLOCK"]
        taken.append((number, step.timed))
        plan.tell(time_of(number))
    return taken


def winner(plan, configs):
    medians = {
        config["BLOCK"]: sorted(samples)[len(samples) // 2]
        for config in configs
        if (samples := plan.samples.get(config.digest))
    }
    return min(medians, key=medians.get)


def test_a_config_that_fails_is_left_out():
    configs = candidates(3)
    plan = OrderedPlan(configs, warmup=1, repeat=2)
    plan.fail(configs[0].digest)
    plan.fail(configs[2].digest)
    assert [number for number, _ in run(plan, float)] == [1, 1, 1]
    assert list(plan.samples) == [configs[1].digest]


def test_all_fail():
    configs = candidates(2)
    plan = RacingPlan(configs, warmup=1, repeat=2)
    for config in configs:
        plan.fail(config.digest)
    assert plan.current is None


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.5, 10.0])
def test_a_race_takes_at_most_half_and_finds_the_best(spread):
    """24 configs, 3 + 5 launches, 2 % of noise: the best is found within the noise."""
    count, full = 24, 24 * (3 + 5) + 1
    for seed in range(20):
        noise = random.Random(seed)
        times = [1 + spread * noise.random() for _ in range(count)]
        plan, configs = RacingPlan(candidates(count), warmup=3, repeat=5), candidates(count)
        taken = run(plan, lambda n, times=times, noise=noise: times[n] * noise.gauss(1, 0.02))
        assert len(taken) + 1 <= full / 2
        assert times[winner(plan, configs)] <= min(times) * 1.05


def test_nobody_takes_more_than_the_given_counts():
    plan = RacingPlan(candidates(24), warmup=3, repeat=5)
    taken = run(plan, lambda n: 1.0)
    for number in range(24):
        assert taken.count((number, False)) <= 3
        assert taken.count((number, True)) <= 5
    assert max(taken.count((number, True)) for number in range(24)) == 5


@pytest.mark.parametrize(("warmup", "repeat"), [(0, 1), (0, 2), (1, 1), (3, 5)])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_small_races_measure_everybody(count, warmup, repeat):
    plan = RacingPlan(candidates(count), warmup, repeat)
    run(plan, lambda n: 1.0 + n)
    assert all(plan.samples.values())
    assert winner(plan, candidates(count)) == 0


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
