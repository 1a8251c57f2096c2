"""Calls that tune: what can be decorated, the config of each call, nesting, threads, autograd.

With ``TRITON_DIST_AUTOTUNE=0``, each kernel runs with its first config and nothing is kept.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import threading
import time

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.autotuner import Autotuner

from tests.contextual.kernels import Spy, autotuned, configs, scale, scale_kernel, scaling
from tests.tuning.fakes import in_threads
from triton_dist import knobs, tune
from triton_dist._tuning.search.launch_plans import OrderedPlan, RacingPlan
from triton_dist._tuning.values import Config
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import InvalidArgument, TuningWarning

RUN = Autotuner.run
X = torch.arange(64.0)
ONCE = {"n_repeat": 1, "n_warmup": 1}


@contextual_autotune()
def pickled(x):
    """Has a docstring."""
    return x


def test_it_stays_a_function():
    assert pickled.__name__ == "pickled"
    assert pickled.__doc__ == "Has a docstring."
    assert pickle.loads(pickle.dumps(pickled)) is pickled
    assert pickled(3) == 3
    assert pickled.num_tuning_calls == 0


def test_as_a_method():
    class Layer:
        def __init__(self):
            self.kernel = autotuned(scale_kernel, configs(16, 32))

        @contextual_autotune(**ONCE)
        def forward(self, x):
            return scale(self.kernel, x)

    first, second = Layer(), Layer()
    assert torch.equal(first.forward(X), 2 * X)
    assert torch.equal(second.forward(X + 1), 2 * X + 2)
    assert len(first.kernel.cache) == len(second.kernel.cache) == 1


def test_a_decorated_function_inside_tunes_by_itself():
    outside, inside = (autotuned(scale_kernel, configs(16, 32)) for _ in range(2))
    spies = Spy(outside), Spy(inside)
    calls = []

    @contextual_autotune(n_repeat=1, n_warmup=2)
    def inner(x):
        calls.append("inner")
        return scale(inside, x)

    @contextual_autotune(**ONCE)
    def outer(x):
        calls.append("outer")
        return inner(scale(outside, x))

    assert torch.equal(outer(X), 4 * X)
    assert calls == ["outer"] + ["inner"] * 7 + ["outer", "inner"] * 4
    assert spies[0].blocks[:4] == [16, 16, 32, 32]
    assert spies[1].blocks[:6] == [16, 16, 16, 32, 32, 32]
    assert Autotuner.run is RUN


def test_a_new_shape_inside_a_nested_function():
    outside, inside = (autotuned(scale_kernel, configs(16, 32)) for _ in range(2))
    inner = contextual_autotune(**ONCE)(lambda x: scale(inside, x))

    @contextual_autotune(**ONCE)
    def outer(x, y):
        return scale(outside, x), inner(y)

    outer(X, X)
    first, second = outer(X, X[:40])  # both are settled: the inner one meets it
    assert torch.equal(first, 2 * X)
    assert torch.equal(second, 2 * X[:40])
    assert inner.num_tuning_calls == 8
    first, second = outer(X[:50], X[:50])
    assert torch.equal(first, 2 * X[:50])
    assert torch.equal(second, 2 * X[:50])
    assert (outer.num_tuning_calls, inner.num_tuning_calls) == (8, 12)


@pytest.mark.parametrize("settled", [False, True])
def test_a_function_that_calls_itself(settled):
    kernel = autotuned(scale_kernel, configs(16, 32))

    @contextual_autotune(**ONCE)
    def twice(x, again=True):
        y = scale(kernel, x)
        return twice(y[:40], again=False) if again else y

    if settled:
        twice(X[:30], again=False)
    assert torch.equal(twice(X), 4 * X[:40])
    assert torch.equal(twice(X), 4 * X[:40])
    assert len(kernel.cache) == 2 + settled


def test_another_thread_is_not_seen():
    """While one thread tunes, another launches kernels as ever."""
    tuned, other = (autotuned(scale_kernel, configs(16, 32)) for _ in range(2))
    tuning, launched = threading.Event(), threading.Event()
    results = []

    def elsewhere():
        tuning.wait(10)
        other.cache[64, "torch.float32", "torch.float32"] = other.configs[1]
        results.append(scale(other, X))
        launched.set()

    @contextual_autotune(**ONCE)
    def function(x):
        tuning.set()
        launched.wait(10)
        return scale(tuned, x)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    function(X)
    thread.join()
    assert torch.equal(results[0], 2 * X)
    assert len(function.choices()) == 1


def test_two_threads_call_the_same_function():
    function, sizes = scaling(16, 32), (40, 50, 60, 60)
    results = in_threads([lambda n=n: function(X[:n]) for n in sizes])
    assert all(torch.equal(found, 2 * X[:n]) for n, found in zip(sizes, results, strict=True))
    assert len(function.kernel.cache) == 3
    assert Autotuner.run is RUN


class Twice(torch.autograd.Function):
    kernels: tuple = ()

    @staticmethod
    def forward(ctx, x):
        return scale(Twice.kernels[0], x)

    @staticmethod
    def backward(ctx, gradient):
        return scale(Twice.kernels[1], gradient.contiguous())


def test_kernels_of_a_backward_pass_are_tuned(monkeypatch):
    kernels = tuple(autotuned(scale_kernel, configs(16, 32)) for _ in range(2))
    monkeypatch.setattr(Twice, "kernels", kernels)

    @contextual_autotune(**ONCE)
    def step(x):
        x = x.detach().requires_grad_()
        loss = Twice.apply(x).sum()
        loss.backward()
        return loss, x.grad

    for size in (64, 40):
        loss, gradient = step(X[:size])
        assert loss.requires_grad
        assert torch.equal(gradient, torch.full((size,), 2.0))
    assert all(len(kernel.cache) == 2 for kernel in kernels)
    assert step.num_tuning_calls == 8


def test_contexts_that_appear_later_join():
    kernels = [autotuned(scale_kernel, configs(16, 32)) for _ in range(2)]
    spies = [Spy(kernel) for kernel in kernels]
    calls = []

    @contextual_autotune(**ONCE)
    def function(x):
        calls.append(1)
        y = scale(kernels[0], x)
        return scale(kernels[1], y) if len(calls) > 2 else y

    assert torch.equal(function(X), 4 * X)
    assert len(calls) == 7
    assert spies[1].blocks[:4] == [16, 16, 32, 32]


def test_a_kernel_that_runs_every_other_call_is_tuned_bit_by_bit():
    kernel = autotuned(scale_kernel, configs(16, 32))
    calls = []

    @contextual_autotune(**ONCE)
    def function(x):
        calls.append(1)
        return scale(kernel, x) if len(calls) % 2 else x

    while not function.choices():
        before = len(calls)
        function(X)
        assert before < len(calls) < 20
    function(X)
    assert len(kernel.cache) == 1


def test_keys_that_change_in_every_call_do_not_go_on_for_ever():
    kernel = autotuned(scale_kernel, configs(16, 32))
    calls = []

    @contextual_autotune(**ONCE)
    def function():
        calls.append(1)
        return scale(kernel, X[: len(calls)])

    with pytest.warns(TuningWarning, match="each call launches a kernel with a key"):
        function()
    assert len(calls) < 20


def test_a_kernel_that_triton_has_tuned_keeps_its_config():
    function = scaling(16, 32)
    function.kernel.cache[64, "torch.float32", "torch.float32"] = function.kernel.configs[1]
    function(X)
    assert function.spy.blocks == [32]


def test_clear_forgets():
    function = scaling(16, 32)
    function(X)
    function.clear()
    assert not function.kernel.cache
    assert not function.choices()
    assert torch.equal(function(X), 2 * X)
    assert function.num_tuning_calls == 4  # the second time it was on disk


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"n_repeat": 0}, "n_repeat"),
        ({"n_warmup": -1}, "n_warmup"),
        ({"n_repeat": 2.0}, "n_repeat"),
        ({"group": object()}, "group"),
        ({"is_dist": scale}, "parentheses"),
    ],
)
def test_arguments_that_cannot_work(arguments, named):
    with pytest.raises(InvalidArgument, match=named):
        contextual_autotune(**arguments)


def test_what_a_settled_function_adds_to_a_call():
    """A handful of functions, four where no other function is watched, and nothing that loops;
    benchmarks/bench_dispatch.py has their time."""

    def plain(x):
        return x

    decorated = contextual_autotune()(plain)
    decorated(1)
    assert calls_of(lambda: decorated(1)) - calls_of(lambda: plain(1)) <= 8


def calls_of(call):
    """Python functions that ``call`` enters."""
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append(frame) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(seen)


def test_a_call_may_take_longer_than_the_limit_if_the_one_before_did(monkeypatch):
    """The first has the compiler's limit; a training step may be long."""
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_TIMEOUT", "0.2")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_GRACE", "60")
    kernel = autotuned(scale_kernel, configs(16, 32))

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def function(x):
        time.sleep(0.5)
        return scale(kernel, x)

    x = torch.arange(64.0)
    assert torch.equal(function(x), 2 * x)
    assert function.num_tuning_calls == 2


