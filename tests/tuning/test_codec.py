from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import json
import math

import numpy as np
import pytest
import torch
import triton
from hypothesis import given

from tests.tuning.strategies import (
    DTYPES,
    Access,
    Level,
    Method,
    Mode,
    Plan,
    Problem,
    Shape,
    Unit,
    keys,
)
from triton_dist._tuning.values import codec
from triton_dist._tuning.values.show import show


def same(a: object, b: object) -> bool:
    """Equal, and of equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        names = {repr(name): type(name) for name in a}
        return names == {repr(name): type(name) for name in b} and all(
            same(a[name], b[name]) for name in a
        )
    if isinstance(a, (set, frozenset)):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return a == b


@given(keys, keys)
def test_values_have_one_text_if_they_are_the_same(one, other):
    texts = [codec.text(codec.encode(value)) for value in (one, copy.deepcopy(one), other)]
    assert texts[0] == texts[1]
    assert (texts[0] == texts[2]) == same(one, other)
    assert json.loads(texts[0]) == codec.encode(one)


@given(keys)
def test_everything_can_be_shown(value):
    assert isinstance(show(codec.encode(value)), str)


def test_values_that_equal_python_values_are_written_as_those():
    assert codec.encode(torch.zeros(2, 3).shape) == codec.encode((2, 3))
    assert codec.encode(np.int64(3)) == 3
    assert codec.encode(np.float32(0.5)) == 0.5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (range(0, 4, 2), range(0, 3, 2)),
        (range(5, 5), range(0)),
        (range(7, 9, 5), range(7, 8)),
        (range(5, 0, -2), range(5, -1, -2)),
    ],
)
def test_equal_ranges_have_one_text(one, other):
    assert one == other
    assert codec.encode(one) == codec.encode(other)


@pytest.mark.parametrize(
    "values",
    [
        DTYPES,
        [*Method, *Level, *Unit, *Access, *Mode, *Plan.Nested, Access(3), Mode(0)],
        [Plan(None), Plan((None, b"\x00", {1: [Method.PUSH]})), Plan(Plan(None))],
        [math.nan, math.inf, -math.inf, 0.0, -0.0],
        [torch.channels_last, torch.contiguous_format, torch.strided, torch.sparse_coo],
        [range(0), range(3), range(1, 3), range(0, 3, 2), range(3, 0, -1), [0, 1, 2], (0, 3, 1)],
        [1, True, 1.0, "1", (1,), [1], Level.LOW, b"1", frozenset([1]), {1: 1}],
        [None, "None", (), [], {}, frozenset()],
        [torch.float32, "torch.float32", torch.float64],
        [Method.PUSH, Method.PULL, "push"],
        [(1, (2, 3)), ((1, 2), 3), (1, 2, 3)],
        [Shape(1, 2), (1, 2)],
    ],
)
def test_each_of_a_kind_has_its_own_text(values):
    texts = {codec.text(codec.encode({"k": [value, (value,)]})) for value in values}
    assert len(texts) == len(values)


def test_a_digest_does_not_depend_on_the_module_of_a_class_or_function():
    def tree(module):
        return {
            "tuple": [
                {"enum": f"{module}:Method", "name": "PUSH"},
                {"dataclass": f"{module}:Plan", "fields": {"n": {"class": f"{module}:C"}}},
                {"function": f"{module}:hook", "code": "1234"},
                {"namedtuple": f"{module}:Shape", "items": [1]},
            ]
        }

    assert codec.digest(tree("ops")) == codec.digest(tree("renamed.ops"))
    assert codec.digest(tree("ops")) != codec.digest(
        json.loads(json.dumps(tree("ops")).replace("PUSH", "PULL"))
    )


def test_a_string_with_a_colon_is_not_a_name():
    assert codec.digest("a:x") != codec.digest("b:x")
    assert codec.digest({"function": "12"}) != codec.digest({"function": "34"})
    assert codec.digest({"dict": [["enum", "a:x"]]}) != codec.digest({"dict": [["enum", "b:x"]]})


def test_the_order_of_a_set_or_dict_does_not_count():
    assert codec.encode(frozenset("abcdef")) == codec.encode(frozenset("fedcba"))
    assert codec.encode({"a": 1, "b": 2}) == codec.encode({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [torch.zeros(1), object(), (1, object()), slice(1)])
def test_a_value_without_a_stable_text_is_refused(value):
    with pytest.raises(TypeError, match="no stable text"):
        codec.encode(value)


def test_functions_made_in_one_place_differ_by_their_closures():
    def make(n):
        return lambda x: x + n

    assert codec.encode(make(1)) == codec.encode(make(1))
    assert codec.encode(make(1)) != codec.encode(make(2))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ((1, 2.5, None, True, "a"), "(1, 2.5, None, True, 'a')"),
        ((1,), "(1,)"),
        (((8, 4), (4, 1), torch.float16), "((8, 4), (4, 1), torch.float16)"),
        (Method.PUSH, "Method.PUSH"),
        (Problem(3, torch.int8), "Problem(m=3, dtype=torch.int8)"),
        (Shape(1, 2), "Shape(1, 2)"),
        ({"a": [1]}, "{'a': [1]}"),
        (frozenset([1]), "frozenset([1])"),
        (Method, "Method"),
        (b"\x01", "b'\\x01'"),
        (float("inf"), "inf"),
        (torch.device("cuda", 1), "torch.device('cuda:1')"),
        (torch.channels_last, "torch.channels_last"),
        (range(3), "range(0, 3, 1)"),
        (
            triton.Config({"BLOCK_SIZE_M": 64}, num_warps=8, num_stages=3),
            "triton.Config({'BLOCK_SIZE_M': 64}, num_ctas=1, num_stages=3, num_warps=8)",
        ),
    ],
)
def test_values_are_shown_as_they_are_typed(value, shown):
    assert show(codec.encode(value)) == shown


def test_a_partial_in_a_config_is_what_it_calls_and_what_it_gives():
    def partial(*args, **kwargs):
        return codec.encode(functools.partial(*args, **kwargs), binding=False)

    one = partial(same, 1, reach=(2,), near=3)
    assert one == partial(functools.partial(same, 1), near=3, reach=(2,))
    others = [
        partial(same, 1, reach=(2,), near=4),
        partial(same, 2, reach=(2,), near=3),
        partial(same, 1, (2,), near=3),
        partial(copy.copy, 1, reach=(2,), near=3),
    ]
    assert len({codec.text(each) for each in [one, *others]}) == 5
    assert show(one) == "functools.partial(same, 1, near=3, reach=(2,))"
    assert show(partial(len)) == "functools.partial(len)"
    assert not codec.is_exact(functools.partial(len))


def test_an_enum_of_a_function_has_a_text():
    class Local(enum.Enum):
        A = 1

    assert show(codec.encode(Local.A)) == "Local.A"
