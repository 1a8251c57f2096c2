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

_MOST_ITEMS = 1000


class Snapshot:
    """Texts of containers that ``roots`` bind, and of the state of those that are objects."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._containers: dict[int, tuple[Any, str]] = {}
        self._states: dict[int, tuple[Any, dict[str, str]]] = {}
        for root in roots:
            self._take(root)

    def container(self, value: Any) -> str | None:
        """The text that ``value``, a list, set or dict, had; ``None`` if it was not there yet, is
        very long, or has none."""
        known = self._containers.get(id(value))
        return None if known is None else known[1]

    def state(self, root: Any) -> dict[str, str]:
        """The attributes of a callable object, or of the object that a method is bound to."""
        known = self._states.get(id(root))
        return {} if known is None else known[1]

    def _take(self, root: Any) -> None:
        if isinstance(root, functools.partial):
            self._keep([*root.args, *root.keywords.values()])
            self._take(root.func)
        elif isinstance(root, types.FunctionType):
            self._keep([*(root.__defaults__ or ()), *(root.__kwdefaults__ or {}).values()])
            for cell in root.__closure__ or ():
                try:
                    self._keep([cell.cell_contents])
                except ValueError:  # not bound yet
                    continue
        elif isinstance(root, types.MethodType):
            if not isinstance(root.__self__, (type, types.ModuleType)):
                self._keep_state(root, root.__self__)
        elif not isinstance(root, (type, types.BuiltinFunctionType)):
            self._keep_state(root, root)

    def _keep(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, (list, set, dict)) and len(value) <= _MOST_ITEMS:
                try:
                    self._containers[id(value)] = value, text_of(value)
                except TypeError:
                    continue

    def _keep_state(self, root: Any, holder: Any) -> None:
        label, texts = type(holder).__name__, {}
        for name, value in sorted(getattr(holder, "__dict__", {}).items()):
            try:
                texts[f"{label}.{name}"] = text_of(value)
            except TypeError:
                continue
        self._states[id(root)] = root, texts