def candidates(count):
    return [Config({"config": triton.Config({"BLOCK": n})}) for n in range(count)]


def run(plan, time_of):
    """All steps, each told its time; (config, timed)."""
    taken = []
    while plan.current is not None:
        step = plan.current
        number = step.config["BLOCK"]
        taken.append((number, step.is_timed))
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
    assert function.num_tuning_calls == 6
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
    assert {each.__module__ for each in original} == {Autotuner.__module__}  # nor by the import
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
    assert 24 * 2 < function.num_tuning_calls + 1 <= (24 * (3 + 5) + 1) / 2


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


async def coroutine(x):
    return x


def generator(x):
    yield x


async def both(x):
    yield x


class Awaited:
    async def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (coroutine, "not a coroutine function"),
        (functools.partial(coroutine, 1), "not a coroutine function"),
        (Awaited(), "not a coroutine function"),
        (generator, "not a generator function"),
        (both, "not a coroutine function"),
        (scale_kernel, "a function that launches the kernel"),
        (autotuned(scale_kernel, configs(16, 32)), "a function that launches the kernel"),
        (5, "is 5, expected a function"),
        (None, "is None, expected a function"),
    ],
)
def test_what_is_no_function_that_computes_is_refused(thing, says):
    with pytest.raises(InvalidArgument, match=says):
        contextual_autotune()(thing)


