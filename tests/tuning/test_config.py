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
import triton.language as tl
from hypothesis import given, settings

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
    configs,
    keys,
)
from triton_dist._tuning.values import Config, ConfigSpace, codec
from triton_dist._tuning.values.show import show
from triton_dist.errors import InvalidArgument, TuningWarning

GEMM = triton.Config({"BLOCK_SIZE_M": 128, "GROUP_SIZE_M": 8}, num_warps=8, num_stages=3)


def config() -> Config:
    return Config({"gemm_config": GEMM, "method": Method.PUSH, "chunks": 2})


def test_it_reads_as_the_dict_then_as_its_only_triton_config():
    assert config()["method"] is Method.PUSH
    assert dict(config()).keys() == {"gemm_config", "method", "chunks"}
    assert config().get("absent") is None
    of_triton = {"BLOCK_SIZE_M": 128, "num_warps": 8, "num_stages": 3, "num_ctas": 1}
    of_triton["maxnreg"] = None
    assert {name: config()[name] for name in of_triton} == of_triton
    assert Config({"c": GEMM, "num_warps": 2})["num_warps"] == 2
    two = Config({"a": GEMM, "b": GEMM})
    for one, name in ((config(), "absent"), (config(), "kwargs"), (two, "BLOCK_SIZE_M")):
        with pytest.raises(KeyError, match=name):
            one[name]


def test_it_prints_as_it_would_be_typed():
    assert repr(Config({"gemm_config": GEMM, "method": Method.PULL})) == (
        "{'gemm_config': triton.Config({'BLOCK_SIZE_M': 128, 'GROUP_SIZE_M': 8}, "
        "num_ctas=1, num_stages=3, num_warps=8), 'method': Method.PULL}"
    )


def test_changing_a_triton_config_changes_no_candidate():
    mine = triton.Config({"GROUP_SIZE_M": 8}, num_warps=4)
    candidate = Config({"c": mine})
    before = candidate.digest
    mine.kwargs["GROUP_SIZE_M"] = 1
    candidate.arguments()["c"].kwargs["GROUP_SIZE_M"] = 2
    assert candidate["GROUP_SIZE_M"] == 8
    assert candidate.arguments()["c"].kwargs == {"GROUP_SIZE_M": 8}
    assert Config(candidate.arguments()).digest == before


def test_a_pre_hook_reaches_the_call_and_counts():
    def hook(arguments):
        return None

    hooked = Config({"c": triton.Config({"A": 1}, pre_hook=hook)})
    assert hooked.arguments()["c"].pre_hook is hook
    assert list(hooked.functions()) == [hook]
    assert hooked != Config({"c": triton.Config({"A": 1})})


def make_hook(bound):
    def hook(arguments):
        arguments["x"] = bound

    return hook


def hooked(*bound):
    return [{"c": triton.Config({"A": 1}, pre_hook=make_hook(each))} for each in bound]


def test_what_a_hook_binds_does_not_count_in_the_digest():
    """Ranks may bind a rank, a device or a tensor: the fingerprint compares that."""
    digests = {ConfigSpace(hooked(each)).digest for each in (0, 1, torch.zeros(1))}
    assert len(digests) == 1
    assert ConfigSpace([{"c": triton.Config({"A": 1})}]).digest not in digests


@pytest.mark.parametrize("bound", [(8, 16, 8), (torch.zeros(1), torch.ones(1))])
def test_configs_that_differ_in_what_their_hooks_bind_are_several(bound):
    space = ConfigSpace(hooked(*bound))
    assert len({config.digest for config in space}) == len(space) == 2
    for config, expected in zip(space, bound, strict=False):
        arguments = {}
        config["c"].pre_hook(arguments)
        assert arguments["x"] is expected
        assert codec.digest(config.tree) == config.digest
    again = ConfigSpace(hooked(*bound))
    assert [config.digest for config in again] == [config.digest for config in space]


def test_a_partial_is_a_value_whose_functions_and_classes_count():
    hook = make_hook(8)
    value = functools.partial(hook, mode=Method.PUSH)
    candidate = Config({"epilogue": value})
    assert candidate.arguments()["epilogue"] is value
    assert (list(candidate.functions()), list(candidate.classes())) == ([hook], [Method])
    assert candidate == Config({"epilogue": functools.partial(make_hook(8), mode=Method.PUSH)})
    assert candidate != Config({"epilogue": functools.partial(hook, mode=Method.PULL)})
    bound = [{"epilogue": functools.partial(make_hook(each))} for each in (8, 16, 8)]
    assert len(ConfigSpace(bound)) == 2


def test_a_partial_of_what_has_no_text_is_refused_with_what_to_do():
    with pytest.raises(InvalidArgument, match=r"'p' .*functools\.partial of these"):
        Config({"p": functools.partial(make_hook, torch.zeros(1), object())})


@given(configs)
@settings(max_examples=10)
def test_equal_values_in_another_order_are_the_same_config(candidate):
    backwards = Config(dict(reversed(list(candidate.arguments().items()))))
    assert backwards == candidate
    assert hash(backwards) == hash(candidate)


