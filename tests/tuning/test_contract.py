"""``triton_dist.tune.autotune`` as its users know it, alone in a process."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path

import pytest
import torch

import triton_dist.tune
from tests.tuning import ops
from tests.tuning.ops import counted, spend
from triton_dist import errors
from triton_dist.tune import AutoTuner, autotune, to_hashable

A, B = torch.ones(2, 3), torch.ones(3, 4)


@pytest.fixture(autouse=True)
def _fresh():
    ops.matmul.clear()
    ops.matmul.num_tunings = 0
    ops.ran.clear()
    with counted():
        yield


def make(space, cost=None, key_fn=lambda x, *_, **__: x, **options):
    """A tuned function that lists its runs in ``fn.runs``; 'cost' gives units of 4 ms."""
    runs = []

    def run(x, n=0, **others):
        runs.append(n)
        if cost is not None:
            spend(cost(n) * 4e-3)
        return x, n

    tuned = autotune(space, key_fn, **options)(run)
    tuned.runs = runs
    return tuned


def cache_files() -> list[Path]:
    return sorted(Path(os.environ["TRITON_DIST_CACHE_DIR"]).rglob("*.json"))


def test_the_first_call_tunes_and_returns_the_result():
    torch.testing.assert_close(ops.matmul(A, B), A @ B)
    assert ops.matmul.num_tunings == 1
    assert ops.ran[-1] == ("matmul", 64)
    assert ops.matmul.best_config(A, B)["BLOCK_SIZE_M"] == 64


def test_autotune_false_uses_the_first_config_and_no_cache():
    ops.matmul(A, B, autotune=False)
    assert ops.ran == [("matmul", 128)]
    assert cache_files() == []


def test_the_tuners_keywords_are_never_passed_on():
    tuned = make([{"n": 1}])
    assert tuned(
        1,
        autotune=True,
        autotune_verbose=False,
        autotune_pg=None,
        autotune_allow_arg_overwrite=False,
    ) == (1, 1)


def test_a_cached_result_is_said_in_one_line_with_its_file(capsys, monkeypatch):
    ops.matmul(A, B)
    ops.matmul.clear()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_PRINT", "1")
    ops.matmul(A, B)
    ops.matmul(A, B)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"using the record from {cache_files()[0]}" in line
    assert ops.matmul.num_tunings == 1


def test_a_keyword_that_is_tunable_is_refused_by_name():
    tuned = make([{"n": 1}, {"n": 2, "m": 3}])
    for keyword in ("n", "m"):
        for autotune_on in (True, False):
            with pytest.raises(ValueError, match=f"keyword {keyword} is 5"):
                tuned(1, **{keyword: 5}, autotune=autotune_on)
    assert tuned.runs == []


def test_overwriting_all_there_is_to_tune_tunes_nothing():
    tuned = make([{"n": 2}, {"n": 1}])
    with pytest.warns(errors.TuningWarning):
        tuned(1, n=7, autotune_allow_arg_overwrite=True)
    assert (tuned.runs, tuned.num_tunings) == ([7], 0)


def test_wrong_argument_names_surface_as_they_are():
    tuned = make([{"n": 1}], key_fn=lambda *_, **__: 1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        tuned()
    with pytest.raises(TypeError, match="multiple values for argument 'n'"):
        tuned(1, 2)
    assert tuned.runs == []
    lacking = autotune([{"n": 1}, {"n": 2, "m": 1}], lambda x: x)(lambda x, n: x)
    with pytest.raises(TypeError, match="config_space sets m, which the function lacks"):
        lacking(1)
    assert lacking.num_tunings == 0


def test_an_exception_of_an_iterator_of_configs_surfaces_as_it_is():
    def configs():
        yield {"n": 1}
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        autotune(configs(), key_fn=lambda x: x)


def test_an_iterator_is_a_space():
    tuned = make({"n": n} for n in (1, 2))
    assert len(tuned.config_space) == 2
    tuned(1)


@pytest.mark.parametrize("autotune_on", [True, False])
def test_an_empty_space_is_an_error(autotune_on):
    with pytest.raises(errors.NoValidConfig, match="the config space is empty"):
        make([])(1, autotune=autotune_on)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scope": "node"}, "scope is 'node', expected 'world' or 'rank'"),
        ({"timing": "sundial"}, "timing is 'sundial', expected 'events'"),
        ({"search": "random"}, "search is 'random', expected 'racing'"),
        ({"max_seconds": 0}, "max_seconds is 0"),
        ({"max_seconds": "1"}, "max_seconds is '1'"),
        ({"ignore": 3}, "ignore is 3, expected names"),
        ({"max_trials": 0}, "max_trials is 0"),
        ({"max_trials": 1.5}, "max_trials is 1.5"),
        ({"prune_fn": 3}, "prune_fn is 3, expected a function"),
        ({"version": ""}, "version is .*expected a text that is not empty"),
        ({"version": 1}, "version is 1, expected a text that is not empty"),
        ({"check_fn": "close"}, "check_fn is 'close'"),
        ({"key_fn": None}, "key_fn is None"),
    ],
)
def test_arguments_that_do_not_work_are_refused_at_decoration(options, said):
    with pytest.raises(errors.InvalidArgument, match=said):
        make([{"n": 1}], **options)


def test_it_stays_the_function():
    assert isinstance(ops.matmul, AutoTuner)
    assert ops.matmul.__name__ == "matmul"
    assert ops.matmul.__doc__ == "A @ B."
    assert ops.matmul.__module__ == "tests.tuning.ops"
    assert ops.matmul.__wrapped__ is ops.matmul.fn
    assert list(inspect.signature(ops.matmul).parameters) == ["A", "B", "gemm_config", "bias"]
    assert ops.matmul.key_fn is ops.key_fn
    assert ops.matmul.prune_fn is ops.prune_fn
    assert [config["BLOCK_SIZE_M"] for config in ops.matmul.config_space] == [128, 64, 32]
    assert repr(ops.matmul) == "<autotuned tests.tuning.ops.matmul>"


def test_gradients_flow_through_the_call_and_not_through_the_trials():
    recorded = []

    def run(x, n):
        recorded.append(torch.is_grad_enabled())
        return x * n

    x = torch.ones(2, requires_grad=True)
    autotune([{"n": 3}], to_hashable)(run)(x).sum().backward()
    assert recorded[-1] is True
    assert not any(recorded[:-1])
    assert x.grad.tolist() == [3.0, 3.0]


def test_tune_ahead_gives_the_record_and_calls_use_it():
    tuned = make([{"n": 2}, {"n": 1}], cost=lambda n: n)
    record = tuned.tune(5)
    assert record.best.config == {"n": 1}
    assert len(record.trials[0].outcome.samples) == 6
    assert len(record.trials[1].outcome.samples) == len(record.trials[0].outcome.samples)
    tuned.runs.clear()
    assert tuned(5) == (5, 1)
    assert tuned.runs == [1]
    assert tuned.tune(5) is record


def test_a_second_tuner_of_the_function_finds_the_record_and_clear_looks_again():
    first, second = (make([{"n": 2}, {"n": 1}], cost=lambda n: n) for _ in range(2))
    first(1)
    assert second(1) == (1, 1)
    assert second.num_tunings == 0
    cache_files()[0].unlink()
    second(1)
    assert second.num_tunings == 0
    second.clear()
    second(1)
    assert second.num_tunings == 1


def test_always_tune_replaces_the_record(monkeypatch):
    tuned = make([{"n": 1}])
    tuned(1)
    before = cache_files()[0].stat().st_ino
    tuned.clear()
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "1")
    tuned(1)
    tuned(1)
    assert tuned.num_tunings == 2
    assert cache_files()[0].stat().st_ino != before


def test_a_record_of_an_older_version_is_not_used_and_the_error_says_why(monkeypatch):
    tuned = make([{"n": 1}, {"n": 2}])
    tuned(1)
    (path,) = cache_files()
    tree = json.loads(path.read_text())
    del tree["checksum"]
    tree["fingerprint"] |= {"source": {"run": "0"}, "topology": {"world_size": "2"}}
    path.write_text(json.dumps(tree | {"schema": 2}))
    tuned.clear()
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    said = r"world_size was 2.* source: not comparable, because an older version"
    with pytest.raises(errors.TuningFrozen, match=said) as raised:
        tuned(1)
    assert "run changed" not in str(raised.value)


@pytest.mark.parametrize(
    "undone", [{"restore": ("x",)}, {"reset_fn": lambda x: x.zero_()}], ids=["restore", "reset_fn"]
)
def test_the_first_call_starts_from_what_was_undone(undone):
    @autotune([{"n": 1}, {"n": 2}], lambda x: 0, **undone)
    def add(x, n):
        return x.add_(1)

    assert [add(torch.zeros(1)).item() for _ in "12"] == [1, 1]
    assert add.num_tunings == 1


@pytest.mark.parametrize(
    "options",
    [
        {"prune_fn": lambda config, x: config["n"] == 2},
        {"prune_fn": lambda config, x: config["n"] == 2, "search": "exhaustive"},
        {"prune_fn": lambda config, x: config["n"] == 2, "check_fn": lambda output, _: None},
        {"prune_fn": lambda config, x: config["n"] == 2, "search": "surrogate"},
    ],
)
def test_one_config_that_is_left_runs_once_before_the_call(options):
    tuned = make([{"n": 1}, {"n": 2}, {"n": 3}], cost=lambda n: 1, **options)
    record = tuned.tune(1)
    assert tuned(1) == (1, 2)
    assert tuned.runs == [2, 2]
    assert [trial.config for trial in record.trials if trial.digest == record.best.digest] == [
        {"n": 2}
    ]
    assert record.best.outcome.samples[0] >= 4.0
    tuned = make([{"n": 1}, {"n": 2}], **{**options, "check_fn": lambda *_: False})
    with pytest.raises(errors.NoValidConfig, match="check_fn rejected"):
        tuned(2)


def test_the_reference_survives_a_function_that_reuses_its_output():
    buffer = torch.zeros(3)

    def run(x, factor):
        return buffer.copy_(x * factor)

    tuned = autotune([{"factor": 1.0}, {"factor": 2.0}], to_hashable, check_fn=torch.equal)(run)
    assert tuned.tune(torch.ones(3)).trials[1].outcome.kind == "wrong_result"


def test_a_function_that_changes_its_config_changes_no_other_call():
    import triton

    seen = []

    def run(x, gemm_config):
        seen.append(gemm_config.kwargs["GROUP_SIZE_M"])
        gemm_config.kwargs["GROUP_SIZE_M"] = 99

    tuned = autotune([{"gemm_config": triton.Config({"GROUP_SIZE_M": 8})}], lambda x: x)(run)
    assert tuned.tune(1).best.config["gemm_config"]["triton.Config"] == {"GROUP_SIZE_M": 8}
    assert seen[0] == 8
    seen.clear()
    tuned(2, autotune=False)
    assert seen == [8]


def test_the_door_has_the_names_of_the_contract():
    classes = {"AutoTuner", "Product", "Search"}
    functions = {"autotune", "autotuning", "bucket", "constant", "fine_bucket", "to_hashable"}
    assert set(triton_dist.tune.__all__) == classes | functions
    parameters = inspect.signature(autotune).parameters
    assert list(parameters)[:3] == ["config_space", "key_fn", "prune_fn"]
    assert parameters["prune_fn"].default is None
