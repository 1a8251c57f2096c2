"""Read values that a function depends on and that its source does not show, such as closure cells.

A list in a closure may be an option, or a log that each call extends. An attribute of a callable
object may be a setting or a counter. :class:`Snapshot` stores the texts of these values at
decoration, before any call changes them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from triton_dist._tuning.values import codec, qualified_name
from triton_dist._tuning.values.show import show
from triton_dist.errors import InvalidArgument

T = TypeVar("T")

MUTABLE_CONTAINER_TYPES = (list, set, dict)
"""Types of containers whose content may change while the program runs."""
COLLECTION_TYPES = (
    *MUTABLE_CONTAINER_TYPES,
    tuple,
    frozenset,
    collections.deque,
    types.MappingProxyType,
)
PLAIN_TYPES = (types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float, types.NoneType)
"""Types of values in which no functions or classes are searched."""
_NEVER_WRAPPERS = (*PLAIN_TYPES, *COLLECTION_TYPES, type, types.FunctionType)
_WRAPPED_ATTRIBUTES = ("__func__", "fn", "__wrapped__", "fget", "fset", "func", "_init_fn")
"""Attributes in which wrappers store their function: methods; Triton's kernels and tuned functions;
functools.cache and torch.compile; properties (two); partials; torch.library.custom_op."""
_MAX_ITEMS = 10_000
_MAX_DEPTH = 5
_MAX_TEXT_LENGTH = 100


def constant(value: T) -> T:
    """Return ``value``, and make tuning records depend on it although it is computed at run time.

    Write ``MODE = constant(os.environ["MODE"])`` at the top level of a module. If the variable
    changes, functions that read ``MODE`` are tuned again. All ranks must have equal values.

    Raises:
        InvalidArgument: ``value``, for example a tensor, cannot be written as text that is equal
            in every run of the program.
    """
    if not _contains_code(value) and text_of(value) is None:  # code is compared by its source
        expected = "numbers, texts, dtypes, and tuples, lists, sets, dicts of these"
        raise InvalidArgument("constant", "value", value, expected)
    return value


def text_of(value: Any) -> str | None:
    """Return data as Python source; ``None`` for code and for data without a stable text.

    If the text is longer than 100 characters, the rest is replaced by a digest of the whole text.
    """
    if type(value).__module__ == "torch" and type(value).__name__ == "device":
        return f"device {value.type}"  # the index differs by rank
    try:
        text = None if _contains_code(value) else show(codec.encode(value))
    except TypeError:
        return None
    if text is None or len(text) <= _MAX_TEXT_LENGTH:
        return text
    return f"{text[:_MAX_TEXT_LENGTH]}... ({codec.digest(text)[:8]})"


def _contains_code(value: Any) -> bool:
    params = getattr(type(value), "__dataclass_params__", None)
    if isinstance(value, COLLECTION_TYPES) or (params and params.frozen):
        return any(map(_contains_code, items_of(value)))
    # A mutable dataclass may contain itself, so its fields are not searched. It is not code.
    return params is None and is_code(value)


def describe(value: Any, depth: int = 0) -> str | None:
    """Return the text of data, the name of code, or the texts of the items of a collection or
    dataclass. An item without a text is replaced by the name of its type. Return ``None`` for
    other objects, and for modules."""
    if isinstance(value, COLLECTION_TYPES) and len(value) > _MAX_ITEMS:
        return None
    items, name = items_of(value), type(value).__name__
    if (text := text_of(value)) is not None or isinstance(value, types.ModuleType):
        return text
    if items and depth <= _MAX_DEPTH:
        texts = [describe(each, depth + 1) or type(each).__name__ for each in items]
        return f"{name} {sorted(texts) if isinstance(value, (set, frozenset)) else texts}"
    if is_code(value):
        return str(getattr(function_in(value) or value, "__qualname__", name))
    return name if items else None


class Snapshot:
    """Texts of the collections and dataclasses that the callables ``roots`` store (see
    ``bound_values``).

    The texts are read when this object is created. For callable objects, and for methods, the
    attributes of the object are also stored.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        # By id of an object. The objects are stored too, because the id of a deleted object may be
        # used again.
        self._texts: dict[int, tuple[Any, str | None]] = {}
        self._states: dict[int, tuple[Any, dict[str, Any]]] = {}
        for root in roots:
            self._store(root)

    def text(self, value: Any) -> str | None:
        """Return the stored text of a collection or dataclass, or ``None``."""
        return self._texts.get(id(value), (None, None))[1]

    def state(self, root: Any) -> dict[str, Any]:
        """Return the stored attributes of a callable object, or of the object of a bound method."""
        return self._states.get(id(root), (None, {}))[1]

    def _store(self, root: Any) -> None:
        bound = bound_values(root)
        for each in bound.values():
            if isinstance(each, COLLECTION_TYPES) or dataclasses.is_dataclass(each):
                self._texts[id(each)] = each, describe(each)
        if isinstance(root, functools.partial):
            self._store(root.func)
            bound = self.state(root.func)
        if not isinstance(root, types.FunctionType):
            self._states[id(root)] = root, bound


