"""Changeable values that a function held when it was given to the tuner.

A list in a closure may be an option or a log, an attribute of a callable object a setting or a
counter. At decoration it is what the author made it; at the first call of a key it is whatever the
calls before have left.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from triton_dist._tuning.source.constants import text_of

CONTAINERS = (list, set, dict)
"""Types of containers that may change while the program runs."""
COLLECTIONS = (*CONTAINERS, tuple, frozenset, collections.deque, types.MappingProxyType)
"""Types of values that hold others."""
_MOST_ITEMS = 10_000
_DEEPEST = 5


class Snapshot:
    """Texts of containers that ``roots`` bind, and of the state of those that are objects."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._containers: dict[int, tuple[Any, str]] = {}
        self._states: dict[int, tuple[Any, dict[str, str]]] = {}
        self._code: dict[int, dict[str, Any]] = {}
        for root in roots:
            self._take(root)

    def container(self, value: Any) -> str | None:
        """The text that ``value`` had, a list, set, dict or mutable dataclass; ``None`` if it was
        not there yet, is very long, or is something else."""
        known = self._containers.get(id(value))
        return None if known is None else known[1]

    def state(self, root: Any) -> dict[str, str]:
        """The attributes of a callable object, or of the object that a method is bound to."""
        known = self._states.get(id(root))
        return {} if known is None else known[1]

    def code(self, root: Any) -> dict[str, Any]:
        """Those of its attributes that are not all data."""
        return self._code.get(id(root), {})

    def _take(self, root: Any) -> None:
        if isinstance(root, functools.partial):
            self._keep([*root.args, *root.keywords.values()])
            self._take(root.func)
        elif isinstance(root, types.FunctionType):
            self._keep([*(root.__defaults__ or ()), *(root.__kwdefaults__ or {}).values()])
            for cell in root.__closure__ or ():
                with suppress(ValueError):  # not bound yet
                    self._keep([cell.cell_contents])
        elif isinstance(root, types.MethodType):
            if not isinstance(root.__self__, (type, types.ModuleType)):
                self._keep_state(root, root.__self__)
        elif not isinstance(root, (type, types.BuiltinFunctionType)):
            self._keep_state(root, root)

    def _keep(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, tuple):
                self._keep(value)
            elif isinstance(value, CONTAINERS) and len(value) <= _MOST_ITEMS:
                self._containers[id(value)] = value, _data_of(value)
            elif is_object_with_fields(value) and not value.__dataclass_params__.frozen:
                self._containers[id(value)] = value, _data_of(fields_of(value))

    def _keep_state(self, root: Any, holder: Any) -> None:
        label, texts, code = type(holder).__name__, {}, {}
        for name, value in attributes(holder).items():
            try:
                texts[f"{label}.{name}"] = text_of(value)
            except TypeError:
                code[f"{label}.{name}"] = value
        self._keep(code.values())
        self._states[id(root)], self._code[id(root)] = (root, texts), code


def _data_of(value: Any, depth: int = 0) -> str:
    """The text of a container; what has none in it is named by its type."""
    try:
        return text_of(value)
    except TypeError:
        if depth > _DEEPEST or not isinstance(value, (*CONTAINERS, tuple)):
            return type(value).__name__
    items = value.items() if isinstance(value, dict) else value
    texts = [_data_of(item, depth + 1) for item in items]
    return f"{type(value).__name__} {sorted(texts) if isinstance(value, set) else texts}"


def attribute(value: Any, name: str, default: Any = None) -> Any:
    try:
        return getattr(value, name, default)
    except Exception:  # objects with a __getattr__ of their own
        return default


def attributes(value: Any) -> dict[str, Any]:
    """Attributes of an object itself, not of its class, by name."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = {each for part in slots for each in ((part,) if isinstance(part, str) else part)}
    absent = object()
    held = {name: attribute(value, name, absent) for name in names - {"__dict__", "__weakref__"}}
    there = {name: item for name, item in held.items() if item is not absent}
    return dict(sorted({**there, **getattr(value, "__dict__", {})}.items()))


def is_object_with_fields(value: Any) -> bool:
    """True for an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of an object of a dataclass, by name."""
    return {each.name: attribute(value, each.name) for each in dataclasses.fields(value)}


def items_of(value: Any) -> dict[Any, Any]:
    """Values in a collection or an object of a dataclass; of a set, code in the order of its
    names, as that of hashes differs by process."""
    if isinstance(value, (dict, types.MappingProxyType)):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=lambda each: str(attribute(each, "__qualname__", "")))
    if isinstance(value, COLLECTIONS):
        return dict(enumerate(value))
    return fields_of(value) if is_object_with_fields(value) else {}


def inside(value: Any) -> Iterator[Any]:
    """``value`` and all that containers and dataclasses in it hold."""
    seen, ahead = set[int](), [value]
    while ahead:
        item = ahead.pop()
        if id(item) not in seen:
            seen.add(id(item))
            yield item
            ahead += reversed(items_of(item).values())
