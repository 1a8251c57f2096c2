"""Looks into functions, classes, objects and containers, for the walk."""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from triton_dist._tuning import definitions, libraries, making, normalise
from triton_dist._tuning.constants import has_own, text_of
from triton_dist._tuning.values import ConfigSpace, original

ABSENT = types.ModuleType("absent")
"""Stands for what is not there."""
CONTAINERS = (list, set, dict)
"""Types of containers that may change while the program runs."""
COLLECTIONS = (*CONTAINERS, tuple, frozenset, collections.deque, types.MappingProxyType)
"""Types of values that hold others."""
CODE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType),
    *(functools.partial, functools.partialmethod, property, staticmethod, classmethod),
)
"""Types of values that are code themselves."""
WRAPPED = ("fn", "__wrapped__", "func", "_init_fn")
"""Attributes in which callables keep the function inside: Triton's kernels and tuned functions;
functools.cache and torch.compile; cached_property; torch.library.custom_op."""
LookUp = Callable[[str], Any]
"""Gives the value of a name; ``ABSENT`` if there is none."""


def code_in(holder: Any) -> Iterator[Any]:
    """Functions, kernels and other code in a container or dataclass, and in those inside it."""
    seen, ahead = {id(holder)}, [holder]
    while ahead:
        for item in _items(ahead.pop()):
            if isinstance(item, COLLECTIONS) or is_object_with_fields(item):
                if id(item) not in seen:
                    seen.add(id(item))
                    ahead.append(item)
            elif is_code(item):
                yield item


def _items(holder: Any) -> list[Any]:
    if isinstance(holder, COLLECTIONS):
        return ordered(holder)
    return list(fields_of(holder).values())


def ordered(holder: Any) -> list[Any]:
    """Items of a collection: of a dict, the values; of a set, code in the order of the text, since
    that of hashes is another one in each process."""
    if isinstance(holder, (set, frozenset)):
        return sorted(holder, key=_place)
    if isinstance(holder, (dict, types.MappingProxyType)):
        return [item for _, item in sorted(holder.items(), key=lambda each: _text(each[0]))]
    return list(holder)


def _place(item: Any) -> tuple[Any, ...]:
    code = attribute(item, "__code__")
    if not isinstance(code, types.CodeType):
        return (str(attribute(item, "__qualname__", "")), 0, b"", [_text(item)])
    cells = [_text(each) for each in closure_of(item)]
    return (item.__qualname__, code.co_firstlineno, code.co_code, cells)


def _text(item: Any) -> str:
    """A text to sort by, which holds no address."""
    is_plain = isinstance(item, (str, bytes, int, float, complex, enum.Enum, type(None)))
    return f"{type(item).__name__} {item!r}" if is_plain else type(item).__name__


def is_object_with_fields(value: Any) -> bool:
    """True for an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of an object of a dataclass, by name."""
    return {each.name: attribute(value, each.name) for each in dataclasses.fields(value)}


def types_in(data: Any) -> Iterator[type]:
    """Types of the data that may have methods, each once: enums, dataclasses, named tuples."""
    found: dict[type, None] = {}
    seen, ahead = {id(data)}, [data]
    while ahead:
        each = ahead.pop()
        is_named = isinstance(each, tuple) and hasattr(type(each), "_fields")
        if is_named or isinstance(each, enum.Enum) or is_object_with_fields(each):
            found[type(each)] = None
        if isinstance(each, COLLECTIONS) or is_object_with_fields(each):
            new = [item for item in _items(each) if id(item) not in seen]
            seen.update(map(id, new))
            ahead += new
    yield from sorted(found, key=lambda cls: (cls.__module__, cls.__qualname__))


def inner_code(value: Any) -> str | None:
    """The attribute of a kernel or a wrapper that has the function inside. One that ``__getattr__``
    makes up is none."""
    for name in WRAPPED:
        if has_own(value, name) and is_code(attribute(value, name)):
            return name
    return None


def bound_to(method: types.MethodType) -> type:
    """The class that ``method`` is bound to, or that of the object."""
    held = method.__self__
    return held if isinstance(held, type) else type(held)


def closure_of(function: types.FunctionType) -> Iterator[Any]:
    """Values of the closure cells of a function, those that are bound."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell.cell_contents


def cells_of(cls: type) -> dict[str, Any]:
    """Values in the closures of the methods of ``cls``, by name: of a class in a function."""
    found: dict[str, Any] = {}
    for member in vars(cls).values():
        function = attribute(member, "fget", None) or attribute(member, "__func__", member)
        if isinstance(function, types.FunctionType):
            names = function.__code__.co_freevars
            for name, cell in zip(names, function.__closure__ or (), strict=True):
                with suppress(ValueError):
                    found[name] = cell.cell_contents
    found.pop("__class__", None)
    return found


def may_change(value: Any) -> bool:
    """True for a container, and for an object that is neither code nor data with a text."""
    if isinstance(value, CONTAINERS):
        return True
    try:
        text_of(value)
    except TypeError:
        return not (is_code(value) or isinstance(value, (type, types.ModuleType)))
    return False


def attributes(value: Any) -> dict[str, Any]:
    """Attributes of an object itself, not of its class, by name."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = {each for part in slots for each in ((part,) if isinstance(part, str) else part)}
    held = {name: attribute(value, name, ABSENT) for name in names - {"__dict__", "__weakref__"}}
    there = {name: item for name, item in held.items() if item is not ABSENT}
    return dict(sorted({**there, **getattr(value, "__dict__", {})}.items()))


