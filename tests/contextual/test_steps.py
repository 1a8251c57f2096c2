"""The order of launches, from recorded times."""

from __future__ import annotations

import random

import pytest
import triton

from triton_dist._tuning.search.steps import InTurn, Race
from triton_dist._tuning.values import Config


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


def test_in_turn():
    plan = InTurn(candidates(2), warmup=2, repeat=1)
    assert run(plan, float) == [
        (0, False),
        (0, False),
        (0, True),
        (1, False),
        (1, False),
        (1, True),
    ]


def test_a_config_that_fails_is_left_out():
    configs = candidates(3)
    plan = InTurn(configs, warmup=1, repeat=2)
    plan.fail(configs[0].digest)
    plan.fail(configs[2].digest)
    assert [number for number, _ in run(plan, float)] == [1, 1, 1]
    assert list(plan.samples) == [configs[1].digest]


def test_all_fail():
    configs = candidates(2)
    plan = Race(configs, warmup=1, repeat=2)
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
        plan, configs = Race(candidates(count), warmup=3, repeat=5), candidates(count)
        taken = run(plan, lambda n, times=times, noise=noise: times[n] * noise.gauss(1, 0.02))
        assert len(taken) + 1 <= full / 2
        assert times[winner(plan, configs)] <= min(times) * 1.05


def test_nobody_takes_more_than_the_given_counts():
    plan = Race(candidates(24), warmup=3, repeat=5)
    taken = run(plan, lambda n: 1.0)
    for number in range(24):
        assert taken.count((number, False)) <= 3
        assert taken.count((number, True)) <= 5
    assert max(taken.count((number, True)) for number in range(24)) == 5


@pytest.mark.parametrize(("warmup", "repeat"), [(0, 1), (0, 2), (1, 1), (3, 5)])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_small_races_measure_everybody(count, warmup, repeat):
    plan = Race(candidates(count), warmup, repeat)
    run(plan, lambda n: 1.0 + n)
    assert all(plan.samples.values())
    assert winner(plan, candidates(count)) == 0
