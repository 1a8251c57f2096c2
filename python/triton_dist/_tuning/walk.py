"""A walk through a function and everything that it reaches.

Which of that counts, and what for, :mod:`~triton_dist._tuning.source` says.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from triton_dist._tuning import definitions, libraries, literals, normalise
from triton_dist._tuning.constants import Constants, text_of
from triton_dist._tuning.snapshot import Snapshot
from triton_dist._tuning.values import codec, qualified_name

_ABSENT = types.ModuleType("absent")
_WRAPPED = ("fn", "__wrapped__", "func", "_init_fn")
"""Attributes in which callables keep the function inside: Triton's kernels and tuned functions;
functools.cache and torch.compile; cached_property; torch.library.custom_op."""

_TEXTLESS = (types.FunctionType, type, types.ModuleType, list, set, dict)
"""Types of values that are code, or that may change while the program runs."""
_LookUp = Callable[[str], Any]


class Walk:
    """Depth first, in the order of names, so that all ranks and processes get the same names."""

    def __init__(
        self, library: libraries.Libraries, constants: Constants, snapshot: Snapshot
    ) -> None:
        self.texts: dict[str, str] = {}
        self.constants = constants
        self._library, self._snapshot = library, snapshot
        self._names: dict[int, str] = {}
        self._namesakes: Counter[str] = Counter()
        self._alive: list[object] = []  # an id means something only while its object lives

    def root(self, value: Any) -> None:
        """A function, or what stands for one: a partial, a bound method, a callable object."""
        self.reference(value)
        for name, text in self._snapshot.state(value).items():
            if not self.constants.ignores(name):
                self.constants.bound[self.constants.name(name, value)] = text

    def reference(
        self, value: Any, origin: tuple[types.ModuleType | None, str] = (None, "")
    ) -> str:
        """Visit ``value`` if it is code; returns a text that stands for it.

        Args:
            origin: module and name of the global that holds it, for values that may change while
                the program runs: the statements that made it count, not what it holds at the
                moment.
        """
        if isinstance(value, types.ModuleType):
            return ""
        if isinstance(value, functools.partial):
            return self._partial(value)
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            return self.reference(value.__func__)
        if isinstance(value, property):
            return self.reference((value.fget, value.fset))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if type(value).__name__ == "constexpr":
            return self.reference(value.value)
        if isinstance(value, enum.Enum):
            return f"{self._class(type(value))}.{value.name}"
        if codec.is_triton_config(value):
            tree = codec.encode(value, binding=False)
            return f"{codec.text(tree)} {self._functions_in(value)}"
        inside = next((each for each in _WRAPPED if _is_code(_attribute(value, each))), None)
        if inside is not None:
            return self._wrapped(value, inside, origin)
        if dataclasses.is_dataclass(value):
            return self._dataclass(value, origin)
        if isinstance(value, tuple):
            return f"({', '.join(map(self.reference, value))})"
        if isinstance(value, (list, set, dict)):
            items = value.values() if isinstance(value, dict) else value
            code = [self.reference(item) for item in items if callable(item)]
            return f"{type(value).__name__} {self._made(*origin)} {sorted(code)}"
        if type(value).__module__ == "torch" and type(value).__name__ == "device":
            return f"device {value.type}"  # which one differs by rank
        try:
            return codec.text(codec.encode(value))
        except TypeError:
            return f"{self._class(type(value))} {self._made(*origin)}"

    def _partial(self, value: functools.partial[Any]) -> str:
        label = qualified_name(value).rpartition(".")[2]
        given = [*enumerate(value.args), *sorted(value.keywords.items())]
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
        if isinstance(value, (list, set, dict)):  # may change as the program runs
            text = self._snapshot.container(value)
            if text is not None:
                constants.bound[name] = text
            return self.reference(value)
        with suppress(TypeError):
            constants.bound[name] = text_of(value)
            return self._class(type(value)) if isinstance(value, enum.Enum) else ""
        if isinstance(value, tuple):
            items = [self._bound(f"{name}.{i}", item, value) for i, item in enumerate(value)]
            return f"({', '.join(items)})"
        if not (
            _is_code(value)
            or dataclasses.is_dataclass(value)
            or isinstance(value, (type, types.ModuleType, property))
        ):
            constants.uncounted[name] = f"a {type(value).__name__}, of which the class counts"
        return self.reference(value)

    def _read(self, chain: str, value: Any, holder: Any, last: str) -> str:
        """A value that code reads under a dotted name: a global of module ``holder``, or an
        attribute of that class."""
        constants, holding_class = self.constants, isinstance(holder, type)
        if constants.ignores(last):
            return ""
        origin = (None if holding_class else holder, last)
        data = value.value if type(value).__name__ == "constexpr" else value
        try:
            text = "" if isinstance(data, _TEXTLESS) else text_of(data)
        except TypeError:
            text = ""
        if not text or (holding_class and isinstance(data, enum.Enum)):
            return f"{chain} = {self.reference(value, origin)}"
        if not holding_class:
            holder, last = origin = literals.home(holder, last)
        name = constants.name(f"{holder.__name__}.{last}" if holding_class else last, holder)
        where = literals.of_attribute if holding_class else literals.of_global
        found = where(holder, last, data)
        if found is literals.Origin.COMPUTED:
            constants.uncounted[name] = found.value
            return f"{chain} = {self._made(*origin)}"
        known = constants.literal if found is literals.Origin.LITERAL else constants.bound
        known[name] = text
        return f"{chain} = {self._class(type(data))}" if isinstance(data, enum.Enum) else ""

    def _dataclass(self, value: Any, origin: tuple[types.ModuleType | None, str]) -> str:
        """By its fields; a global that may change while the program runs, by how it was made."""
        cls = self._class(type(value))
        made = "" if value.__dataclass_params__.frozen else self._made(*origin)
        if made or id(value) in self._names:  # one that leads back to itself
            return f"{cls} {made}"
        self._names[id(value)] = cls
        self._alive.append(value)
        fields = [
            self._bound(f"{cls}.{f.name}", getattr(value, f.name), value)
            for f in dataclasses.fields(value)
        ]
        del self._names[id(value)]
        return f"{cls} {fields}"

    def _wrapped(self, value: Any, inside: str, origin: tuple[Any, str]) -> str:
        """A Triton kernel (compiled or interpreted), its ``autotune`` or ``heuristics``, or another
        wrapper: the function inside, and beside it what changes its code."""
        text = f"{self.reference(_attribute(value, inside))} {self._functions_in(value)}"
        configs = _attribute(value, "configs")
        if isinstance(configs, list) and all(map(codec.is_triton_config, configs)):
            text += f" configs {[self.reference(config) for config in configs]}"
        heuristics = _attribute(value, "values")
        if isinstance(heuristics, dict):
            computed = [(name, self.reference(heuristics[name])) for name in sorted(heuristics)]
            text += f" heuristics {computed}"
        return f"{text} {self._made(*origin)}"  # triton.jit(noinline=True)(function)

    def _functions_in(self, value: Any) -> list[str]:
        """Functions that are attributes of ``value``, such as hooks and prune functions."""
        found = sorted(getattr(value, "__dict__", {}).items())
        return [
            f"{name} {self.reference(item)}"
            for name, item in found
            if isinstance(item, types.FunctionType)
            and name not in _WRAPPED
            and not self._library.has_function(item)
        ]

    def _function(self, function: types.FunctionType) -> str:
        inner = getattr(function, "__wrapped__", None)
        if self._library.has_function(function):
            return (
                f"{function.__module__}.{function.__qualname__}"
                if inner is None
                else self.reference(inner)
            )
        name, known = self._name(function)
        if known:
            return name
        code, module = function.__code__, sys.modules.get(function.__module__)
        node = definitions.definition(code)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        receiver, owner = _receiver(function, module)
        local = self._imported(function, node)

        def look_up(root: str) -> Any:
            if root in cells:
                try:
                    return cells[root].cell_contents
                except ValueError:  # not bound yet
                    return None
            if root in local:
                return local[root]
            return owner if root == receiver else function.__globals__.get(root, _ABSENT)

        read, bound = normalise.global_names(code)
        roots = read | cells.keys() | local.keys() | {receiver}
        written = {} if node is None else normalise.defaults(node)
        given = [
            self._bound(f"{name}.{each}", value, function)
            for each, value in _defaults(function).items()
            if each not in written or not literals.is_literal(written[each], module)
        ]
        lines = [f"({', '.join(filter(None, given))})"]
        lines += [] if inner is None else [self.reference(inner)]
        if node is None:
            lines.append(normalise.bytecode(code))
            found: Iterable[str] = roots
        else:
            dropped = _tuners(node, look_up)
            lines.append(normalise.normalised(node, dropped))
            roots |= normalise.header_names(node, dropped)
            found = normalise.chains(node, dropped)
        reached = {each for each in found if each.partition(".")[0] in roots - bound} - {receiver}
        in_cells = {each for each in reached if each.partition(".")[0] in cells}
        for cell in sorted({each.partition(".")[0] for each in in_cells}):
            lines += filter(None, [self._cell(f"{name}.{cell}", cell, look_up(cell), function)])
        self.texts[name] = "\n".join([*lines, *self._reached(reached - in_cells, look_up, module)])
        return name

    def _cell(self, name: str, cell: str, value: Any, function: types.FunctionType) -> str:
        if cell in normalise.rebound_cells(function.__code__):
            self.constants.uncounted[name] = "it changes as the function runs"
            return ""
        text = self._bound(name, value, function)
        return f"{cell} = {text}" if text else ""

    def _class(self, cls: type) -> str:
        module = sys.modules.get(cls.__module__)
        if module is None or self._library.has_module(module.__name__):
            return f"{cls.__module__}.{cls.__qualname__}"
        name, known = self._name(cls)
        if known:
            return name
        node = definitions.definition(cls)
        if node is None:
            methods = [each for each in vars(cls).values() if isinstance(each, types.FunctionType)]
            self.texts[name] = "\n".join(normalise.bytecode(each.__code__) for each in methods)
            return name

        def look_up(root: str) -> Any:
            return vars(module).get(root, _ABSENT)

        dropped = _tuners(node, look_up)
        reached = self._reached(normalise.chains(node, dropped), look_up, module)
        self.texts[name] = "\n".join([normalise.normalised(node, dropped), *reached])
        return name

    def _name(self, item: Any) -> tuple[str, bool]:
        """A unique name, and whether ``item`` was visited before."""
        known = self._names.get(id(item))
        if known is not None:
            return known, True
        # A wrapper has the name of what it wraps; its code has its own.
        own = item.__code__.co_name if hasattr(item, "__wrapped__") else item.__qualname__
        base = own.rpartition("<locals>.")[2]
        self._namesakes[base] += 1
        count = self._namesakes[base]
        name = base if count == 1 else f"{base}#{count}"
        self._names[id(item)] = name
        self._alive.append(item)
        self.texts[name] = ""  # taken, while what it reaches is visited
        return name, False

    def _reached(
        self, chains: Iterable[str], look_up: _LookUp, module: types.ModuleType | None
    ) -> list[str]:
        """A line for each name that leads to code or a constant."""
        lines = []
        for chain in sorted(chains):
            root, *path = chain.split(".")
            value, last = look_up(root), root
            holder: types.ModuleType | type | None = module
            for part in path:
                if not isinstance(value, (types.ModuleType, type)) or self._library.has(value):
                    break
                holder, last = value, part
                value = _attribute(value, part, _ABSENT)
            if value is not _ABSENT:
                lines.append(self._read(chain, value, holder, last))
        return [line for line in lines if line]

    def _made(self, module: types.ModuleType | None, name: str) -> str:
        """The statements that made a global, and what they reach."""
        if module is None or self._library.has_module(module.__name__):
            return ""
        lines = []
        for statement in definitions.makers(module, name):
            lines.append(normalise.statement(statement))
            if id(statement) not in self._names:
                self._names[id(statement)] = name
                self._alive.append(statement)
                reached = {
                    each for each in normalise.chains(statement) if each.partition(".")[0] != name
                }
                lines += self._reached(
                    reached, lambda root: vars(module).get(root, _ABSENT), module
                )
        return "\n".join(lines)

    def _imported(
        self, function: types.FunctionType, node: definitions.Definition | None
    ) -> dict[str, Any]:
        """Objects that a function imports when it is called, by their names there. Their modules
        are imported now, as they will be then."""
        package = function.__globals__.get("__package__") or ""
        found = {}
        for each in normalise.imports(node) if node is not None else ():
            module = self._library.imported(each.module, each.level, package)
            if module is None:
                continue
            if each.attribute is not None:
                if not hasattr(module, each.attribute):  # a submodule, or not there
                    self._library.imported(f"{module.__name__}.{each.attribute}")
                found[each.name] = _attribute(module, each.attribute, _ABSENT)
            elif each.name == each.module:  # import a.b binds a
                top = each.module.partition(".")[0]
                found[top] = sys.modules[top]
            else:
                found[each.name] = module
        return found


def _tuners(node: definitions.Definition, look_up: _LookUp) -> frozenset[ast.expr]:
    """The decorators that are the tuner's own: their arguments are compared by value elsewhere."""
    found = set()
    for decorator in normalise.decorators(node):
        callee = decorator.func if isinstance(decorator, ast.Call) else decorator
        root, *path = (normalise.dotted(callee) or "").split(".")
        value = look_up(root)
        for part in path:
            value = _attribute(value, part)
        if libraries.is_tuner(str(_attribute(value, "__module__"))):
            found.add(decorator)
    return frozenset(found)


def _receiver(
    function: types.FunctionType, module: types.ModuleType | None
) -> tuple[str, type | None]:
    """The name of a method's first parameter, and the class that the method is defined in."""
    value: Any = module
    for part in function.__qualname__.split(".")[:-1]:
        value = _attribute(value, part)
    if isinstance(value, type) and function.__code__.co_argcount:
        return function.__code__.co_varnames[0], value
    return "", None


def _defaults(function: types.FunctionType) -> Mapping[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
    return {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}


def _is_code(value: Any) -> bool:
    """True if ``value`` is a function, or a Triton kernel or its wrapper, which cannot be called
    but launched."""
    return callable(value) or hasattr(value, "fn")


def _attribute(value: Any, name: str, default: Any = None) -> Any:
    try:
        return getattr(value, name, default)
    except Exception:  # objects with a __getattr__ of their own
        return default
