from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given

from tests.tuning.fakes import fingerprint
from tests.tuning.strategies import fingerprints
from triton_dist._tuning.values import (
    SCHEMA,
    Config,
    Failure,
    Key,
    Measurement,
    Policy,
    Trial,
    TuningRecord,
    bucket,
    to_hashable,
)
from triton_dist.errors import InvalidArgument, NoValidConfig


def record(*outcomes) -> TuningRecord:
    trials = tuple(Trial.of(Config({"n": n}), outcome) for n, outcome in enumerate(outcomes))
    return TuningRecord(Key.of("ops.run", (1,), "fake"), fingerprint(), trials, "2030", 1.0)


def test_the_best_has_the_lowest_median_and_of_equals_is_the_first():
    samples = [(9.0, 1.0, 2.0), (1.5, 1.5, 1.5), (0.1, 1.5, 7.0)]
    assert record(*[Measurement(each, 0) for each in samples]).best.digest == (
        Config({"n": 1}).digest
    )


def test_a_winner_by_an_earlier_rule_stays_the_winner():
    """A preferred one within 1 % of the best was written down; now the best itself would be."""
    times = [Measurement((each,) * 3, 0) for each in (1.009, 1.0, 1.02)]
    tree = json.loads(json.dumps(record(*times).to_tree()))
    assert tree["best"]["digest"] == tree["trials"][1]["digest"]
    tree["fingerprint"]["policy"]["indifference"] = "0.01"
    tree["best"]["digest"] = tree["trials"][0]["digest"]
    read = TuningRecord.from_tree(tree)
    assert read.best is read.trials[0]
    assert read.to_tree()["best"]["digest"] == tree["trials"][0]["digest"]
    tree["best"]["digest"] = "of no trial"
    with pytest.raises(ValueError, match="KeyError: 'of no trial'"):
        TuningRecord.from_tree(tree)


def test_the_best_of_failures_raises_with_every_cause():
    failed = record(Failure("compile", "no such register", 1), Failure("pruned", "too big"))
    with pytest.raises(NoValidConfig) as raised:
        _ = failed.best
    assert raised.value.causes == {
        "{'n': 0}": "compile on rank 1: no such register",
        "{'n': 1}": "pruned: too big",
    }


def test_a_measurement_without_samples_cannot_be():
    with pytest.raises(ValueError, match="at least one sample"):
        Measurement((), 3)


def mutate(path, value):
    def change(tree):
        *inner, last = path
        for name in inner:
            tree = tree[name]
        if value is None:
            del tree[last]
        else:
            tree[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        mutate(["schema"], SCHEMA + 1),
        mutate(["schema"], None),
        mutate(["function"], None),
        mutate(["fingerprint"], None),
        mutate(["fingerprint", "extra"], {}),
        mutate(["fingerprint", "hardware"], "text"),
        mutate(["fingerprint", "hardware"], {"gpu": [None]}),
        mutate(["fingerprint", "space"], {}),
        mutate(["trials"], []),
        mutate(["trials"], 3),
        mutate(["trials", 0, "samples"], []),
        mutate(["trials", 0, "samples"], ["fast"]),
        mutate(["trials", 0, "values"], {"n": 7}),
        mutate(["trials", 1, "failure", "kind"], "mood"),
        mutate(["best", "digest"], "0" * 32),
        mutate(["seconds"], "long"),
    ],
)
def test_a_changed_tree_is_refused(change):
    tree = json.loads(
        json.dumps(record(Measurement((1.0,), 0), Failure("launch", "x", 0)).to_tree())
    )
    assert TuningRecord.from_tree(json.loads(json.dumps(tree)))
    change(tree)
    with pytest.raises(ValueError):
        TuningRecord.from_tree(tree)


def test_keys_differ_by_function_value_and_hardware():
    one = Key.of("ops.run", (1,), "fake")
    others = [
        Key.of("ops.walk", (1,), "fake"),
        Key.of("ops.run", (True,), "fake"),
        Key.of("ops.run", (1,), "H200"),
    ]
    assert len({key.digest for key in [one, *others]}) == 4
    assert one.function_name == "run"
    assert str(one) == "(1,)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn])
