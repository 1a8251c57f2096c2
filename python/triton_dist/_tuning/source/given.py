"""Values that no statement tells: what a tuned function was given when it was made, and code that
other modules have put into a global.

A closure, a partial, a callable object and the object of a bound method hold values that differ by
function: their data is noted as constants, their code is followed. Of other values only the code is
followed, since they may differ by rank and change while the program runs.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from triton_dist._tuning.source.constants import Constants, has_own, text_of
from triton_dist._tuning.source.snapshot import (
    COLLECTIONS,
    CONTAINERS,
    Snapshot,
    attribute,
    attributes,
    inside,
    items_of,
)
from triton_dist._tuning.values import ConfigSpace, codec, qualified_name

_WRAPPED = ("fn", "__wrapped__", "func", "_init_fn")
"""Attributes in which callables keep the function inside: Triton's kernels and tuned functions;
functools.cache and torch.compile; cached_property; torch.library.custom_op."""
_MOST_VISITS = 10_000
"""Values of one global that are looked into."""


class Given:
    """Follows values, for a :class:`~triton_dist._tuning.source.slices.Slice`."""

    def __init__(self, slice_: Any, constants: Constants, snapshot: Snapshot) -> None:
        self._slice, self._constants, self._snapshot = slice_, constants, snapshot
        self._seen: dict[int, object] = {}  # an id means something only while its object lives

    def root(self, value: Any) -> None:
        """Follow a function that is tuned, or what stands for one: a partial, a bound method, a
        callable object."""
        self.code(value)
        for name, text in self._snapshot.state(value).items():
            if not self._constants.ignores(name):
                self._constants.bound[self._constants.name(name, value)] = text
        for name, item in self._snapshot.code(value).items():
            self.bind(name, item, value)

    def code(self, value: Any) -> str:
        """Follow the code that a value is; returns a name for it."""
        if isinstance(value, type):
            return str(self._slice.cls(value))
        if isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
            return f"{attribute(value, '__module__', '')}.{value.__name__}"
        if isinstance(value, types.MethodType):
            held = value.__self__
            cls = held if isinstance(held, type) else type(held)
            return f"{self.code(value.__func__)} of {self.code(cls)}"
        if not self._is_new(value):
            return str(attribute(value, "__qualname__", type(value).__qualname__))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, (functools.partial, functools.partialmethod)):
            label, name = qualified_name(value).rpartition(".")[2], self.code(value.func)
            for each, item in [*enumerate(value.args), *sorted(value.keywords.items())]:
                self.bind(f"{label}.{each}", item, value)
            self.root(value.func)
            return f"partial {name}"
        if isinstance(value, property):
            return f"{self.code(value.fget)} {self.code(value.fset)}"
        name = inner_code(value)
        if isinstance(value, (staticmethod, classmethod)):
            return self.code(value.__func__)
        if name:
            return self._wrapper(value, name)
        self.values_in(value)
        return self.code(type(value))

    def _is_new(self, value: Any) -> bool:
        return id(value) not in self._seen and self._seen.setdefault(id(value), value) is value

    def _function(self, function: types.FunctionType) -> str:
        inner = attribute(function, "__wrapped__")
        if not self._slice.library.has_function(function):
            label = self._slice.function(function)
            return label if inner is None else f"{label} {self.code(inner)}"
        self._slice.version(function.__module__ or "")
        # functools.singledispatch, and what a library's decorator keeps in a closure.
        inside = [*attribute(function, "registry", {}).values(), *cells_of(function).values()]
        names = [
            self.code(each) for each in (inner, *inside) if isinstance(each, types.FunctionType)
        ]
        return " ".join([*names, f"{function.__module__}.{function.__qualname__}"])

    def _wrapper(self, value: Any, name: str) -> str:
        """A Triton kernel, its ``autotune`` or ``heuristics``, a tuned function or another wrapper:
        the function inside, and what changes its code."""
        inner = self.code(attribute(value, name))
        configs, space = attribute(value, "configs"), attribute(value, "config_space")
        configs = configs if isinstance(configs, list) else []
        for each in (value, *configs):
            held, heuristics = attributes(each), attribute(each, "values")
            for item in [*held.values(), *items_of(heuristics).values()]:
                if isinstance(item, types.FunctionType):
                    self.code(item)
        unique = self._constants.name(f"configs of {qualified_name(value)}", value)
        if configs and all(map(codec.is_triton_config, configs)):
            self._constants.bound[unique] = codec.text(codec.encode(configs, binding=False))
        if isinstance(space, ConfigSpace) and space.maker is not None:
            self.code(space.maker)  # not called: perhaps the function never is
        elif isinstance(space, ConfigSpace):
            self._constants.bound[unique] = space.digest
            for each in (*space.functions, *space.classes):
                self.code(each)
        return inner

    def values_in(self, value: Any) -> None:
        """Follow code in a container, and the classes of data in it, which may have methods."""
        for each in inside(value):
            self.code(each if is_code(each) else type(each))

    def closure(self, function: types.FunctionType, rebound: Iterable[str]) -> None:
        """Note what an inner function binds: closure cells and defaults."""
        full = getattr(function.__code__, "co_qualname", function.__qualname__)
        label, code = full.rpartition("<locals>.")[2], function.__code__
        given = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
        held = {**cells_of(function), **dict(zip(names, given, strict=True))}
        for name, value in {**held, **(function.__kwdefaults__ or {})}.items():
            if name == "__class__" or value is attribute(function, "__wrapped__"):
                self.code(value)
            elif name in rebound:
                unique = self._constants.name(f"{label}.{name}", function)
                self._constants.uncounted[unique] = "it changes as the function runs"
            else:
                self.bind(f"{label}.{name}", value, function)

    def bind(self, name: str, value: Any, holder: object) -> None:
        """Note a value that ``holder`` binds: its data is a constant, its code is followed."""
        constants = self._constants
        if constants.ignores(name := constants.name(name, holder)):
            return
        if type(value).__name__ == "constexpr":
            value = value.value
        text = self._snapshot.container(value)
        if text is None and not isinstance(value, CONTAINERS):
            with suppress(TypeError):
                text = text_of(value)
        if text is not None:
            constants.bound[name] = text
            self.values_in(value)
        elif isinstance(value, CONTAINERS):
            constants.uncounted[name] = f"a {type(value).__name__}, which may change"
            self.values_in(value)
        elif items := items_of(value):  # a tuple, or an object of a dataclass
            self.code(type(value))
            for each, item in items.items() if self._is_new(value) else ():
                self.bind(f"{name}.{each}", item, value)
        elif is_code(value):
            constants.bound[name] = self.code(value)
        elif not isinstance(value, types.ModuleType):  # what is read from a module is followed
            constants.uncounted[name] = f"a {type(value).__name__}, of which the class counts"
            self.code(type(value))

    def members(self, cls: type) -> Iterator[str]:
        """Texts of the members of a class without a source."""
        for name, member in sorted(vars(cls).items()):
            if isinstance(member, (types.FunctionType, staticmethod, classmethod, property)):
                yield f"{name} {self.code(member)}"
            elif not name.startswith("__"):
                with suppress(TypeError):
                    yield f"{name} = {text_of(member)}"

    def foreign(self, value: Any, scope: dict[str, Any]) -> None:
        """Follow code of other modules in what a global holds: functions that they registered, or
        put in the place of the module's own."""
        seen, ahead, library = set[int](), [value], self._slice.library
        while ahead and len(seen) < _MOST_VISITS:
            item = ahead.pop()
            if id(item) in seen or isinstance(item, (types.ModuleType, str, bytes, int, float)):
                continue
            seen.add(id(item))
            if name := inner_code(item):  # a kernel, or a decorated function
                ahead.append(attribute(item, name))
            if isinstance(item, types.FunctionType):
                own = item.__globals__
                full = getattr(item.__code__, "co_qualname", item.__qualname__)
                ahead += attribute(item, "registry", {}).values()
                if own is not scope and not library.has_function(item):
                    # Of a closure, the values may differ by rank.
                    self._slice.name(own, full.partition(".")[0])
            elif isinstance(item, type):
                if not library.has(item):
                    self.code(item) if item.__module__ != scope.get("__name__") else None
                    ahead += [x for x in vars(item).values() if isinstance(x, COLLECTIONS)]
            elif isinstance(item, COLLECTIONS):
                ahead += reversed(items_of(item).values())
            elif isinstance(item, functools.partial):
                ahead += [item.func, *item.args, *item.keywords.values()]
            elif isinstance(item, types.MethodType):
                ahead += [item.__func__, item.__self__]
            elif not library.has(type(item)):
                ahead += [type(item), *attributes(item).values()]

    def custom_op(self, space: types.ModuleType, path: list[str]) -> bool:
        """Follow ``torch.ops.space.name`` of ``torch.library.custom_op``; False for all else."""
        names = [*space.__name__.split("."), *path]
        if names[:2] != ["torch", "ops"] or len(names) < 4:
            return False
        # No public function of torch tells. This table is there from torch 2.4 on.
        known = attribute(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
        function = attribute(known.get("::".join(names[2:4])), "_init_fn")
        if isinstance(function, types.FunctionType):
            self.code(function)
            if module := sys.modules.get(function.__module__):
                self._slice.name(vars(module), function.__name__)
        return True


def inner_code(value: Any) -> str:
    """The attribute of a kernel or a wrapper that has the function inside. One that ``__getattr__``
    makes up does not count."""
    found = (x for x in _WRAPPED if has_own(value, x) and is_code(attribute(value, x)))
    return next(found, "")


def is_code(value: Any) -> bool:
    """True for a function, and for a Triton kernel, which cannot be called but launched."""
    return callable(value) or isinstance(value, (property, classmethod)) or has_own(value, "fn")


def function_in(value: Any) -> types.FunctionType | None:
    """A function, also one inside a kernel or a decorator; ``None`` for other values."""
    for name in ("__func__", "__wrapped__", "fget", "fn"):
        if not isinstance(value, types.FunctionType):
            value = attribute(value, name, value)
    return value if isinstance(value, types.FunctionType) else None


def cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Values of the closure cells that are bound, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found
