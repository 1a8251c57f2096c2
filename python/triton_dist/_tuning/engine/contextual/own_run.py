"""Subclasses of Triton's ``Autotuner`` that replace ``run``: libraries with a table or a search of
their own.

What their ``run`` comes to decides:

* Triton's ``run``: that is seen there, like any launch.
* Triton's pruning, which it asks for the configs: the launch is taken from it. Its table is neither
  looked at nor written to.
* neither: it is left alone, with one warning.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from triton.runtime.autotuner import Autotuner

from triton_dist.errors import TuningWarning

Run = Callable[..., Any]


class Leads(enum.Enum):
    """Outcomes of the ``run`` of a class."""

    TO_TRITON = enum.auto()
    TO_PRUNING = enum.auto()
    ELSEWHERE = enum.auto()


def leads(kind: Any) -> Leads:
    """By the names in the code of ``run``, and of the methods of its class that it calls."""
    runs = [(each, vars(each)["run"]) for each in kind.__mro__ if "run" in vars(each)]
    return _leads(kind, tuple(runs))


@functools.cache
def _leads(kind: Any, runs: tuple[tuple[type, Run], ...]) -> Leads:
    """``runs``: with the classes that define them, each overridden by the one before."""
    for number, (defining, run) in enumerate(runs):
        if defining is Autotuner:
            return Leads.TO_TRITON
        names = set(_names(run, kind))
        if "prune_configs" in names:
            return Leads.TO_PRUNING
        bases = {base.__name__ for base, _ in runs[number + 1 :]}
        if names and not names & ({"super"} | bases):  # what has no code may do anything
            return Leads.ELSEWHERE
    return Leads.TO_TRITON


def _names(run: Any, kind: type) -> Iterator[str]:
    left, seen = [run], set()
    while left:
        function = left.pop()
        left += filter(None, [getattr(function, "__wrapped__", None)])
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        for each in _with_inner(code):
            yield from each.co_names
            methods = (inspect.getattr_static(kind, name, None) for name in each.co_names)
            own = (each for each in methods if isinstance(each, types.FunctionType))
            left += [each for each in own if each not in vars(Autotuner).values()]


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


def keeps_own_table(tuner: Any) -> bool:
    """True if ``cache`` of ``tuner`` is its library's, with keys that only that knows."""
    return leads(type(tuner)) is Leads.TO_PRUNING


class OwnRuns:
    """Replaces ``run`` of such classes, and puts it back.

    Args:
        replace: makes what takes the place of a class's ``run``.
    """

    def __init__(self, replace: Callable[[type[Autotuner], Run], Run]) -> None:
        self._replace = replace
        self._classes: dict[type[Autotuner], tuple[Run, Run]] = {}
        """Their own, and what takes its place."""
        self.pruning: list[tuple[type[Autotuner], Run, Run]] = []
        """Those whose own comes to Triton's pruning: not seen otherwise, in a settled function."""
        self._warned: set[type[Autotuner]] = set()

    def look(self) -> None:
        """Find the classes that are there now. None is replaced at that time."""
        for kind in _subclasses(Autotuner):
            own = vars(kind).get("run")
            if own is not None and self._classes.get(kind, (None,))[0] is not own:
                replacement = functools.wraps(own)(self._replace(kind, own))
                self._classes[kind] = own, replacement
        self.pruning = [
            (kind, own, replacement)
            for kind, (own, replacement) in self._classes.items()
            if leads(kind) is Leads.TO_PRUNING
        ]

    def replace(self) -> None:
        for kind, (_, replacement) in self._classes.items():
            kind.run = replacement

    def replace_pruning(self) -> None:
        for kind, _, replacement in self.pruning:
            kind.run = replacement

    def restore_pruning(self) -> None:
        for kind, own, _ in self.pruning:
            kind.run = own

    def restore(self) -> None:
        for kind, (own, _) in self._classes.items():
            kind.run = own

    def warn(self, tuner: Any) -> None:
        """Say once of each class that it is left alone."""
        kind = type(tuner)
        if kind in self._warned:
            return
        self._warned.add(kind)
        warnings.warn(
            f"contextual_autotune: {kind.__module__}.{kind.__qualname__}, such as of "
            f"{tuner.base_fn.__qualname__}, tunes in a run() of its own that comes neither to "
            "Triton's run() nor to its prune_configs(): it is left alone, and each rank chooses "
            "for itself.",
            TuningWarning,
            stacklevel=2,
        )


def _subclasses(kind: type[Autotuner]) -> Iterator[type[Autotuner]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