def bound_values(value: Any) -> dict[str, Any]:
    """Return, by name, the values that a callable has stored.

    These are the closure cells and defaults of a function, the arguments of a partial, and the
    attributes of a callable object or of the object of a bound method.
    """
    values: dict[Any, Any]
    if isinstance(value, types.FunctionType):
        full = getattr(value.__code__, "co_qualname", value.__qualname__)
        label, code, defaults = full.rpartition("<locals>.")[2], value.__code__, value.__defaults__
        names = code.co_varnames[code.co_argcount - len(defaults or ()) :]
        values = cells_of(value) | dict(zip(names, defaults or (), strict=False))
        values |= value.__kwdefaults__ or {}
    elif isinstance(value, functools.partial):
        label = qualified_name(value).rpartition(".")[2]
        values = dict(enumerate(value.args)) | dict(sorted(value.keywords.items()))
    else:
        holder = value.__self__ if isinstance(value, types.MethodType) else value
        is_state = not isinstance(holder, (type, types.ModuleType, types.BuiltinFunctionType))
        label, values = type(holder).__name__, attributes(holder) if is_state else {}
    return {f"{label}.{name}": each for name, each in values.items()}


def cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of the closure cells by name, without empty cells."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            values[name] = cell.cell_contents
    return values


def get_attribute(value: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, or ``default`` if reading it raises any exception."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object itself, not of its class, by name."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = {each for part in slots for each in ((part,) if isinstance(part, str) else part)}
    values = {name: get_attribute(value, name) for name in names - {"__dict__", "__weakref__"}}
    return dict(sorted({**values, **getattr(value, "__dict__", {})}.items()))


def items_of(value: Any) -> list[Any]:
    """Return the items of a collection (pairs for a dict), or the fields of a dataclass.

    Items of a set are sorted by qualified name, because their order differs between processes.
    """
    if isinstance(value, (dict, types.MappingProxyType)):
        return [*value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=lambda each: str(get_attribute(each, "__qualname__", "")))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [get_attribute(value, each.name) for each in dataclasses.fields(value)]
    return [*value] if isinstance(value, COLLECTION_TYPES) else []


def is_code(value: Any) -> bool:
    """Return whether ``value`` is callable, a property, a class method or a Triton kernel."""
    return (
        callable(value)
        or isinstance(value, (property, classmethod))
        or _has_stored_attribute(value, "fn")
    )


def _has_stored_attribute(value: object, name: str) -> bool:
    """Return whether ``value`` or its class has an attribute that no ``__getattr__`` computes."""
    return name in getattr(value, "__dict__", ()) or hasattr(type(value), name)


def wrapped_objects(value: Any) -> Iterator[Any]:
    """Yield the function or kernel inside a wrapper, then other values that the wrapper stores."""
    if isinstance(value, _NEVER_WRAPPERS):
        return
    for name in _WRAPPED_ATTRIBUTES:
        if _has_stored_attribute(value, name) and is_code(inner := get_attribute(value, name)):
            yield inner
    if isinstance(value, functools.partial):
        yield from (*value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__self__


def function_in(value: Any) -> types.FunctionType | None:
    """Return ``value`` if it is a function, or the function inside a wrapper; else ``None``."""
    for _ in range(_MAX_DEPTH):
        if value is None or isinstance(value, types.FunctionType):
            return value
        if isinstance(value, _NEVER_WRAPPERS):  # saves the time of a generator
            return None
        value = next(wrapped_objects(value), None)
    return None


def globals_of(code: Any) -> dict[str, Any]:
    """Return the globals of the module of a function, a class or the class of an object."""
    if (function := function_in(code)) is not None:
        return function.__globals__
    cls = code if isinstance(code, type) else type(code)
    return vars(sys.modules.get(cls.__module__) or types)