def test_a_tensor_key_comes_back_with_its_types(dtype):
    value = to_hashable(torch.zeros(4, 3, dtype=dtype).T)
    assert value == ((3, 4), (1, 3), dtype)
    assert [type(part) for part in value[:2]] == [tuple, tuple]
    assert str(Key.of("f", value, "fake")) == str(value)


def test_an_optional_tensor_has_a_key_and_nothing_else():
    assert to_hashable(None) is None
    with pytest.raises(InvalidArgument, match="tensor is 'x', expected a tensor, or None"):
        to_hashable("x")


def test_a_tensor_as_key_is_refused_with_the_way_out():
    with pytest.raises(InvalidArgument, match="to_hashable"):
        Key.of("f", torch.zeros(1), "fake")


@pytest.mark.parametrize(
    ("n", "rounded"), [(0, 0), (1, 1), (2, 2), (3, 4), (2048, 2048), (2049, 4096)]
)
def test_bucket(n, rounded):
    assert bucket(n) == rounded


@pytest.mark.parametrize(
    ("n", "rounded"),
    [(0, 0), (2, 2), (3, 4), (256, 256), (257, 384), (384, 384), (385, 512), (3000, 3072)],
)
def test_a_bucket_with_half_steps(n, rounded):
    assert bucket(n, half_steps_from=256) == rounded
    assert bucket(rounded, half_steps_from=256) == rounded


@pytest.mark.parametrize("n", [-1, 4096 / 2, float("nan"), "8", None])
def test_what_is_no_size_has_no_bucket(n):
    with pytest.raises(InvalidArgument, match=f"bucket: n is {n!r}, expected an int, 0 or more"):
        bucket(n)


def test_a_policy_names_what_is_set():
    facts = Policy(max_trials=3).fingerprint_fields()
    assert facts["max_trials"] == "3"
    assert "max_seconds" not in facts


@given(fingerprints)
def test_nothing_differs_from_itself(one):
    assert one.diff(one) == []


@pytest.mark.parametrize(
    ("change", "sentence", "is_patch_level"),
    [
        ({"hardware": {"gpu": "H200", "driver": "550.54"}}, "gpu was fake, is H200", False),
        ({"hardware": {"gpu": "fake", "driver": "550.90.7"}}, "driver was 550.54", True),
        ({"hardware": {"gpu": "fake", "driver": "560.1"}}, "driver was 550.54, is 560.1", False),
        ({"software": {"torch": "2.9.2", "triton": "3.6.0"}}, "torch was 2.9.1+cpu", True),
        ({"software": {"torch": "2.9.1", "triton": "3.6.0"}}, "is 2.9.1", True),
        ({"software": {"torch": "2.10.0", "triton": "3.6.0"}}, "is 2.10.0", False),
        ({"software": {"torch": "2.9.1+cpu", "triton": "3.7.0"}}, "triton was 3.6.0", False),
        ({"software": {"torch": "2.9.1+cpu", "triton": "odd"}}, "is odd", False),
        ({"software": {"torch": "2.9.1+cpu"}}, "triton was 3.6.0, is not known", False),
        ({"topology": {"world_size": "2"}}, "topology: world_size was 1, is 2", False),
        ({"policy": {"timing": "graph"}}, "policy: timing was events, is graph", False),
        ({"source": {"run": "5678"}}, "source: run changed", False),
        ({"source": {"run": "1234", "f": "1"}}, "f is reached now, but was not", False),
        ({"source": {}}, "run was reached, but is not now", False),
        ({"space": "dcba"}, "config space: its digest was abcd, is dcba", False),
    ],
)
def test_each_difference_is_one_sentence(change, sentence, is_patch_level):
    (difference,) = fingerprint().compare(fingerprint(**change))
    assert sentence in difference.sentence
    assert difference.is_patch_level is is_patch_level
