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
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from triton_dist._tuning import definitions, libraries, literals, normalise
from triton_dist._tuning.constants import Constants, text_of
from triton_dist._tuning.inspected import (
    ABSENT,
    CONTAINERS,
    LookUp,
    attribute,
    bound_to,
    closure_of,
    code_in,
    configs_of,
    custom_op,
    defaults,
    imported,
    inherited,
    is_code,
    looking_up,
    makers,
    may_change,
    receiver,
    receiver_of,
    tuners,
)
from triton_dist._tuning.snapshot import Snapshot
from triton_dist._tuning.values import codec, qualified_name
from triton_dist._tuning.visited import Visited

_WRAPPED = ("fn", "__wrapped__", "func", "_init_fn")
"""Attributes in which callables keep the function inside: Triton's kernels and tuned functions;
functools.cache and torch.compile; cached_property; torch.library.custom_op."""

_TEXTLESS = (types.FunctionType, type, types.ModuleType, *CONTAINERS)
"""Types of values that are code, or that may change while the program runs."""


class Walk:
    """Depth first, in the order of names, so that all ranks and processes get the same names."""

    def __init__(
        self, library: libraries.Libraries, constants: Constants, snapshot: Snapshot
    ) -> None:
        self.texts: dict[str, str] = {}
        self.constants = constants
        self._library, self._snapshot = library, snapshot
        self._receiver: type | None = None
        self._visited = Visited()

    def root(self, value: Any) -> None:
        """A function, or what stands for one: a partial, a bound method, a callable object."""
        self._receiver = receiver_of(value)
        self.reference(value)
        self._state(value)

    def _state(self, value: Any) -> None:
        """Visit what a callable object, or the object that a method is bound to, held."""
        for name, text in self._snapshot.state(value).items():
            if not self.constants.ignores(name):
                self.constants.bound[self.constants.name(name, value)] = text
        for name, item in self._snapshot.code(value).items():
            if text := self._bound(name, item, value):
                self.constants.bound[f"code of {self.constants.name(name, value)}"] = text

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
            given = (*value.args, *value.keywords.values())
            made = self._made(*origin) if any(map(may_change, given)) else ""
            return f"{self._partial(value)} {made}".rstrip()
        if isinstance(value, types.MethodType):  # Function.apply runs what its class defines
            return f"{self.reference(value.__func__)} {self.reference(bound_to(value))}"
        if isinstance(value, (staticmethod, classmethod)):
            return self.reference(value.__func__)
        if isinstance(value, property):
            return self.reference((value.fget, value.fset))
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
        inside = next((each for each in _WRAPPED if is_code(attribute(value, each))), None)
        if inside is not None:
            return self._wrapped(value, inside, origin)
        if dataclasses.is_dataclass(value):
            return self._dataclass(value, origin)
        if isinstance(value, tuple):
            return f"({', '.join(map(self.reference, value))}) {self._made(*origin)}".rstrip()
        if isinstance(value, CONTAINERS):
            code = sorted(map(self.reference, code_in(value)))
            return f"{type(value).__name__} {self._made(*origin)} {code}"
        if type(value).__module__ == "torch" and type(value).__name__ == "device":
            return f"device {value.type}"  # which one differs by rank
        try:
            return codec.text(codec.encode(value))
        except TypeError:
            return f"{self._class(type(value))} {self._made(*origin)}"

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
        if isinstance(value, CONTAINERS):
            text = self._snapshot.container(value)
            if text is None:
                constants.uncounted[name] = f"a {type(value).__name__}, which may change"
            else:
                constants.bound[name] = text
            return self.reference(value)
        with suppress(TypeError):
            constants.bound[name] = text_of(value)
            return self._class(type(value)) if isinstance(value, enum.Enum) else ""
        if isinstance(value, tuple):
            items = [self._bound(f"{name}.{i}", item, value) for i, item in enumerate(value)]
            return f"({', '.join(items)})"
        if not (
            is_code(value)
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
        is_marked = isinstance(data, CONTAINERS) and literals.is_marked(holder, last)
        try:
            text = "" if isinstance(data, _TEXTLESS) and not is_marked else text_of(data)
        except TypeError:
            text = ""
        if not text or (holding_class and isinstance(data, enum.Enum)):
            return f"{chain} = {self.reference(value, origin)}"
        if not holding_class:
            holder, last = origin = literals.home(holder, last)
        name = constants.name(f"{holder.__name__}.{last}" if holding_class else last, holder)
        found = (literals.of_attribute if holding_class else literals.of_global)(holder, last, data)
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
        if made or self._visited.name(value):  # one that leads back to itself
            return f"{cls} {made}"
        self._visited.add(value, cls)
        fields = [
            self._bound(f"{cls}.{f.name}", getattr(value, f.name), value)
            for f in dataclasses.fields(value)
        ]
        self._visited.leave(value)
        return f"{cls} {fields}"

    def _wrapped(self, value: Any, inside: str, origin: tuple[Any, str]) -> str:
        """A Triton kernel (compiled or interpreted), its ``autotune`` or ``heuristics``, or another
        wrapper: the function inside, and beside it what changes its code."""
        text = f"{self.reference(attribute(value, inside))} {self._functions_in(value)}"
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
            and name not in _WRAPPED
            and not self._library.has_function(item)
        ]

    def _function(self, function: types.FunctionType) -> str:
        inner = getattr(function, "__wrapped__", None)
        if self._library.has_function(function):
            of_types = getattr(function, "registry", {})  # functools.singledispatch
            by_type = sorted(
                f"{each.__qualname__} {self.reference(of_types[each])}" for each in of_types
            )
            return (
                f"{function.__module__}.{function.__qualname__}"
                if inner is None
                else f"{self.reference(inner)} {by_type or ''}".rstrip()
            )
        name, known = self._visited.enter(function)
        if known:
            return name
        self.texts[name] = ""  # taken, while what it reaches is visited
        code, module = function.__code__, sys.modules.get(function.__module__)
        node = definitions.definition(code)
        cells = frozenset(code.co_freevars)
        own_name, owner = receiver(function, module, self._receiver)
        local = imported(self._library, function, node)
        look_up = looking_up(function, local, own_name, owner)
        read, bound = normalise.global_names(code)
        roots = read | cells | local.keys() | {own_name}
        written = {} if node is None else normalise.defaults(node)
        given = [
            self._bound(f"{name}.{each}", value, function)
            for each, value in defaults(function).items()
            if each not in written or not literals.is_literal(written[each], module)
        ]
        lines = [f"({', '.join(filter(None, given))})"]
        lines += [] if inner is None else [self.reference(inner)]
        if node is None:
            lines.append(normalise.bytecode(code))
            found: Iterable[str] = roots
        else:
            dropped = tuners(node, look_up)
            lines.append(normalise.normalised(node, dropped))
            roots |= normalise.header_names(node, dropped)
            found = normalise.chains(node, dropped)
        if "__class__" in cells and node is not None:
            names = normalise.called_on_super(node)
            above = inherited(look_up("__class__"), self._receiver, names)
            lines += [f"super().{each} {self.reference(above[each])}" for each in sorted(above)]
        reached = {each for each in found if each.partition(".")[0] in roots - bound} - {own_name}
        in_cells = {each for each in reached if each.partition(".")[0] in cells}
        for cell in sorted({each.partition(".")[0] for each in in_cells}):
            lines += filter(None, [self._cell(f"{name}.{cell}", cell, look_up(cell), function)])
        homes = {each: (found.module, found.attribute) for each, found in local.items()}
        lines += self._reached(reached - in_cells, look_up, module, homes)
        if module is not None:
            for statement in definitions.attributes_set(module, function.__qualname__):
                lines += self._statement(statement, function.__name__, module)
        self.texts[name] = "\n".join(lines)
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
        name, known = self._visited.enter(cls)
        if known:
            return name
        self.texts[name] = ""
        node = definitions.definition(cls)
        if node is None:
            self.texts[name] = "\n".join(self._members(cls))
            return name

        def look_up(root: str) -> Any:
            return vars(module).get(root, ABSENT)

        dropped = tuners(node, look_up)
        lines, chains = [normalise.normalised(node, dropped)], normalise.chains(node, dropped)
        for statement in definitions.attributes_set(module, cls.__qualname__):
            lines.append(normalise.statement(statement))
            chains |= normalise.chains(statement)
        self.texts[name] = "\n".join([*lines, *self._reached(chains, look_up, module)])
        return name

    def _members(self, cls: type) -> Iterator[str]:
        """Texts of the members of a class without a source."""
        code = (types.FunctionType, staticmethod, classmethod, property)
        for name, member in sorted(vars(cls).items()):
            if isinstance(member, code):
                yield f"{name} {self.reference(member)}"
            elif not name.startswith("__"):
                with suppress(TypeError):
                    yield f"{name} = {text_of(member)}"

    def _reached(
        self,
        chains: Iterable[str],
        look_up: LookUp,
        module: types.ModuleType | None,
        homes: Mapping[str, tuple[types.ModuleType, str]] = types.MappingProxyType({}),
    ) -> list[str]:
        """A line for each name that leads to code or a constant. ``homes``: module and name there
        of those that are no globals of ``module``."""
        lines: list[str] = []
        for chain in sorted(chains):
            root, *path = chain.split(".")
            value = look_up(root)
            holder: types.ModuleType | type | None
            holder, last = homes.get(root, (module, root))
            if (op := custom_op(value, path)) is not None:
                (value, holder, last), path = op, []
            for part in path:
                if not isinstance(value, (types.ModuleType, type)) or self._library.has(value):
                    break
                holder, last = value, part
                value = attribute(value, part, ABSENT)
            if value is not ABSENT:
                lines.append(self._read(chain, value, holder, last))
            elif isinstance(holder, type) and last == path[-1]:
                lines += self._set_by_methods(holder, last)
        return [line for line in lines if line]

    def _made(self, module: types.ModuleType | None, name: str) -> str:
        """The statements that made a global, and what they reach."""
        module, name = literals.home(module, name)
        if module is None or self._library.has_module(module.__name__):
            return ""
        if definitions.listing_of_module(module) is None:
            self.constants.uncounted[self.constants.name(name, module)] = (
                "no source has what made it"
            )
        each = (self._statement(statement, name, module) for statement in makers(module, name))
        return "\n".join(line for lines in each for line in lines)

    def _set_by_methods(self, cls: type, name: str) -> Iterator[str]:
        """The statements of methods that set an attribute of the object: ``self.kernel = k``."""
        for base in cls.__mro__:
            module = sys.modules.get(base.__module__)
            if module is not None and not self._library.has_module(module.__name__):
                for statement, local in definitions.set_by_methods(base, name):
                    yield from self._statement(statement, name, module, local)

    def _statement(
        self, statement: ast.stmt, name: str, module: types.ModuleType, local: Container[str] = ()
    ) -> Iterator[str]:
        """A statement of ``module`` that makes ``name``, and what it reaches; ``local``: names in
        it that are no globals."""
        yield normalise.statement(statement)
        if self._visited.name(statement) is None:
            self._visited.add(statement, name)
            roots = {each: each.partition(".")[0] for each in normalise.chains(statement)}
            reached = {each for each, root in roots.items() if root != name and root not in local}
            yield from self._reached(reached, lambda root: vars(module).get(root, ABSENT), module)
