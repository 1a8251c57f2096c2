"""The arguments of a call are freed when it ends, with the cyclic garbage collector off."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tests.contextual.kernels import Spy, add, add_kernel, autotuned, configs, scale, scale_kernel
from tests.tuning.fakes import Rank, in_threads, thread_ranks
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import NoValidConfig, TuningWarning
from triton_dist.tune import autotune


class Call:
    """A call with tensors that only weak references know afterwards."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def new(self, size: int = 4) -> torch.Tensor:
        tensor = torch.ones(size)
        self.alive.append(weakref.ref(tensor))
        return tensor

    def make(self, function, *args, **kwargs):
        """The type of what ``function`` raised; its result otherwise is dropped."""
        try:
            function(*args, **kwargs)
        except BaseException as error:
            return type(error)
        return None

    def kept(self) -> int:
        return sum(each() is not None for each in self.alive)


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_LOG_DIR", str(tmp_path))
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield Call()
    finally:
        gc.enable()


def fail(*args, **kwargs):
    raise KeyError("mine")


def returns_false(*args, **kwargs):
    return False


class Fails:
    """Raises in the calls with these numbers; what it allocates is looked at too."""

    def __init__(self, call, *numbers, error=ValueError, n=None):
        self.call, self.numbers, self.error, self.n, self.count = call, numbers, error, n, 0

    def __call__(self, x, y=None, n=0):
        scratch = self.call.new(1)
        self.count += 1
        if self.count in self.numbers or n == self.n:
            raise self.error("mine")
        return x + scratch + n


ALL = range(1, 1000)
CASES = {
    "tuned": ({}, (), None),
    "a config fails in its first run": ({}, (1,), None),
    "a config fails in a later run": ({}, (3,), None),
    "all fail": ({}, ALL, NoValidConfig),
    "an interrupt": ({"error": KeyboardInterrupt}, (3,), KeyboardInterrupt),
    "prune_fn": ({"prune_fn": lambda config, x, y: config["n"] > 1}, (), None),
    "prune_fn raises": ({"prune_fn": fail}, (), KeyError),
    "prune_fn leaves nothing": ({"prune_fn": returns_false}, (), NoValidConfig),
    "check_fn": ({"check_fn": lambda output, reference: True}, (), None),
    "check_fn raises": ({"check_fn": fail}, (), NoValidConfig),
    "check_fn rejects": ({"check_fn": returns_false}, (), NoValidConfig),
    "reset_fn": ({"reset_fn": lambda x, y: None}, (), None),
    "reset_fn raises": ({"reset_fn": fail}, (), Exception),
    "recover_fn raises": ({"recover_fn": fail}, (3,), Exception),
    "prepare_fn": ({"prepare_fn": lambda x, y, n: None}, (), None),
    "prepare_fn raises": ({"prepare_fn": fail}, (), NoValidConfig),
    "input_variants_fn": ({"input_variants_fn": lambda x, y: [{"x": x + 1}]}, (), None),
    "input_variants_fn raises": ({"input_variants_fn": fail}, (), KeyError),
    "agree_fn": ({"agree_fn": lambda x, y: x.shape}, (), None),
    "agree_fn raises": ({"agree_fn": fail}, (), KeyError),
    "key_fn raises": ({"key_fn": fail}, (), KeyError),
    "restore": ({"restore": ("x", "y")}, (), None),
    "graph": ({"timing": "graph"}, (3,), None),
    "surrogate": ({"search": "surrogate"}, (3,), None),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_first_call_was_given_and_allocated_is_freed(call, name):
    options, numbers, raised = CASES[name]
    options = dict(options)
    function = Fails(call, *numbers, error=options.pop("error", ValueError))
    key_fn = options.pop("key_fn", lambda x, y: x.shape)
    tuned = autotune([{"n": n} for n in (1, 2, 3)], key_fn, scope="rank", **options)(function)
    error = call.make(tuned, call.new(), y=[call.new()])
    assert issubclass(error, raised) if raised else error is None
    assert call.kept() == 0


def test_a_warning_that_is_an_error(call):
    warnings.simplefilter("error")
    tuned = autotune([{"n": n} for n in (1, 2, 3)], lambda x: x.shape, scope="rank")
    assert call.make(tuned(Fails(call, 1, 2)), call.new()) is TuningWarning
    assert call.kept() == 0


def test_a_recorded_winner_that_fails_today(call):
    function = Fails(call, error=lambda text: OutOfResources(2, 1, text))
    tuned = autotune([{"n": 1}, {"n": 2}], lambda x: x.shape, scope="rank")(function)
    call.make(tuned, call.new())
    tuned.clear()
    function.numbers = (function.count + 1,)
    assert call.make(tuned, call.new()) is None
    assert tuned.num_tunings == 2
    assert call.kept() == 0


@pytest.mark.parametrize("algorithm", ["tune", "best_config", "overwritten", "refused"])
def test_other_ways_to_a_first_call(call, algorithm):
    tuned = autotune([{"n": 1}, {"n": 2}], lambda x: x.shape, scope="rank")(Fails(call))
    extra = {"overwritten": {"n": 1, "autotune_allow_arg_overwrite": True}, "refused": {"n": 1}}
    function = {"tune": tuned.tune, "best_config": tuned.best_config}.get(algorithm, tuned)
    call.make(function, call.new(), **extra.get(algorithm, {}))
    assert call.kept() == 0


def test_calls_that_find_a_record(call, monkeypatch):
    function = Fails(call)
    tuned = autotune([{"n": 1}, {"n": 2}], lambda x: x.shape, scope="rank")(function)
    call.make(tuned, call.new())
    tuned.clear()
    call.make(tuned, call.new())
    call.make(tuned, call.new())
    function.numbers = ALL
    assert call.make(tuned, call.new()) is ValueError
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    call.make(tuned, call.new(5))
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "0")
    call.make(tuned, call.new(6))
    assert tuned.num_tunings == 1
    assert call.kept() == 0


