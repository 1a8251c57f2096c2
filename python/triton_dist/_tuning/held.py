"""Values that functions, globals and containers hold: what in them is code, and what is data."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from triton_dist._tuning import libraries
from triton_dist._tuning.constants import Constants, text_of
from triton_dist._tuning.inspected import (
    CODE,
    COLLECTIONS,
    CONTAINERS,
    WRAPPED,
    attribute,
    attributes,
    bound_to,
    closure_of,
    code_in,
    configs_of,
    inner_code,
    may_change,
    ordered,
    types_in,
)
from triton_dist._tuning.snapshot import Snapshot
from triton_dist._tuning.values import codec, qualified_name
from triton_dist._tuning.visited import Visited

_MOST_VISITS = 10_000
"""Values of one global that are looked into."""
Origin = tuple[types.ModuleType | type | None, str]


class Held(ABC):
    """Visits values; functions, classes and statements are for
    :class:`~triton_dist._tuning.walk.Walk`."""

    def __init__(
        self, library: libraries.Libraries, constants: Constants, snapshot: Snapshot
    ) -> None:
        self.constants = constants
        self._library, self._snapshot = library, snapshot
        self._visited = Visited()

    @abstractmethod
    def _function(self, function: types.FunctionType) -> str:
        """Visit a function; returns its name."""

    @abstractmethod
    def _class(self, cls: type) -> str:
        """Visit a class; returns its name."""

    @abstractmethod
    def _made(self, holder: types.ModuleType | type | None, name: str) -> str:
        """Visit what made ``name`` in ``holder``; returns its text."""

    def reference(self, value: Any, origin: Origin = (None, "")) -> str:
        """Visit ``value`` if it is code; returns a text that stands for it.

        Args:
            origin: module and name of the global that holds it, for values that may change while
                the program runs: the statements that made it count, not what it holds at the
                moment.
        """
        if isinstance(value, types.ModuleType):
            return ""
        if isinstance(value, functools.partial):
            given = (*value.args, *value.keywords.values())
            made = self._made(*origin) if any(map(may_change, given)) else ""
            return f"{self._partial(value)} {made}".rstrip()
        if isinstance(value, types.MethodType):  # Function.apply runs what its class defines
            made = "" if isinstance(value.__self__, type) else self._made(*origin)
            return f"{self.reference(value.__func__)} {self.reference(bound_to(value))} {made}"
        if isinstance(value, (staticmethod, classmethod)):
            return self.reference(value.__func__)
        if isinstance(value, property):
            return self.reference((value.fget, value.fset))
        if isinstance(value, functools.partialmethod):
            return self.reference(functools.partial(value.func, *value.args, **value.keywords))
        if isinstance(value, types.FunctionType):
            # Of what made ``helper = make([1])``, the list is not known otherwise.
            made = self._made(*origin) if any(map(may_change, closure_of(value))) else ""
            return f"{self._function(value)} {made}".rstrip()
        if isinstance(value, type):
            return self._class(value)
        if type(value).__name__ == "constexpr":
            return self.reference(value.value, origin)
        if isinstance(value, enum.Enum):
            return f"{self._class(type(value))}.{value.name}"
        if codec.is_triton_config(value):
            return f"{codec.text(codec.encode(value, binding=False))} {self._functions_in(value)}"
        inside = inner_code(value)
        if inside is not None:
            return self._wrapped(value, inside, origin)
        if dataclasses.is_dataclass(value):
            return self._dataclass(value, origin)
        if isinstance(value, tuple):
            return f"({', '.join(map(self.reference, value))}) {self._made(*origin)}".rstrip()
        if isinstance(value, COLLECTIONS):
            code = sorted(map(self.reference, code_in(value)))
            return f"{type(value).__name__} {self._made(*origin)} {code}"
        if type(value).__module__ == "torch" and type(value).__name__ == "device":
            return f"device {value.type}"  # which one differs by rank
        try:
            return codec.text(codec.encode(value))
        except TypeError:
            return f"{self._class(type(value))} {self._made(*origin)}"

    def visit(self, value: Any, home: str) -> None:
        """Visit the code in what a global holds at the moment. What it holds beside code may differ
        by rank and by time, and so may closures that functions of ``home``, its module, keep in it,
        as caches do: the statements that made it, and those functions, say what they are. Of what
        an object holds no closure counts at all.
        """
        seen, ahead = set[int](), [(value, home)]
        while ahead and len(seen) < _MOST_VISITS:
            item, home = ahead.pop()
            if id(item) not in seen:
                seen.add(id(item))
                ahead += reversed([*self._visited_next(item, home)])

    def _visited_next(self, value: Any, home: str) -> Iterator[tuple[Any, str]]:
        """Visit a value if it is code; yields what is in it, and whose closures do not count."""
        if isinstance(value, functools.partial):
            yield value.func, home
        elif isinstance(value, COLLECTIONS):
            yield from ((item, home) for item in ordered(value))
        elif isinstance(value, types.FunctionType):
            if not _is_inner(value, home):
                self._function(value)
        elif (inside := inner_code(value)) is not None:
            if not _is_inner(attribute(value, inside), home):
                self.reference(value)
        elif isinstance(value, (type, property, staticmethod, classmethod, types.MethodType)):
            self.reference(value)
        elif not isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
            self._types(value)
            self._class(type(value))
            if not self._library.has(type(value)):
                yield from ((item, "") for item in attributes(value).values())

    def _types(self, value: Any) -> str:
        """Visit the classes of data, which may have methods."""
        return ", ".join(self._class(each) for each in types_in(value))

    def _state(self, value: Any) -> None:
        """Visit what a callable object, or the object that a method is bound to, held."""
        for name, text in self._snapshot.state(value).items():
            if not self.constants.ignores(name):
                self.constants.bound[self.constants.name(name, value)] = text
        for name, item in self._snapshot.code(value).items():
            if text := self._bound(name, item, value):
                self.constants.bound[f"code of {self.constants.name(name, value)}"] = text

    def _partial(self, value: functools.partial[Any]) -> str:
        label = qualified_name(value).rpartition(".")[2]
        given = [*enumerate(value.args), *sorted(value.keywords.items())]
        self._state(value.func)
        bound = [self._bound(f"{label}.{name}", item, value) for name, item in given]
        return f"partial {self.reference(value.func)} {list(filter(None, bound))}"

    def _bound(self, name: str, value: Any, holder: object) -> str:
        """A value that ``holder`` binds: its data is a constant, its code is the text."""
        constants = self.constants
        name = constants.name(name, holder)
        if constants.ignores(name):
            return ""
        if type(value).__name__ == "constexpr":
            value = value.value
        text = self._snapshot.container(value)
        if isinstance(value, CONTAINERS) or text is not None:
            if text is None:
                constants.uncounted[name] = f"a {type(value).__name__}, which may change"
            else:
                constants.bound[name] = text
            code = sorted(map(self.reference, code_in(value)))
            return f"{self._types(value) or type(value).__name__} {code}"
        with suppress(TypeError):
            constants.bound[name] = text_of(value)
            return self._types(value)
        if isinstance(value, tuple):
            items = [self._bound(f"{name}.{i}", item, value) for i, item in enumerate(value)]
            return f"({', '.join(items)}) {self._types(value)}".rstrip()
        if not (
            isinstance(value, (*CODE, *COLLECTIONS))
            or inner_code(value) is not None
            or dataclasses.is_dataclass(value)
        ):
            constants.uncounted[name] = f"a {type(value).__name__}, of which the class counts"
        return self.reference(value)

    def _dataclass(self, value: Any, origin: Origin) -> str:
        """By its fields; a global that may change while the program runs, by how it was made."""
        cls = self._class(type(value))
        made = "" if value.__dataclass_params__.frozen else self._made(*origin)
        if made or self._visited.name(value):  # one that leads back to itself
            return f"{cls} {made}"
        self._visited.add(value, cls)
        fields = [
            self._bound(f"{cls}.{f.name}", getattr(value, f.name), value)
            for f in dataclasses.fields(value)
        ]
        self._visited.leave(value)
        return f"{cls} {fields}"

    def _wrapped(self, value: Any, inside: str, origin: Origin) -> str:
        """A Triton kernel (compiled or interpreted), its ``autotune`` or ``heuristics``, or another
        wrapper: the function inside, and beside it what changes its code."""
        text = f"{self.reference(attribute(value, inside))} {self._functions_in(value)}"
        if not self._library.has(type(value)):
            text += f" in a {self._class(type(value))}"
        configs = attribute(value, "configs")
        if isinstance(configs, list) and all(map(codec.is_triton_config, configs)):
            text += f" configs {[self.reference(config) for config in configs]}"
        heuristics = attribute(value, "values")
        if isinstance(heuristics, dict):
            computed = [(name, self.reference(heuristics[name])) for name in sorted(heuristics)]
            text += f" heuristics {computed}"
        text += self._space(value)
        return f"{text} {self._made(*origin)}"  # triton.jit(noinline=True)(function)

    def _space(self, value: Any) -> str:
        """The configs of a tuned function that code calls; each rank may have others, alone."""
        space = configs_of(self._library, value)
        if space is None:
            return ""
        name = self.constants.name(f"configs of {qualified_name(value)}", value)
        if space.maker is not None:  # not asked: perhaps the function is never called
            if not isinstance(space.maker, (types.FunctionType, functools.partial)):
                self.constants.uncounted[name] = "made by an object, of which the class counts"
            return f" space {self.reference(space.maker)}"
        self.constants.bound[name] = space.digest
        return f" space {[self.reference(each) for each in (*space.functions, *space.classes)]}"

    def _functions_in(self, value: Any) -> list[str]:
        """Functions that are attributes of ``value``, such as hooks and prune functions."""
        return [
            f"{name} {self.reference(item)}"
            for name, item in sorted(getattr(value, "__dict__", {}).items())
            if isinstance(item, types.FunctionType)
            and name not in WRAPPED
            and not self._library.has_function(item)
        ]


def _is_inner(function: Any, home: str) -> bool:
    """True for a function that a function of the module ``home`` made; "": of any module."""
    is_inner = "<locals>" in getattr(function, "__qualname__", "")
    return is_inner and home in ("", getattr(function, "__module__", ""))
