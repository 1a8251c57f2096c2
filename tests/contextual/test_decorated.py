"""What the decorator can be put on, and when the function is called as it is.

With ``TRITON_DIST_AUTOTUNE=0``, each kernel runs with its first config and nothing is kept.
"""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.autotuner import Autotuner

from tests.contextual.kernels import Spy, autotuned, configs, scale, scale_kernel, scaling
from triton_dist import knobs, tune
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import InvalidArgument

X = torch.arange(64.0)
ONCE = {"n_repeat": 1, "n_warmup": 1}


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
    assert function.tuning_calls == 4
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
    tuned, calls[:] = function.tuning_calls, []
    with FakeTensorMode() as mode:
        assert function(mode.from_tensor(X)).shape == X.shape
    assert function(X.to("meta")).is_meta
    assert torch.export.export(Module(function), (X,)) is not None
    assert function.tuning_calls == tuned
    assert len(calls) == 3
    assert torch.equal(function(X), 2 * X)
    assert function.tuning_calls == tuned + 4


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
    assert function.tuning_calls == 4


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
