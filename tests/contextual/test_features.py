"""Features of ``triton.autotune`` in a contextual tuning, and subclasses of ``Autotuner`` with a
``run`` of their own."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

import triton_dist
from tests.contextual.kernels import (
    LoneTuner,
    Spy,
    SuperTuner,
    TableTuner,
    add,
    add_kernel,
    autotuned,
    configs,
    scale,
    scale_kernel,
    scale_optionally,
    scale_optionally_kernel,
    sum_kernel,
    total,
    tuned_by,
)
from triton_dist._tuning.engine.contextual.kernel_tuning import as_config
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import InvalidArgument, TuningWarning

X = torch.arange(64.0)


def tune(kernel, run=scale, *args, **options):
    """A spy on ``kernel``, after it was tuned in a function that does nothing else."""
    spy = Spy(kernel)
    options = {"n_repeat": 1, "n_warmup": 1, **options}
    result = contextual_autotune(**options)(lambda: run(kernel, *(args or (X,))))()
    return spy, result


def test_early_prune():
    seen = []

    def prune(configs, nargs, **kwargs):
        seen.append((nargs["n"], sorted(kwargs)))
        return [config for config in configs if config.kwargs["BLOCK"] > 16]

    kernel = autotuned(
        scale_kernel, configs(16, 32, 64), prune_configs_by={"early_config_prune": prune}
    )
    spy, _ = tune(kernel)
    assert spy.blocks[:4] == [32, 32, 64, 64]
    assert seen[0][0] == 64


# The blocks of the kernel, how they are pruned, and the blocks of its first launches.
PRUNED = {
    "a model of the time": (
        (16, 32, 64), {"perf_model": lambda BLOCK, **_: -BLOCK, "top_k": 2}, [64, 64, 32, 32]),
    "configs that pruning makes": (
        (16, 32), {"early_config_prune": lambda *_, **__: configs(64, 128)}, [64, 64, 128, 128]),
    "one config, which needs no tuning": (
        (16, 32), {"early_config_prune": lambda all_, *_, **__: all_[1:]}, [32]),
}  # fmt: skip


@pytest.mark.parametrize("case", PRUNED)
def test_pruning(case):
    blocks, prune, expected = PRUNED[case]
    spy, result = tune(autotuned(scale_kernel, configs(*blocks), prune_configs_by=prune))
    assert spy.blocks[: len(expected)] == expected
    assert (len(spy.blocks) == 1) is (len(expected) == 1)
    assert torch.equal(result, 2 * X)


def test_restore_value_undoes_each_call_but_the_last():
    kernel = autotuned(add_kernel, configs(16, 32), restore_value=["x_ptr"])
    other = autotuned(scale_kernel, configs(16, 32, 64))
    x, seen = X.clone(), []

    @contextual_autotune(n_repeat=1, n_warmup=1)
    def function():
        seen.append(add(kernel, x).clone())
        return scale(other, x)

    assert torch.equal(function(), 2 * (X + 1))
    assert torch.equal(x, X + 1)
    assert len(seen) == 7
    assert all(torch.equal(each, X + 1) for each in seen)


def test_restore_value_when_launched_twice_in_a_call():
    kernel = autotuned(add_kernel, configs(16, 32), restore_value=["x_ptr"])
    x = X.clone()

    @contextual_autotune(n_repeat=1, n_warmup=1)
    def function():
        add(kernel, x)
        return add(kernel, x)

    assert torch.equal(function(), X + 2)


def test_restore_value_of_a_kernel_whose_config_is_known():
    kernel = autotuned(add_kernel, configs(16, 32), restore_value=["x_ptr"])
    other = autotuned(scale_kernel, configs(16, 32))
    x = X.clone()
    contextual_autotune(n_repeat=1, n_warmup=0)(lambda: add(kernel, x))()
    x.copy_(X)
    contextual_autotune()(lambda: scale(other, add(kernel, x)))()
    assert torch.equal(x, X + 1)


def test_reset_to_zero():
    kernel = autotuned(sum_kernel, configs(16, 32), reset_to_zero=["total_ptr"])
    other = autotuned(scale_kernel, configs(16, 32, 64))
    out, seen = torch.full((1,), 5.0), []

    @contextual_autotune(n_repeat=1, n_warmup=1)
    def function():
        seen.append(float(total(kernel, X, out)))
        scale(other, X)

    function()
    assert seen == [float(X.sum())] * 7


@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value"])
def test_an_optional_buffer_that_is_none_is_left_alone(option):
    """In each trial, in the launch of the winner, and in a launch of a config that is known."""
    kernel = autotuned(scale_optionally_kernel, configs(16, 32), **{option: ["total_ptr"]})
    function = contextual_autotune(n_repeat=1, n_warmup=1)(scale_optionally)
    for _ in range(2):
        assert torch.equal(function(kernel, X, None), 2 * X)
    out = torch.full((1,), 5.0)
    function(kernel, torch.ones(32), out)
    assert float(out) in ((1.0, 2.0) if option == "reset_to_zero" else (6.0, 7.0))


@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value"])
def test_a_buffer_that_is_no_argument_is_refused(option):
    kernel = autotuned(add_kernel, configs(16, 32), **{option: ["x_pt"]})
    said = f"add_kernel: {option} is 'x_pt', expected arguments of the kernel: x_ptr, n, BLOCK"
    with pytest.raises(InvalidArgument, match=said):
        contextual_autotune()(add)(kernel, X.clone())


def test_hooks_of_the_tuner():
    events = []

    def before(arguments, reset_only=False):
        events.append(("pre", reset_only))
        assert arguments["BLOCK"] in (16, 32)

    def after(arguments, exception):
        events.append(("post", exception))

    kernel = autotuned(scale_kernel, configs(16, 32), pre_hook=before, post_hook=after)
    tune(kernel)
    assert events == [("pre", False), ("post", None)] * 4 + [("pre", True)]


def test_hook_of_a_config_runs_before_each_launch_of_it():
    launched = []

    def note(arguments):
        launched.append(arguments["BLOCK"])
        arguments["y_ptr"].fill_(-1)

    kernel = autotuned(scale_kernel, configs(16, 32, pre_hook=note))
    spy, result = tune(kernel)
    assert launched == spy.blocks
    assert torch.equal(result, 2 * X)


@pytest.mark.parametrize("above", [False, True])
def test_heuristics_below_and_above(above):
    tune_it = triton.autotune([triton.Config({"HALF": 8}), triton.Config({"HALF": 16})], ["n"])
    if above:
        tuner = tune_it(half_kernel)
        kernel = triton.heuristics({"BLOCK": lambda arguments: 32})(tuner)
    else:
        by_config = {"BLOCK": lambda arguments: 2 * arguments["HALF"]}
        tuner = kernel = tune_it(triton.heuristics(by_config)(half_kernel))
    result = contextual_autotune(n_repeat=1)(lambda: scale_by_half(kernel, X))()
    assert torch.equal(result, 2 * X)
    assert len(tuner.cache) == 1


@triton_dist.jit
def half_kernel(x_ptr, y_ptr, n, HALF: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index, mask=index < n) * 2, mask=index < n)


def scale_by_half(kernel, x):
    y = torch.empty_like(x)
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y


def test_options_of_a_config_reach_the_launch():
    seen = []

    class Note(Spy):
        def run(self, *args, **kwargs):
            seen.append({name: kwargs.get(name) for name in ("num_ctas", "maxnreg", "ir_override")})
            return super().run(*args, **kwargs)

    candidates = [
        triton.Config({"BLOCK": 16}, num_ctas=2, maxnreg=64, ir_override="kernel.ttgir"),
        triton.Config({"BLOCK": 32}),
    ]
    kernel = autotuned(scale_kernel, candidates)
    Note(kernel)
    contextual_autotune(n_repeat=1, n_warmup=0)(lambda: scale(kernel, X))()
    assert seen[0] == {"num_ctas": 2, "maxnreg": 64, "ir_override": "kernel.ttgir"}
    assert seen[1]["maxnreg"] is None


def test_configs_that_differ_in_what_their_hooks_bind():
    def fill(value):
        return lambda arguments: arguments["y_ptr"].fill_(value)

    hooks = [fill(1), fill(2), fill(torch.zeros(()))]
    kernel = autotuned(scale_kernel, [c for hook in hooks for c in configs(16, pre_hook=hook)])
    spy, result = tune(kernel)
    assert torch.equal(result, 2 * X)
    assert len(spy.blocks) == 3 * 2 + 1
    assert next(iter(kernel.cache.values())).pre_hook in hooks


def test_a_hook_that_has_no_stable_text():
    class Hook:
        def __call__(self, arguments):
            arguments["y_ptr"].fill_(0)

    kernel = autotuned(scale_kernel, configs(16, 32, pre_hook=Hook()))
    _, result = tune(kernel)
    assert torch.equal(result, 2 * X)
    assert next(iter(kernel.cache.values())).pre_hook is not None


def test_what_a_partial_hook_is_given_may_differ_by_rank():
    def fill(rank, arguments):
        arguments["y_ptr"].fill_(rank)

    hooked = [triton.Config({}, pre_hook=functools.partial(fill, rank)) for rank in (0, 1)]
    assert len({as_config(config) for config in hooked}) == 1


def test_what_triton_leaves_on_a_tuned_kernel(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "1")
    kernel = autotuned(scale_kernel, configs(16, 32))
    tune(kernel)
    assert len(kernel.configs_timings) == 2
    assert kernel.best_config is next(iter(kernel.cache.values()))
    assert kernel.nargs is None
    printed = capsys.readouterr().out
    assert "Triton autotuning for function scale_kernel" in printed
    assert f"best config selected: {kernel.best_config}" in printed


@pytest.mark.skipif(
    not hasattr(triton.knobs.autotuning, "listener"), reason="Triton has a listener from 3.8 on"
)
def test_the_listener_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(triton.knobs.autotuning, "listener", lambda **all_: told.append(all_))
    kernel = autotuned(scale_kernel, configs(16, 32))
    tune(kernel)
    (report,) = told
    assert report["best_config"] is kernel.best_config
    assert len(report["configs_timings"]) == 2


@pytest.mark.skipif(
    triton_dist.runtime.triton_compat.triton_version().release >= (3, 9),
    reason="Triton refuses such names from 3.9 on",
)
def test_key_names_that_are_no_arguments():
    kernel = autotuned(scale_kernel, configs(16, 32), key=["n", "M"])
    with pytest.warns(TuningWarning, match="key names 'M' are not arguments"):
        tune(kernel)


def test_warmup_of_a_kernel_inside_is_not_a_launch():
    kernel = autotuned(scale_kernel, configs(16, 32))

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def function():
        kernel.warmup(X, X, 64, grid=(4,))
        return scale(kernel, X)

    for _ in range(2):
        assert torch.equal(function(), 2 * X)
    assert function.num_tuning_calls == 2


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
    assert function.num_tuning_calls == 4
    assert spy.blocks[:4] == [16, 16, 32, 32]
    (winner,) = function.choices().values()
    assert torch.equal(function(X), 2 * X)  # settled: no more than a launch
    assert spy.blocks[4:] == [winner.kwargs["BLOCK"]] * 2
    assert kernel.best_config is winner
    assert torch.equal(function(X[:40]), 2 * X[:40])  # a new key, in a settled function
    assert function.num_tuning_calls == 8
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
    assert function.num_tuning_calls == 8
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
    assert "kernels.LoneTuner, the class of scale_kernel, overrides run()" in str(warning.message)
    assert function.num_tuning_calls == 0
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
    assert function.num_tuning_calls == 4


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