@pytest.mark.parametrize("raises", ["prune_fn", "fallback_fn", "waves_fn", "nothing"])
def test_sizes_that_learn_from_others(call, monkeypatch, raises):
    late = []
    hooks = {
        "prune_fn": lambda config, x, size: True,
        "fallback_fn": lambda config: config["n"] == 1,
        "waves_fn": lambda key, config: 1.5,
    }
    if raises != "nothing":
        usual = hooks[raises]
        hooks[raises] = lambda *args: fail() if late else usual(*args)

    @autotune(
        [{"n": n} for n in (1, 2, 3)], lambda x, size: 1, scope="rank", sizes=("size",), **hooks
    )
    def tuned(x, size, n):
        return x + n

    call.make(tuned, call.new(), 64)
    call.make(tuned, call.new(), 90)
    late.append(True)
    call.make(tuned, call.new(), 70)
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    call.make(tuned, call.new(), 100)
    assert call.kept() == 0


@pytest.mark.parametrize("end", ["tuned", "differ", "late", "raises"])
def test_ranks_that_tune_together(call, end):
    def cost(rank, config):
        if end == "raises" and rank == 1:
            raise ValueError("mine")
        return config["n"]

    ranks = [Rank(each, [{"n": 1}, {"n": 2}], cost) for each in thread_ranks(2, 0.5)]

    def body(rank):
        x = call.new()
        rank.key_fn = rank.tuned.key_fn = lambda x: rank.ranks.rank if end == "differ" else 1
        if not (end == "late" and rank.ranks.rank == 1):
            call.make(rank.tuned, x)
        rank.x = None

    in_threads([lambda rank=rank: body(rank) for rank in ranks])
    assert call.kept() == 0


def returns_nothing(configs, named_args, **kwargs):
    return []


CONTEXTUAL = {
    "tuned": ({}, (), (), None),
    "a config fails": ({}, (16,), (), None),
    "all fail": ({}, (16, 32), (), NoValidConfig),
    "the function raises": ({}, (), (3,), ValueError),
    "the function raises at once": ({}, (), ALL, ValueError),
    "an interrupt": ({"error": KeyboardInterrupt}, (), (3,), KeyboardInterrupt),
    "pruning": ({"prune": lambda configs, *_, **__: configs[:1]}, (), (), None),
    "pruning raises": ({"prune": fail}, (), (), KeyError),
    "pruning leaves nothing": ({"prune": returns_nothing}, (), (), Exception),
    "restore_value": ({"restore_value": ["x_ptr"]}, (), (), None),
}


def decorated(call, failing=(), numbers=(), error=ValueError, prune=None, **options):
    if prune is not None:
        options["prune_configs_by"] = {"early_config_prune": prune}
    restored = options.pop("restore_value", ())
    kernel = autotuned(scale_kernel, configs(16, 32), **options)
    counter = autotuned(add_kernel, configs(16, 32), restore_value=list(restored))
    spy, body = Spy(kernel, *failing), Fails(call, *numbers, error=error)

    @contextual_autotune(n_repeat=2, n_warmup=1)
    def function(x):
        add(counter, x)
        return body(scale(kernel, x))

    function.spy, function.body = spy, body
    return function


@pytest.mark.parametrize("name", CONTEXTUAL)
def test_what_a_contextual_call_was_given_and_allocated_is_freed(call, name):
    options, failing, numbers, raised = CONTEXTUAL[name]
    function = decorated(call, failing, numbers, **options)
    error = call.make(function, call.new(64))
    assert issubclass(error, raised) if raised else error is None
    assert call.kept() == 0


@pytest.mark.parametrize("name", CONTEXTUAL)
def test_a_call_that_meets_a_new_key_in_its_middle(call, name):
    options, failing, numbers, raised = CONTEXTUAL[name]
    function = decorated(call)
    call.make(function, call.new(64))
    if "prune" not in options:
        function.spy.fails = failing
        function.body.count, function.body.numbers = 0, numbers
        function.body.error = options.get("error", ValueError)
        error = call.make(function, call.new(50))
        assert issubclass(error, raised) if raised else error is None
    assert call.kept() == 0


def test_contextual_calls_that_find_records(call, monkeypatch):
    function = decorated(call)
    for _ in range(2):
        call.make(function, call.new(64))
        function.clear()
    call.make(function, call.new(64))
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    call.make(function, call.new(50))
    function.clear()
    call.make(function, call.new(51))
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "0")
    call.make(function, call.new(52))
    assert call.kept() == 0
