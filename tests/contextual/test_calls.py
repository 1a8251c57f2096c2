"""Nesting, threads, autograd, methods: who is tuned by which call."""

from __future__ import annotations

import pickle
import sys
import threading
import time

import pytest
import torch
from triton.runtime.autotuner import Autotuner

from tests.contextual.kernels import Spy, autotuned, configs, scale, scale_kernel, scaling
from tests.tuning.fakes import in_threads
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
    assert pickled.tuning_calls == 0


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
    assert inner.tuning_calls == 8
    first, second = outer(X[:50], X[:50])
    assert torch.equal(first, 2 * X[:50])
    assert torch.equal(second, 2 * X[:50])
    assert (outer.tuning_calls, inner.tuning_calls) == (8, 12)


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
    assert step.tuning_calls == 8


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
    assert function.tuning_calls == 4  # the second time it was on disk


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
    assert function.tuning_calls == 2