def test_static_and_class_methods_in_either_order():
    kernels = [autotuned(scale_kernel, configs(16, 32)) for _ in range(4)]
    tune = contextual_autotune(**ONCE)

    class Layer:
        @tune
        @staticmethod
        def first(x):
            return scale(kernels[0], x)

        @staticmethod
        @tune
        def second(x):
            return scale(kernels[1], x)

        @tune
        @classmethod
        def third(cls, x):
            assert cls is Layer
            return scale(kernels[2], x)

        @classmethod
        @tune
        def fourth(cls, x):
            assert cls is Layer
            return scale(kernels[3], x)

    for owner in (Layer, Layer()):
        for method in (owner.first, owner.second, owner.third, owner.fourth):
            assert torch.equal(method(X), 2 * X)
    assert [len(kernel.cache) for kernel in kernels] == [1] * 4


def test_a_partial():
    kernel = autotuned(scale_kernel, configs(16, 32))
    function = contextual_autotune(**ONCE)(functools.partial(scale, kernel))
    assert torch.equal(function(X), 2 * X)
    assert function.num_tuning_calls == 4
    with pytest.raises(pickle.PicklingError, match="not a global of any module"):
        pickle.dumps(function)


@pytest.mark.parametrize("settled", [False, True])
def test_nothing_is_tuned_or_kept_where_nothing_is_computed(settled):
    kernel = autotuned(scale_kernel, configs(16, 32))
    calls = []

    @contextual_autotune(**ONCE)
    def function(x):
        calls.append(x.shape)
        if x.is_meta or isinstance(x, torch._subclasses.FakeTensor):
            return torch.empty_like(x)  # as the fake of a custom operator does
        return scale(kernel, x)

    if settled:
        function(X[:40])
    tuned, calls[:] = function.num_tuning_calls, []
    with FakeTensorMode() as mode:
        assert function(mode.from_tensor(X)).shape == X.shape
    assert function(X.to("meta")).is_meta
    assert torch.export.export(Module(function), (X,)) is not None
    assert function.num_tuning_calls == tuned
    assert len(calls) == 3
    assert torch.equal(function(X), 2 * X)
    assert function.num_tuning_calls == tuned + 4


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("settled", [False, True])
def test_a_launch_on_what_holds_no_data_is_left_to_triton(settled, monkeypatch):
    """In the midst of a call that computes."""
    kernel, other = (autotuned(scale_kernel, configs(16, 32)) for _ in range(2))
    Spy(other)
    monkeypatch.setattr(other.fn, "run", lambda *args, **kwargs: None)
    other._do_bench = lambda *_, **__: [1.0, 1.0, 1.0]
    empty = [X[:30].to("meta"), X[:40].to("meta")]

    @contextual_autotune(**ONCE)
    def function(x):
        scale(other, empty[0])
        return scale(kernel, x)

    for _ in range(1 + settled):
        assert torch.equal(function(X), 2 * X)
        empty.reverse()
    assert [context.split()[0] for context in function.choices()] == [
        "tests.contextual.kernels.scale_kernel"
    ]
    assert function.num_tuning_calls == 4


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
    assert (function.num_tuning_calls, function.choices(), dict(function.kernel.cache)) == (
        0,
        {},
        {},
    )
    assert Autotuner.run is RUN
    assert not list(knobs.cache_dir.get().rglob("*.json"))
    assert not logs.exists()
    switch_on(monkeypatch)
    function(X)
    assert function.num_tuning_calls == 6
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
    assert function.num_tuning_calls == 4
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
