"""Tells a value that stands in the source from one that was computed when the program ran.

``BLOCK = 64`` and ``BLOCK = 2 * WIDTH`` stand in the source: whoever reads it knows the value.
``RANK = int(os.environ["RANK"])`` and ``START = time.time()`` do not: they differ by rank or by
start, and the function is the same.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import functools
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from triton_dist._tuning import definitions, libraries, making

_Binding = ast.expr | ast.ImportFrom | None
"""The expression that a statement binds a name to; ``None``: no single one."""

_Bindings = tuple[tuple[_Binding, bool], ...]
"""All that bind one name, and of each whether the program decides if it does."""

_STRUCTURE = (
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.UnaryOp,
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Subscript,
    ast.Slice,
    ast.Starred,
    ast.JoinedStr,
    ast.FormattedValue,
)
"""Expressions that are literals if all their parts are."""

_OF_LIBRARIES = ("torch", "triton.language.core")
"""Modules of types whose values have names: ``torch.int8``, ``tl.int8``."""

_PURE = frozenset(
    {
        *(abs, bool, bytes, complex, dict, float, frozenset, int, len, list, max, min, pow, range),
        *(round, set, str, sum, tuple),
    }
)

_OF_IMPORT = frozenset(
    {"__file__", "__cached__", "__path__", "__name__", "__package__", "__spec__"}
)
"""Globals that an import makes: where a copy of the module lies, and what started it, is not what
it does."""


class Origin(enum.Enum):
    """Source of a value."""

    LITERAL = "it stands in the source"
    CHOSEN = "several literals stand in the source, or another module set it"
    COMPUTED = "it is computed when the program runs"
    UNKNOWN = "there is no source"


def of_global(module: types.ModuleType | None, name: str, value: object) -> Origin:
    """Source of ``value``, the global ``name`` of ``module``."""
    return _Judge().of_global(module, name, value)


def of_attribute(cls: type, name: str, value: object) -> Origin:
    """Source of ``value``, the attribute ``name`` of ``cls``."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
    node = definitions.definition(owner)
    if node is None:
        return Origin.UNKNOWN
    module = sys.modules.get(owner.__module__)
    return _Judge().of_bindings(tuple(_bindings(node.body, name)), module, value)


def is_marked(holder: object, name: str) -> bool:
    """True if ``constant`` marks what the global ``name`` of ``holder``, a module, is bound to."""
    module, name = home(holder if isinstance(holder, types.ModuleType) else None, name)
    bindings = _bindings_of(definitions.listing_of_module(module), name)
    return any(
        isinstance(node, ast.Call)
        and getattr(_resolve(node.func, module), "marks_a_constant", False)
        for node, _ in bindings
    )


def is_literal(node: ast.expr, module: types.ModuleType | None) -> bool:
    """True if ``node``, an expression in ``module``, is one of literals."""
    return _Judge().is_literal(node, module)


def home(module: types.ModuleType | None, name: str) -> tuple[types.ModuleType | None, str]:
    """The module that made the global ``name`` of ``module``, and its name there."""
    seen = set()
    while module is not None and module not in seen:
        seen.add(module)
        listing = definitions.listing_of_module(module)
        bindings = _bindings_of(listing, name)
        if not bindings and listing is not None:
            source = _starred(listing, module, name)
            names = iter((name,))
        elif len(bindings) == 1 and isinstance(bindings[0][0], ast.ImportFrom):
            statement = bindings[0][0]
            source = _imported(statement, module)
            names = (each.name for each in statement.names if name in (each.asname, each.name))
        else:
            break
        if source is None or libraries.is_library(source.__name__):
            break
        module, name = source, next(names)
    return module, name


def _starred(
    listing: definitions.Listing, module: types.ModuleType, name: str
) -> types.ModuleType | None:
    """The module that ``from elsewhere import *`` has ``name`` of."""
    for statement in listing.statements:
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            source = _imported(statement, module)
            if source is not None and hasattr(source, name):
                return source
    return None