def tuners(node: making.Definition, look_up: LookUp) -> frozenset[ast.expr]:
    """The decorators that are the tuner's own: their arguments are compared by value elsewhere."""
    found = set()
    for decorator in normalise.decorators(node):
        callee = decorator.func if isinstance(decorator, ast.Call) else decorator
        value = _resolved(callee, look_up)
        if libraries.is_tuner(str(attribute(value, "__module__"))):
            found.add(decorator)
    return frozenset(found)


def makers(module: types.ModuleType, name: str) -> list[ast.stmt]:
    """The statements of ``module`` that made its global ``name``. One that calls a method of a
    tuned function, as ``record = tuned.tune(x)`` does, uses the function and does not make it."""

    def is_tuned(node: ast.expr) -> bool:
        value = _resolved(node, lambda root: vars(module).get(root))
        return libraries.is_tuner(type(attribute(value, "__func__", value)).__module__)

    return [
        each
        for each in definitions.makers(module, name)
        if name in making.made_by(each, is_tuned) or name not in making.made_by(each)
    ]


def _resolved(node: ast.expr, look_up: LookUp) -> Any:
    """The value of a dotted name; ``None`` if it has none."""
    root, *path = (normalise.dotted(node) or "").split(".")
    value = look_up(root)
    for part in path:
        value = attribute(value, part)
    return value


def configs_of(library: libraries.Libraries, value: Any) -> ConfigSpace | None:
    """Config space of a tuned function, if it counts as written here."""
    space = attribute(value, "config_space")
    counts = isinstance(space, ConfigSpace) and not library.has_module(original(value).__module__)
    return space if counts else None


def inherited(cls: Any, receiver: type | None, names: Iterable[str]) -> dict[str, Any]:
    """Methods that ``super()`` of ``cls`` finds for an object of ``receiver``."""
    mro = _narrower(cls, receiver).__mro__ if isinstance(cls, type) else ()
    above = mro[mro.index(cls) + 1 :]
    return {
        name: next((vars(base)[name] for base in above if name in vars(base)), None)
        for name in names
    }


def receiver_of(root: Any) -> type | None:
    """The class whose methods ``root`` calls by its first parameter, if it is a method."""
    function = inspect.unwrap(root)
    if not isinstance(function, types.FunctionType):
        return None
    return receiver(function, sys.modules.get(function.__module__), None)[1]


def receiver(
    function: types.FunctionType, module: types.ModuleType | None, of: type | None
) -> tuple[str, type | None]:
    """The name of a method's first parameter, and the class that the method is defined in; or
    ``of``, where that inherits from it."""
    value: Any = module
    for part in function.__qualname__.split(".")[:-1]:
        value = attribute(value, part)
    if isinstance(value, type) and function.__code__.co_argcount:
        return function.__code__.co_varnames[0], _narrower(value, of)
    return "", None


def _narrower(cls: type, other: type | None) -> type:
    return other if other is not None and issubclass(other, cls) else cls


def defaults(function: types.FunctionType) -> Mapping[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
    return {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}


def is_code(value: Any) -> bool:
    """True if ``value`` is a function, or a Triton kernel or its wrapper, which cannot be called
    but launched."""
    return callable(value) or has_own(value, "fn")


def attribute(value: Any, name: str, default: Any = None) -> Any:
    try:
        return getattr(value, name, default)
    except Exception:  # objects with a __getattr__ of their own
        return default


class Local(NamedTuple):
    """Object that is no global of who reads it, and the module and its name there."""

    value: Any
    module: types.ModuleType
    attribute: str


def custom_op(holder: Any, path: Sequence[str]) -> Local | None:
    """The op of ``torch.library.custom_op``, or ``triton_op``, that is called by its name: ``path``
    leads from the module ``holder`` to ``torch.ops.space.name``. ``None`` for all else."""
    if not isinstance(holder, types.ModuleType):
        return None
    names = [*holder.__name__.split("."), *path]
    if names[:2] != ["torch", "ops"] or len(names) < 4:
        return None
    # No public function of torch tells. This table is there from torch 2.4 on.
    known = attribute(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
    op = known.get("::".join(names[2:4]))
    function = attribute(op, "_init_fn")
    module = sys.modules.get(attribute(function, "__module__", ""), ABSENT)
    return op and Local(op, module, attribute(function, "__name__", ""))


def looking_up(
    function: types.FunctionType, local: Mapping[str, Local], own_name: str, owner: type | None
) -> LookUp:
    """Looks up names as ``function`` does.

    Args:
        local: what it imports when it is called.
        own_name: name of its first parameter, if it is a method of ``owner``.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def look_up(root: str) -> Any:
        if root in cells:
            try:
                return cells[root].cell_contents
            except ValueError:  # not bound yet
                return None
        if root in local:
            return local[root].value
        return owner if root == own_name else function.__globals__.get(root, ABSENT)

    return look_up


def imported(
    library: libraries.Libraries, package: str, node: making.Definition | None
) -> dict[str, Local]:
    """Objects that a function of ``package`` imports when it is called, by their names there. Their
    modules are imported now, as they will be then."""
    found: dict[str, Local] = {}
    for each in normalise.imports(node) if node is not None else ():
        module = library.imported(each.module, each.level, package)
        if module is None:
            continue
        if each.attribute is not None:
            if not hasattr(module, each.attribute):  # a submodule, or not there
                library.imported(f"{module.__name__}.{each.attribute}")
            value = attribute(module, each.attribute, ABSENT)
            found[each.name] = Local(value, module, each.attribute)
        elif each.name == each.module:  # import a.b binds a
            top = each.module.partition(".")[0]
            found[top] = Local(sys.modules[top], module, top)
        else:
            found[each.name] = Local(module, module, each.name)
    return found
