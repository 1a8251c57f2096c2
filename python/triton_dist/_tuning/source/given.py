"""Look into values: what a callable was given when it was made, and the code inside a value.

A list in a closure may be an option or a log, and an attribute of a callable object a setting or a
counter. At decoration it has the value that the author gave it. Later it has the value that the
last call left, so :class:`Snapshot` keeps its text.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from triton_dist._tuning.source.constants import has_own, text_of
from triton_dist._tuning.values import qualified_name

CONTAINERS = (list, set, dict)
"""Types of containers that may change while the program runs."""
COLLECTIONS = (*CONTAINERS, tuple, frozenset, collections.deque, types.MappingProxyType)
"""Types of values that hold others."""
PLAIN = (types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float, types.NoneType)
"""Types of values that hold no code to follow."""
_WRAPPED = ("__func__", "fn", "__wrapped__", "fget", "func", "_init_fn")
"""Attributes that hold the function inside a wrapper: methods; Triton's kernels and tuned
functions; functools.cache and torch.compile; properties; partials; torch.library.custom_op."""
_MOST_ITEMS = 10_000
_DEEPEST = 5


class Snapshot:
    """Texts of containers that ``roots`` bind, and attributes of ``roots`` that are objects."""

    def __init__(self, roots: Iterable[Any]) -> None:
        # An id identifies an object only while the object lives, so the objects are kept.
        self._texts: dict[int, tuple[Any, str]] = {}
        self._states: dict[int, tuple[Any, dict[str, Any]]] = {}
        for root in roots:
            self._take(root)

    def text(self, value: Any) -> str | None:
        """Return the text that a list, set, dict or mutable dataclass had; ``None`` for others."""
        return self._texts.get(id(value), (None, None))[1]

    def state(self, root: Any) -> dict[str, Any]:
        """Return the attributes of a callable object, or of the object of a bound method."""
        return self._states.get(id(root), (None, {}))[1]

    def _take(self, root: Any) -> None:
        held = held_by(root)
        self._keep(held.values())
        if isinstance(root, functools.partial):
            self._take(root.func)
        elif not isinstance(root, types.FunctionType):
            self._states[id(root)] = root, held

    def _keep(self, values: Iterable[Any]) -> None:
        for value in values:
            dataclass = getattr(type(value), "__dataclass_params__", None)
            if isinstance(value, tuple):
                self._keep(value)
            elif isinstance(value, CONTAINERS) and len(value) <= _MOST_ITEMS:
                self._texts[id(value)] = value, _data_of(value)
            elif dataclass is not None and not dataclass.frozen:
                self._texts[id(value)] = value, _data_of(items_of(value))


def _data_of(value: Any, depth: int = 0) -> str:
    """Return the text of a container; a part that has no text is named by its type."""
    try:
        return text_of(value)
    except TypeError:
        if depth > _DEEPEST or not isinstance(value, (*CONTAINERS, tuple)):
            return type(value).__name__
    items = value.items() if isinstance(value, dict) else value
    texts = [_data_of(item, depth + 1) for item in items]
    return f"{type(value).__name__} {sorted(texts) if isinstance(value, set) else texts}"


def held_by(value: Any) -> dict[str, Any]:
    """Return what a callable was given when it was made, by name.

    This is closure cells and defaults of a function, arguments of a partial, and attributes of an
    object, also of the object that a method is bound to.
    """
    held: dict[Any, Any]
    if isinstance(value, types.FunctionType):
        full = getattr(value.__code__, "co_qualname", value.__qualname__)
        label, code, given = full.rpartition("<locals>.")[2], value.__code__, value.__defaults__
        names = code.co_varnames[: code.co_argcount][code.co_argcount - len(given or ()) :]
        held = cells_of(value) | dict(zip(names, given or (), strict=True))
        held |= value.__kwdefaults__ or {}
    elif isinstance(value, functools.partial):
        label = qualified_name(value).rpartition(".")[2]
        held = dict(enumerate(value.args)) | dict(sorted(value.keywords.items()))
    else:
        holder = value.__self__ if isinstance(value, types.MethodType) else value
        is_state = not isinstance(holder, (type, types.ModuleType, types.BuiltinFunctionType))
        label, held = type(holder).__name__, attributes(holder) if is_state else {}
    return {f"{label}.{name}": each for name, each in held.items()}


def cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of the closure cells that are bound, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, also of objects whose own ``__getattr__`` fails."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object itself, not of its class, by name."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = {each for part in slots for each in ((part,) if isinstance(part, str) else part)}
    held = {name: attribute(value, name, names) for name in names - {"__dict__", "__weakref__"}}
    there = {name: item for name, item in held.items() if item is not names}
    return dict(sorted({**there, **getattr(value, "__dict__", {})}.items()))


def items_of(value: Any) -> dict[Any, Any]:
    """Return the values in a collection or an object of a dataclass.

    Code in a set comes in the order of its names: the order of hashes differs by process.
    """
    if isinstance(value, (dict, types.MappingProxyType)):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=lambda each: str(attribute(each, "__qualname__", "")))
    if isinstance(value, COLLECTIONS):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: attribute(value, each.name) for each in dataclasses.fields(value)}
    return {}


def is_code(value: Any) -> bool:
    """Return true for a function, and for a Triton kernel, which is launched instead of called."""
    return callable(value) or isinstance(value, (property, classmethod)) or has_own(value, "fn")


def inside(value: Any) -> Any:
    """Return the function or kernel inside a wrapper, ``None`` for other values."""
    if isinstance(value, (*PLAIN, type, types.FunctionType)):
        return None
    found = (attribute(value, each) for each in _WRAPPED if has_own(value, each))
    return next(filter(is_code, found), None)


def function_in(value: Any) -> types.FunctionType | None:
    """Return a function, also from inside wrappers; ``None`` for other values."""
    for _ in range(_DEEPEST):
        if value is None or isinstance(value, types.FunctionType):
            return value
        value = inside(value)
    return None
