"""Changeable values that a function held when it was given to the tuner.

A list in a closure may be an option or a log, an attribute of a callable object a setting or a
counter. At decoration it is what the author made it; at the first call of a key it is whatever the
calls before have left.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

from triton_dist._tuning.constants import text_of
from triton_dist._tuning.inspected import (
    CONTAINERS,
    attributes,
    closure_of,
    fields_of,
    is_object_with_fields,
)

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
            self._keep(closure_of(root))
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
