"""Hypothesis strategies for keys, configs and records."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st

from triton_dist._tuning.values import (
    Config,
    Failure,
    Fingerprint,
    Key,
    Measurement,
    Trial,
    TuningRecord,
)
from triton_dist._tuning.values.outcome import FAILURE_KINDS

# A loaded machine is slow now and then: no test is about how long an example takes.
settings.register_profile("triton_dist", deadline=None, max_examples=30)
settings.load_profile("triton_dist")


class Method(enum.Enum):
    PUSH = "push"
    PULL = "pull"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Unit(str, enum.Enum):
    MS = "ms"
    US = "us"


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


class Mode(enum.Flag):
    FAST = 1
    FALLBACK = 2


class Shape(NamedTuple):
    M: int
    N: int


@dataclass(frozen=True)
class Problem:
    m: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """A frozen dataclass whose field holds anything, and whose other one is computed."""

    inner: Any
    computed: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "computed", 7)

    class Nested(enum.Enum):
        ONE = 1


DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.sampled_from([*Method, *Level, *Unit, *Access, *Mode, *Plan.Nested]),
    st.sampled_from([Mode.FAST | Mode.FALLBACK, Mode(0), Access.READ | Access.WRITE, Access(0)]),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), Method, int, Problem]),
    st.builds(Shape, st.integers(0, 9), st.integers(0, 9)),
    st.builds(Problem, st.integers(0, 9), st.sampled_from(DTYPES)),
)
keys = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3)
        | st.frozensets(scalars, max_size=3)
        | st.sets(scalars, max_size=3)
        | st.dictionaries(scalars, inner, max_size=3)
        | st.builds(Plan, inner)
        | st.builds(Shape, inner, inner)
    ),
    max_leaves=8,
)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
configs = st.dictionaries(names, keys, min_size=1, max_size=3).map(Config)

milliseconds = st.floats(0, 1e6, allow_nan=False)
measurements = st.builds(
    Measurement,
    st.lists(milliseconds, min_size=1, max_size=5).map(tuple),
    st.integers(0, 9),
    st.sampled_from(["none", "maximum"]),
)
failures = st.builds(
    Failure, st.sampled_from(FAILURE_KINDS), st.text(max_size=20), st.none() | st.integers(0, 7)
)
facts = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
fingerprints = st.builds(Fingerprint, facts, facts, facts, facts, facts, st.text(max_size=8))


@st.composite
def records(draw: st.DrawFn) -> TuningRecord:
    """With at least one measurement, and no config twice."""
    tried = draw(st.lists(configs, min_size=1, max_size=4, unique_by=lambda config: config.digest))
    outcomes = [draw(measurements)] + [draw(measurements | failures) for _ in tried[1:]]
    return TuningRecord(
        key=Key.of("ops.run", draw(keys), "fake"),
        fingerprint=draw(fingerprints),
        trials=tuple(map(Trial.of, tried, outcomes)),
        timestamp="2030-01-01T00:00:00+00:00",
        seconds=draw(milliseconds),
    )


def edits(tree: Any) -> Iterator[None]:
    """Edit ``tree`` in one place after another; each edit is undone before the next."""
    for name in list(tree) if isinstance(tree, dict) else range(len(tree)):
        before = tree[name]
        if isinstance(before, (dict, list)):
            yield from edits(before)
        tree[name] = "edited" if isinstance(before, str) else 7.25
        yield
        tree[name] = before