def test_an_object_with_a_repr_of_its_own_is_a_value():
    class Plan:
        def __init__(self, n):
            self.n = n

        def __repr__(self):
            return f"Plan({self.n})"

    assert Config({"p": Plan(1)}) == Config({"p": Plan(1)}) != Config({"p": Plan(2)})


def test_types_and_kernels_of_triton_are_values_of_its_configs():
    @triton.jit
    def act(x):
        return x

    parts = {"ACC": tl.float32, "ACT": act}
    one, same, other = (
        Config({"c": triton.Config(each)})
        for each in (parts, dict(parts), parts | {"ACC": tl.int8})
    )
    assert one == same != other
    assert list(one.functions()) == [act.fn]
    assert "'ACC': triton.fp32" in str(one)
    assert "'ACT': act" in str(one)


def test_the_part_of_a_triton_config_that_has_no_text_is_named():
    with pytest.raises(InvalidArgument, match=r"config_space value 'c: ACT'.*stable text"):
        Config({"c": triton.Config({"ACT": object()})})


def test_a_space_is_evaluated_once_when_it_is_looked_at():
    evaluated = []
    space = ConfigSpace(lambda: evaluated.append(1) or [{"n": 1}, {"n": 2}])
    assert not evaluated
    assert [config["n"] for config in space] == [1, 2]
    assert space.names == {"n"}
    assert len(evaluated) == 1


def test_duplicates_are_dropped_and_order_is_kept():
    space = ConfigSpace([{"n": 2}, {"n": 1}, {"n": 2}, {"n": True}])
    assert [config["n"] for config in space] == [2, 1, True]
    a, b = [{"n": 1}, {"n": 2}], [{"n": 2}, {"n": 1}]
    assert ConfigSpace(a).digest == ConfigSpace(list(a)).digest != ConfigSpace(b).digest


class Looks:
    """Prints like every other one."""

    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return "Looks()"

    def __eq__(self, other):
        return self.n == other.n

    __hash__ = None


def test_values_that_only_print_alike_are_dropped_with_one_warning():
    tensors = [
        {"x": torch.arange(5000)},
        {"x": torch.arange(5000).index_fill(0, torch.tensor([2500]), 0)},
    ]
    for values in ([{"x": Looks(1)}, {"x": Looks(2)}, {"x": Looks(3)}], tensors):
        with pytest.warns(
            TuningWarning, match=r"values of x print like an earlier value"
        ) as caught:
            assert len(ConfigSpace(values)) == 1
        assert len(caught) == 1


def test_equal_values_are_dropped_in_silence():
    one = Looks(1)
    long = torch.arange(5000)
    same = [{"x": one}, {"x": one}, {"x": Looks(1)}]
    assert len(ConfigSpace(same)) == 1
    assert len(ConfigSpace([{"x": long}, {"x": long.clone()}])) == 1
    assert len(ConfigSpace([{"x": float("nan")}, {"x": float("nan")}])) == 1


def test_an_entry_that_is_no_dict_is_refused():
    with pytest.raises(InvalidArgument, match="dict of keyword arguments"):
        len(ConfigSpace([{"n": 1}, ("n", 2)]))


def test_pruning_gives_the_kept_and_the_reasons():
    def even(config, x, *, y):
        return config["n"] % 2 == 0 and (x, y) == (7, 8)

    kept, pruned = ConfigSpace([{"n": n} for n in range(4)]).prune(even, (7,), {"y": 8})
    assert [config["n"] for config in kept] == [0, 2]
    assert [each.config["n"] for each in pruned] == [1, 3]
    assert pruned[0].reason == "even dropped it"


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
    texts = [codec.to_json(codec.encode(value)) for value in (one, copy.deepcopy(one), other)]
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


def test_equal_ranges_have_one_text():
    starts, steps = range(-2, 6), (-5, -2, -1, 1, 2, 5)
    ranges = [range(a, b, step) for a in starts for b in starts for step in steps]
    texts = {codec.to_json(codec.encode(each)) for each in ranges}
    assert len(texts) == len(set(ranges))


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
    texts = {codec.to_json(codec.encode({"k": [value, (value,)]})) for value in values}
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
    a, b = triton.Config({"A": 1, "B": 2}), triton.Config({"B": 2, "A": 1})
    assert Config({"c": a}) == Config({"c": b})


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
        return codec.encode(functools.partial(*args, **kwargs), with_bound_values=False)

    one = partial(same, 1, reach=(2,), near=3)
    assert one == partial(functools.partial(same, 1), near=3, reach=(2,))
    others = [
        partial(same, 1, reach=(2,), near=4),
        partial(same, 2, reach=(2,), near=3),
        partial(same, 1, (2,), near=3),
        partial(copy.copy, 1, reach=(2,), near=3),
    ]
    assert len({codec.to_json(each) for each in [one, *others]}) == 5
    assert show(one) == "functools.partial(same, 1, near=3, reach=(2,))"
    assert show(partial(len)) == "functools.partial(len)"
    assert not codec.is_encodable(functools.partial(len))


def test_an_enum_of_a_function_has_a_text():
    class Local(enum.Enum):
        A = 1

    assert show(codec.encode(Local.A)) == "Local.A"
