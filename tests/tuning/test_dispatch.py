"""Calls of a tuned function: what a hit costs, what callers may do with it, values they give."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import pickle
import pydoc
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from benchmarks import bench_dispatch
from triton_dist import errors
from triton_dist._tuning.values import record
from triton_dist.errors import TuningWarning
from triton_dist.timelines.scopes import wrap_calls
from triton_dist.tune import AutoTuner, autotune


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("hit", ["__call__", "key_fn", "function"]),
        ("hit with keywords", ["__call__", "key_fn", "function"]),
        ("hit of a method", ["__get__", "__call__", "<lambda>", "tuned"]),
    ],
)
def test_a_hit_is_a_look_up_after_key_fn(name, called):
    """In steps, which no other process changes; how long they take says bench_dispatch."""
    call = eval(f"lambda: {bench_dispatch.CALLS[name]}", bench_dispatch.callables())
    call()
    calls, instructions = [], 0

    def trace(frame, event, argument):
        nonlocal instructions
        if event == "call":
            frame.f_trace_opcodes = True
            calls.append(frame.f_code.co_name)
        instructions += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    assert calls[1:] == called  # the first is the test's own
    assert instructions < 100


def test_the_benchmark_reports_all_that_it_says(tmp_path, capsys):
    path = tmp_path / "dispatch.json"
    few = ["--repeats", "3", "--number", "10", "--configs", "30"]
    report = bench_dispatch.main([*few, "--json", str(path)])
    assert path.read_text().startswith("{")
    assert set(report["microseconds"]) == {
        "plain call", "key_fn", "dictionary lookup", "hit", "hit of a method", "hit with keywords",
        "contextual",
    }  # fmt: skip
    assert set(report["milliseconds"]) == {"tune all", "tune 20", "look up"}
    assert report["hardware"]["processor"]
    out = capsys.readouterr().out
    assert "dictionary lookup" in out
    assert "ms, 30 configs" in out


def calls_of(function: Callable[[], object]) -> int:
    """How many calls of Python functions, and resumed generators, ``function`` takes."""
    count = 0

    def counts(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counts)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def of_space(size: int, **options: object) -> AutoTuner:
    def run(x, n):
        return x, n

    run.__qualname__ = f"run_{size}"
    return autotune([{"n": n} for n in range(size)], lambda x: x, scope="rank", **options)(run)


def test_a_look_up_reads_one_trial_of_a_record_however_many_it_has(monkeypatch):
    small, large = of_space(100), of_space(1000)
    calls, read = [], []
    read_trial = record._read_trial
    for tuned in (small, large):
        tuned(1)
        tuned.clear()
        with monkeypatch.context() as patched:
            patched.setattr(record, "_read_trial", lambda tree: read.append(1) or read_trial(tree))
            patched.setattr(record, "winner", None)  # who wins is known
            calls.append(calls_of(lambda tuned=tuned: tuned(1)))
        assert tuned.num_tunings == 1
    assert len(read) == 2
    # To see that the winner is in the space takes a step or two a config, in its order.
    assert calls[1] - calls[0] < 4 * 900, calls


def test_a_tuning_takes_so_many_steps_a_config_however_many_there_are():
    def cold(size: int) -> float:
        tuned = of_space(size, max_trials=5)
        len(tuned.config_space)
        return calls_of(lambda: tuned(1)) / size

    few, many = cold(500), cold(2000)
    assert many < 1.2 * few + 5, (few, many)


class Layer:
    factor = 3

    @autotune([{"n": 2}, {"n": 1}], key_fn=lambda self, x: x)
    def method(self, x, n):
        return self.factor * x, n

    @classmethod
    @autotune([{"n": 2}, {"n": 1}], key_fn=lambda cls, x: x)
    def of_class(cls, x, n):
        return cls.factor * x

    @staticmethod
    @autotune([{"n": 2}, {"n": 1}], key_fn=lambda x: x)
    def static(x, n):
        return 2 * x


@autotune([{"n": 2}, {"n": 1}], key_fn=lambda x, y=0: (x, y))
def function(x, y=0, *, n):
    """Doc."""
    return x, y


def test_methods_classmethods_and_staticmethods():
    layer = Layer()
    for _ in range(2):
        assert layer.method(5)[0] == 15
        assert Layer.method(layer, 5)[0] == 15
        assert Layer.of_class(5) == layer.of_class(5) == 15
        assert Layer.static(5) == layer.static(5) == 10
    assert Layer.method.tune(layer, 5).best.config in ({"n": 1}, {"n": 2})
    assert Layer.method.num_tunings == 1
    narrow = type("Narrow", (Layer,), {"factor": 1})
    assert narrow().method(6)[0] == 6
    assert narrow.method is Layer.method


def test_tuning_a_bound_method_says_how_to_give_the_object():
    hint = r"For self it received a value of type int\. .*: Layer\.method\.tune\(self, \.\.\.\)"
    for ahead in (Layer().method.tune, Layer().method.best_config):
        with pytest.raises(TypeError, match=hint):
            ahead(5)
    with pytest.raises(TypeError, match=r"'x'$"):
        Layer().method()
    with pytest.raises(TypeError, match=r"'x'$"):
        function.tune()


def test_copies_and_pickles_are_the_function():
    assert copy.copy(function) is function
    assert copy.deepcopy({"f": function})["f"] is function
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for tuned in (function, Layer.method, Layer.static):
            assert pickle.loads(pickle.dumps(tuned, protocol)) is tuned
        bound = pickle.loads(pickle.dumps(Layer.of_class, protocol))
        assert bound(2) == 6


def test_partial_and_signature():
    assert functools.partial(function, 1, y=2)() == (1, 2)
    assert str(inspect.signature(function)) == "(x, y=0, *, n)"
    assert inspect.unwrap(function) is function.fn
    assert inspect.getdoc(function) == "Doc."
    assert functools.wraps(function)(lambda: None).__name__ == "function"
    assert "function(x, y=0, *, n)\n    Doc." in pydoc.plain(pydoc.render_doc(function))
    assert "method(x, n) method of" in pydoc.plain(pydoc.render_doc(Layer().method))


def of_self(self, *, fn, n):
    return self, fn


def of_key(key, *, _m, n):
    return key, _m


def of_args(args, *, kwargs, n):
    return args, kwargs


@pytest.mark.parametrize("run", [of_self, of_key, of_args])
@pytest.mark.parametrize("sized", [False, True])
def test_a_parameter_may_have_any_name(run, sized):
    names = [name for name in inspect.signature(run).parameters if name != "n"]
    tuned = autotune(
        [{"n": 1}, {"n": 2}], lambda **sizes: tuple(sizes.values()), sizes=names if sized else ()
    )(run)
    arguments = dict(zip(names, (600, 700), strict=True))
    with wrap_calls(lambda *_: nullcontext()):
        assert tuned(**arguments) == tuned(**arguments) == (600, 700)
    assert tuned.tune(**arguments).best.config == {"n": tuned.best_config(**arguments)["n"]}
    assert tuned.num_tunings == 1


def test_a_fixed_value_may_have_any_name():
    def run(x, config, n):
        return x, config, n

    tuned = autotune(
        [{"n": n, "config": 1} for n in (1, 2)], lambda x: x, lambda whole, x: whole["n"] == 2
    )(run)
    with pytest.warns(TuningWarning, match="config=5"):
        assert tuned(x=3, config=5, autotune_allow_arg_overwrite=True) == (3, 5, 2)


Key = collections.namedtuple("Key", "layer tokens")


def keyed(key_fn=lambda layer, tokens: (Key(layer, tokens), "bf16"), **options):
    return autotune([{"n": 1}], key_fn, **options)(lambda layer, tokens, n: n)


def test_a_key_that_is_new_in_each_call_is_reported_once():
    tuned = keyed()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(34):  # twice as many as the first report takes
            tuned("attention", 4000 + 7 * step)
    (warning,) = warned
    said = r"16 consecutive keys .* key\[0\]\.tokens, latest values 4119, 4126, 4133\. .*sizes="
    assert re.search(said, str(warning.message))
    assert warning.filename == __file__
    assert tuned.num_tunings == 34


@pytest.mark.parametrize("case", ["called again", "ahead", "a size"])
def test_keys_that_come_again_are_not_reported(case):
    tuned = keyed()
    if case == "a size":
        tuned = keyed(lambda layer, tokens: layer, sizes=("tokens",))
    first = ("attention", 4000)
    for number in range(20):
        arguments = ("attention", 4000 + 300 * number)
        if case == "ahead":
            tuned.tune(*arguments)
            continue
        tuned(*arguments)
        if case == "called again" and number % 10 == 9:
            tuned(*arguments)
            steps = [calls_of(lambda each=each: tuned(*each)) for each in (first, arguments)]
            assert steps[0] == steps[1]  # both are hits
    assert tuned.num_tunings == 20


def overwritable(**options):
    """Two tunable names; lists what prune_fn, prepare_fn and the function are called with."""
    seen = {"prune": [], "prepare": [], "run": []}

    def prune(config, x, **kwargs):
        seen["prune"].append((config["n"], config["m"], kwargs))
        return config["m"] != 9

    def prepare(x, n, m):
        seen["prepare"].append((n, m))

    def run(x, n, m):
        seen["run"].append((n, m))
        return n, m

    space = [{"n": n, "m": m} for n in (1, 2, 3) for m in (1, 2, 9)]
    tuned = autotune(space, lambda x, **_: x, prune, prepare_fn=prepare, **options)(run)
    tuned.seen = seen
    return tuned


@pytest.mark.filterwarnings("ignore::triton_dist.errors.TuningWarning")
def test_a_given_value_holds_while_tuning():
    tuned = overwritable()
    n, m = tuned(1, n=7, autotune_allow_arg_overwrite=True)
    assert n == 7
    assert {n for n, _ in tuned.seen["run"]} == {7}
    assert {m for _, m in tuned.seen["run"]} == {1, 2}
    assert tuned.seen["prepare"] == [(7, 1), (7, 2)]
    # The space without n: each m once. prune_fn sees whole configs.
    assert tuned.seen["prune"] == [(7, m, {}) for m in (1, 2, 9)]
    record = tuned.tune(1, n=7, autotune_allow_arg_overwrite=True)
    assert sorted(trial.config["m"] for trial in record.trials) == [1, 2, 9]
    assert all("n" not in trial.config for trial in record.trials)
    assert dict(tuned.best_config(1, n=7, autotune_allow_arg_overwrite=True)) == {"m": m}


@pytest.mark.filterwarnings("ignore::triton_dist.errors.TuningWarning")
def test_each_given_value_is_a_key_of_its_own():
    tuned = overwritable()
    tuned(1)
    tuned(1, n=7, autotune_allow_arg_overwrite=True)
    tuned(1, n=8, autotune_allow_arg_overwrite=True)
    tuned(1, m=7, autotune_allow_arg_overwrite=True)
    assert tuned.num_tunings == 4
    runs = len(tuned.seen["run"])
    tuned(1, n=7, autotune_allow_arg_overwrite=True)
    tuned(1)
    assert (tuned.num_tunings, len(tuned.seen["run"])) == (4, runs + 2)
    tuned.clear()
    tuned(1, n=7, autotune_allow_arg_overwrite=True)
    assert tuned.num_tunings == 4  # from the disk


def test_without_tuning_a_given_value_replaces_that_of_the_default():
    tuned = overwritable()
    with pytest.warns(errors.TuningWarning, match="n=7 overwrites"):
        assert tuned(1, n=7, autotune=False, autotune_allow_arg_overwrite=True) == (7, 1)
    assert tuned.num_tunings == 0


def test_a_warning_for_each_line_that_overwrites():
    tuned = overwritable()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            tuned(1, n=7, autotune_allow_arg_overwrite=True)
        tuned(1, n=7, autotune_allow_arg_overwrite=True)
    lines = [warning.lineno for warning in caught]
    assert len(lines) == 2
    assert lines[1] == lines[0] + 1
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.filterwarnings("ignore::triton_dist.errors.TuningWarning")
def test_a_given_value_that_cannot_be_told_from_others_is_refused():
    tuned = overwritable()
    with pytest.raises(errors.InvalidArgument, match="value 'n'"):
        tuned(1, n=object(), autotune_allow_arg_overwrite=True)