class _Judge:
    """One question. Names that it has looked at already lead back to themselves."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def of_global(self, module: types.ModuleType | None, name: str, value: object) -> Origin:
        module, name = home(module, name)
        listing = definitions.listing_of_module(module)
        if module is None or listing is None or (module.__name__, name) in self._seen:
            return Origin.UNKNOWN
        self._seen.add((module.__name__, name))
        if name in listing.assigned_in_functions or name in _OF_IMPORT:
            return Origin.COMPUTED
        return self.of_bindings(_bindings_of(listing, name), module, value)

    def of_bindings(
        self, bindings: _Bindings, module: types.ModuleType | None, value: object
    ) -> Origin:
        if not bindings or isinstance(bindings[0][0], ast.ImportFrom):  # of a library
            return Origin.UNKNOWN
        if not all(self.is_literal(expression, module) for expression, _ in bindings):
            return Origin.COMPUTED
        expression, conditional = bindings[0]
        is_one = len(bindings) == 1 and not conditional
        return Origin.LITERAL if is_one and _may_be(expression, value) else Origin.CHOSEN

    def is_literal(self, node: _Binding, module: types.ModuleType | None) -> bool:
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, _STRUCTURE):
            parts = (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
            return all(self.is_literal(part, module) for part in parts)
        if isinstance(node, ast.Name):
            value = getattr(module, node.id, None)
            return self.of_global(module, node.id, value) is Origin.LITERAL
        if isinstance(node, ast.Attribute):
            return self._is_known(node, module)
        if isinstance(node, ast.Call):
            return self._is_known_call(node, module)
        return False

    def _is_known(self, node: ast.Attribute, module: types.ModuleType | None) -> bool:
        """True for names of modules and classes: ``torch.int8``, ``math.pi``, ``Method.PUSH``."""
        holder = _resolve(node.value, module)
        if type(holder).__name__ == "constexpr" or isinstance(holder, enum.Enum):
            return self.is_literal(node.value, module)  # its .value
        value = getattr(holder, node.attr, None)
        if isinstance(value, enum.Enum) or type(value).__module__ in _OF_LIBRARIES:
            return True
        if isinstance(holder, types.ModuleType):
            if libraries.is_library(holder.__name__):
                return isinstance(value, (int, float, type))
            return self.of_global(holder, node.attr, value) is Origin.LITERAL
        return isinstance(holder, type) and of_attribute(holder, node.attr, value) is Origin.LITERAL

    def _is_known_call(self, node: ast.Call, module: types.ModuleType | None) -> bool:
        callee = _resolve(node.func, module)
        if getattr(callee, "marks_a_constant", False):
            return True
        is_value = isinstance(callee, type) and (
            callee.__name__ in ("constexpr", "Config", "dtype")
            or issubclass(callee, (enum.Enum, tuple))
            or dataclasses.is_dataclass(callee)
        )
        if not is_value and not any(callee is each for each in _PURE):
            return False
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return all(self.is_literal(each, module) for each in given)


@functools.lru_cache(maxsize=8192)
def _bindings_of(listing: definitions.Listing | None, name: str) -> _Bindings:
    return () if listing is None else tuple(_bindings(listing.statements, name))


def _bindings(
    statements: Iterable[ast.stmt], name: str, conditional: bool = False
) -> Iterator[tuple[_Binding, bool]]:
    """Everything that binds ``name``, and whether the program decides if it does."""
    for statement in statements:
        if isinstance(statement, making.Definition):
            if statement.name == name:
                yield None, conditional
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                yield from ((each, conditional) for each in _taken(target, statement.value, name))
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                taken = _taken(statement.target, statement.value, name)
                yield from ((each, conditional) for each in taken)
        elif isinstance(statement, ast.AugAssign):
            if isinstance(statement.target, ast.Name) and statement.target.id == name:
                yield statement.value, True
        elif isinstance(statement, ast.ImportFrom):
            if any((each.asname or each.name) == name for each in statement.names):
                yield statement, conditional
        else:
            yield from _in_parts(statement, name, conditional)


def _in_parts(statement: ast.stmt, name: str, conditional: bool) -> Iterator[tuple[_Binding, bool]]:
    """Bindings in a statement with others inside, or one that binds by an expression."""
    inner = conditional or not isinstance(statement, (ast.With, ast.AsyncWith))
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, ast.stmt):
            yield from _bindings([part], name, inner)
        elif isinstance(part, (ast.ExceptHandler, ast.match_case)):
            yield from _bindings(part.body, name, True)
        elif any(
            isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store)
            for each in ast.walk(part)
        ):  # the target of a loop or of `with`, or `(name := ...)`
            yield None, inner


def _taken(target: ast.expr, value: ast.expr, name: str) -> Iterator[_Binding]:
    if isinstance(target, ast.Name):
        if target.id == name:
            yield value
    elif isinstance(target, (ast.Tuple, ast.List)):
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        if len(parts) == len(target.elts):
            for each, part in zip(target.elts, parts, strict=True):
                yield from _taken(each, part, name)
        elif any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(target)):
            yield None


def _may_be(expression: _Binding, value: object) -> bool:
    """True if ``expression`` gives ``value``, as far as it is simple enough to tell."""
    try:
        said = ast.literal_eval(expression)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return True
    return bool(said == value and type(said) is type(value)) or said != said


def _resolve(node: ast.expr, module: types.ModuleType | None) -> Any:
    """The object that a dotted name stands for; ``None`` if it cannot be told."""
    if isinstance(node, ast.Name):
        return getattr(module, node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        return getattr(_resolve(node.value, module), node.attr, None)
    return None


def _imported(
    statement: ast.ImportFrom, module: types.ModuleType | None
) -> types.ModuleType | None:
    package = getattr(module, "__package__", None) or ""
    try:
        full = importlib.util.resolve_name(
            "." * statement.level + (statement.module or ""), package
        )
    except (ImportError, ValueError):
        return None
    return sys.modules.get(full)
