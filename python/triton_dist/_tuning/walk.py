"""A walk through a function and everything that it reaches.

Which of that counts, and what for, :mod:`~triton_dist._tuning.source` says.
"""

from __future__ import annotations

import ast
import enum
import sys
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from triton_dist._tuning import definitions, libraries, literals, normalise
from triton_dist._tuning.constants import Constants, text_of
from triton_dist._tuning.held import Held
from triton_dist._tuning.inspected import (
    ABSENT,
    CODE,
    CONTAINERS,
    LookUp,
    attribute,
    cells_of,
    custom_op,
    defaults,
    imported,
    inherited,
    inner_code,
    looking_up,
    makers,
    receiver,
    receiver_of,
    tuners,
)
from triton_dist._tuning.snapshot import Snapshot

_CHANGES = "it changes as the program runs"
Holder = types.ModuleType | type | None


class Walk(Held):
    """Depth first, in the order of names, so that all ranks and processes get the same names."""

    def __init__(
        self, library: libraries.Libraries, constants: Constants, snapshot: Snapshot
    ) -> None:
        super().__init__(library, constants, snapshot)
        self.texts: dict[str, str] = {}
        self._receiver: type | None = None

    def root(self, value: Any) -> None:
        """A function, or what stands for one: a partial, a bound method, a callable object."""
        self._receiver = receiver_of(value)
        self.reference(value)
        self._state(value)

    def _read(
        self, chain: str, value: Any, holder: Any, last: str, reader: types.ModuleType | None
    ) -> str:
        """A value that code of module ``reader`` reads under a dotted name: a global of module
        ``holder``, or an attribute of that class."""
        constants, holding_class = self.constants, isinstance(holder, type)
        if constants.ignores(last):
            return ""
        data = value.value if type(value).__name__ == "constexpr" else value
        if isinstance(data, CODE) or inner_code(data) is not None:
            return f"{chain} = {self.reference(value, (holder, last))}"
        if not holding_class:
            holder, last = literals.home(holder, last)
        found = (literals.of_attribute if holding_class else literals.of_global)(holder, last, data)
        is_open = isinstance(data, CONTAINERS) and not literals.is_marked(holder, last)
        try:
            text = "" if is_open else text_of(data)
        except TypeError:
            text = ""
        name = constants.name(f"{holder.__name__}.{last}" if holding_class else last, holder)
        changes = self._changes(chain, holder, last, reader)
        if changes or is_open or found is literals.Origin.COMPUTED:
            if text:
                constants.uncounted[name] = _CHANGES if changes else found.value
            home = getattr(holder, "__module__" if holding_class else "__name__", "")
            self.visit(data, home)
            return f"{chain} = {self._made(holder, last)}"
        if not text or (holding_class and isinstance(data, enum.Enum)):
            return f"{chain} = {self.reference(value, (holder, last))}"
        known = constants.literal if found is literals.Origin.LITERAL else constants.bound
        known[name] = text
        types_of_data = self._types(data)
        return f"{chain} = {types_of_data}" if types_of_data else ""

    @staticmethod
    def _changes(chain: str, holder: Any, last: str, reader: types.ModuleType | None) -> bool:
        """True for what functions assign to: ``Class.calls``, ``cls.calls``, ``module.calls``."""
        stored = definitions.stored_in_functions(reader)
        if not isinstance(holder, type):
            return "." in chain and chain in stored
        stored |= definitions.stored_in_functions(sys.modules.get(holder.__module__))
        bases = (each.__name__ for each in holder.__mro__)
        return not stored.isdisjoint([chain, f"cls.{last}", *(f"{each}.{last}" for each in bases)])

    def _function(self, function: types.FunctionType) -> str:
        inner = getattr(function, "__wrapped__", None)
        if self._library.has_function(function):
            self._library_of(function.__module__ or "")
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
        package = function.__globals__.get("__package__") or ""
        local = imported(self._library, package, node)
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
            found: Iterable[str] = roots | normalise.chains_of_code(code)
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

    def _library_of(self, module: str) -> None:
        """Note the version of the library that code reaches, which stands for its source."""
        package = module.partition(".")[0]
        if version := libraries.version_of(package):
            self.texts.setdefault(f"library {package}", version)

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

        cells = cells_of(cls)
        local = imported(self._library, getattr(module, "__package__", None) or "", node)

        def look_up(root: str) -> Any:
            here = local[root].value if root in local else vars(module).get(root, ABSENT)
            return cells.get(root, here)

        dropped = tuners(node, look_up)
        lines, chains = [normalise.normalised(node, dropped)], normalise.chains(node, dropped)
        in_cells = {each.partition(".")[0] for each in chains} & cells.keys()
        for cell in sorted(in_cells):
            lines.append(f"{cell} = {self._bound(f'{name}.{cell}', cells[cell], cls)}")
        reached = {each for each in chains if each.partition(".")[0] not in in_cells}
        for statement in definitions.attributes_set(module, cls.__qualname__):
            lines.append(normalise.statement(statement))
            reached |= normalise.chains(statement)
        homes = {each: (found.module, found.attribute) for each, found in local.items()}
        self.texts[name] = "\n".join([*lines, *self._reached(reached, look_up, module, homes)])
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
        homes: Mapping[str, tuple[types.ModuleType | type, str]] = types.MappingProxyType({}),
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
            if isinstance(value, (types.ModuleType, type)) and self._library.has(value):
                named = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
                self._library_of(named)
            if value is not ABSENT:
                lines.append(self._read(chain, value, holder, last, module))
            if isinstance(holder, type) and path and last == path[-1]:
                lines += self._set_by_methods(holder, last)
        return [line for line in lines if line]

    def _made(self, holder: Holder, name: str) -> str:
        """The statements that made a global, or an attribute of a class, and what they reach."""
        if isinstance(holder, type):
            return "\n".join(self._made_in_body(holder, name))
        module, name = literals.home(holder, name)
        if module is None or self._library.has_module(module.__name__):
            return ""
        if definitions.listing_of_module(module) is None:
            self.constants.uncounted[self.constants.name(name, module)] = (
                "no source has what made it"
            )
        each = (self._statement(statement, name, module) for statement in makers(module, name))
        return "\n".join(line for lines in each for line in lines)

    def _made_in_body(self, cls: type, name: str) -> Iterator[str]:
        owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
        module = sys.modules.get(owner.__module__)
        if module is not None and not self._library.has_module(module.__name__):
            for statement in definitions.set_in_body(owner, name):
                yield from self._statement(statement, name, module, owner=owner)

    def _set_by_methods(self, cls: type, name: str) -> Iterator[str]:
        """The statements of methods that set an attribute of the object: ``self.kernel = k``."""
        is_set = False
        for base in reversed(cls.__mro__):
            module = sys.modules.get(base.__module__)
            if module is not None and not self._library.has_module(module.__name__):
                found = list(definitions.set_by_methods(base, name, is_set))
                is_set = is_set or bool(found)
                for statement, local in found:
                    yield from self._statement(statement, name, module, local)

    def _statement(
        self,
        statement: ast.stmt,
        name: str,
        module: types.ModuleType,
        local: Container[str] = (),
        owner: type | None = None,
    ) -> Iterator[str]:
        """A statement of ``module``, or of the body of ``owner``, that makes ``name``, and what it
        reaches; ``local``: names in it that are no globals."""
        yield normalise.statement(statement)
        if self._visited.name(statement) is None:
            self._visited.add(statement, name)
            roots = {each: each.partition(".")[0] for each in normalise.chains(statement)}
            reached = {each for each, root in roots.items() if root != name and root not in local}
            body = {} if owner is None else vars(owner)
            homes = {each: (owner, each) for each in body if owner is not None}

            def look_up(root: str) -> Any:
                return body.get(root, vars(module).get(root, ABSENT))

            yield from self._reached(reached, look_up, module, homes)
