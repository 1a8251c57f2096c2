"""Finds the source of running code: what defined a function or a class, and what made a global.

A file is read, parsed and compiled once. The compiled code is compared with the code that runs, so
that a file that was edited after it was imported is not mistaken for what was timed.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from triton_dist._tuning.making import (
    SIMPLE,
    Definition,
    calls_super,
    dotted_name,
    made_by,
    names_in,
    root_of,
    stored_by,
)


@dataclass(eq=False)
class Listing:
    """Definitions of one file."""

    functions: dict[tuple[int, str], Definition] = field(default_factory=dict)
    """By the line of the first decorator, or of ``def``, and name: as code objects have them."""
    classes: dict[str, list[Definition]] = field(default_factory=dict)
    """By qualified name; several, of which the program chooses one."""
    codes: dict[tuple[int, str], list[types.CodeType]] = field(default_factory=dict)
    """By the same. Several lambdas may be on one line."""
    makers: dict[str, list[ast.stmt]] = field(default_factory=dict)
    """The statements that bind or change a global, by its name."""
    statements: list[ast.stmt] = field(default_factory=list)
    """All of the module, in order."""
    assigned_in_functions: frozenset[str] = frozenset()
    """Names that some function declares ``global``."""
    stored_in_functions: frozenset[str] = frozenset()
    """Dotted names to which some function assigns, or whose value it changes in place."""
    namesakes: dict[str, list[types.CodeType]] = field(default_factory=dict)
    """Code in the order of the file, by the names of all that it is inside of."""

    def has(self, code: types.CodeType) -> bool:
        """True if ``code`` is what the file compiles to."""
        return code in self.codes.get(_place(code), [])


def definition(item: types.CodeType | type) -> Definition | None:
    """The statement that defined ``item``.

    ``None`` for a lambda, and when the source is not at hand or is another's.
    """
    if isinstance(item, types.CodeType):
        listing = _listing_of(item.co_filename, lambda: [item], item)
        return None if listing is None else listing.functions.get(_place(item))
    file = _file(sys.modules.get(item.__module__))
    listing = _listing_of(file, lambda: _codes(item, file), item)
    found = [] if listing is None else listing.classes.get(item.__qualname__, [])
    lines = {
        code.co_firstlineno
        for value in vars(item).values()
        if (code := _code_of(getattr(value, "__func__", value))) is not None
    }
    inside = (each for each in found if lines & {*range(each.lineno, (each.end_lineno or 0) + 1)})
    return next(inside, found[-1]) if found else None


def makers(module: types.ModuleType, name: str) -> list[ast.stmt]:
    """The statements that bind the global ``name`` of ``module``, or change what it holds."""
    listing = listing_of_module(module)
    return [] if listing is None else listing.makers.get(name, [])


def attributes_set(module: types.ModuleType, name: str) -> list[ast.stmt]:
    """The top-level statements that assign to an attribute of ``name``: ``Class.method = f``."""
    return [
        statement
        for statement in makers(module, name)
        if isinstance(statement, ast.Assign)
        and any(isinstance(each, ast.Attribute) for each in statement.targets)
        and any(root_of(each) == name for each in statement.targets)
    ]


def set_in_body(cls: type, name: str) -> list[ast.stmt]:
    """The statements in the body of ``cls`` that bind its attribute ``name``, or change it."""
    node = definition(cls)
    return [
        each
        for each in (() if node is None else node.body)
        if not isinstance(each, Definition) and name in made_by(each)
    ]


def set_by_methods(
    cls: type, name: str, is_set_above: bool
) -> Iterator[tuple[ast.stmt, frozenset[str]]]:
    """The statements in methods of ``cls`` that assign to the attribute ``name`` of the object,
    ``self.name = value``, or change its value in place, and those that make local names in them;
    each with the names that are the method's own.

    Args:
        is_set_above: a base sets it, perhaps to what ``super().__init__(value)`` gives.
    """
    node = definition(cls)
    for own, local, simple in () if node is None else _methods(node):
        setting = [
            each
            for each in simple
            if f"{own}.{name}" in each.stored or (is_set_above and each.calls_super)
        ]
        used = frozenset[str]().union(*(each.read for each in setting)) & local
        for each in simple:
            if each in setting or each.bound & used:
                yield each.node, local


class _Simple(NamedTuple):
    """A statement without others inside."""

    node: ast.stmt
    stored: frozenset[str]
    read: frozenset[str]
    bound: frozenset[str]
    calls_super: bool


@functools.lru_cache(maxsize=1024)
def _methods(node: ast.AST) -> list[tuple[str, frozenset[str], list[_Simple]]]:
    """First parameter, own names and statements of each method of a class."""
    found = []
    for method in getattr(node, "body", ()):
        given = [each.arg for each in ast.walk(method) if isinstance(each, ast.arg)]
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and given:
            simple = [
                _Simple(
                    each,
                    frozenset(stored_by(each)),
                    names_in(each, ast.Load),
                    names_in(each, ast.Store),
                    calls_super(each),
                )
                for each in statements(method)
                if isinstance(each, SIMPLE)
            ]
            local = frozenset(given) | names_in(method, ast.Store)
            found.append((given[0], local, simple))
    return found


def stored_in_functions(module: types.ModuleType | None) -> frozenset[str]:
    """Dotted names, ``state.step`` or ``cls.calls``, that functions of ``module`` assign to or
    change in place."""
    listing = listing_of_module(module)
    return frozenset() if listing is None else listing.stored_in_functions


def listing_of_module(module: types.ModuleType | None) -> Listing | None:
    """Definitions in the file of ``module``; ``None`` without its source."""
    if module is None:
        return None
    file = _file(module)
    # A reload makes a new spec; a script has none.
    return _listing_of(file, lambda: _codes(module, file), module.__spec__ or module)


def ordinal(code: types.CodeType) -> int | None:
    """Number of definitions before that of ``code`` have its name and the same functions around.

    ``None`` without its source.
    """
    listing = _listing_of(code.co_filename, lambda: [code], code)
    if listing is None:
        return None
    namesakes = next((each for each in listing.namesakes.values() if code in each), [code])
    return namesakes.index(code)


_known: dict[tuple[int, str], tuple[object, Listing | None]] = {}
"""By the identity of what was asked for, which is kept alive, and its file."""


def _listing_of(
    file: str, codes: Callable[[], list[types.CodeType]], item: object
) -> Listing | None:
    """Definitions in ``file`` when ``item`` was first asked for; ``None`` if that is not ``codes``.

    A module that is imported again has new code objects: then its file is read again.
    """
    if not file:
        return None
    if (id(item), file) not in _known:
        linecache.checkcache(file)
        listing = _listing("".join(linecache.getlines(file)))
        if listing is not None and not all(map(listing.has, codes())):
            listing = None
        _known[id(item), file] = item, listing
    return _known[id(item), file][1]


def _file(module: types.ModuleType | None) -> str:
    return getattr(module, "__file__", None) or ""


def _codes(holder: type | types.ModuleType, file: str) -> list[types.CodeType]:
    """Code from ``file`` that ``holder`` has."""
    codes = map(_code_of, list(vars(holder).values()))
    return [code for code in codes if code is not None and code.co_filename == file]


def _code_of(value: object) -> types.CodeType | None:
    try:
        code = getattr(value, "__code__", None)
    except Exception:  # objects with a __getattr__ of their own
        return None
    return code if isinstance(code, types.CodeType) else None


_parsing = threading.Lock()
"""Python 3.11 raises ``SystemError`` if threads parse at the same time."""


def _forget_lock() -> None:
    """In the child of a fork, where the thread that holds the lock is missing."""
    global _parsing
    _parsing = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


@functools.lru_cache(maxsize=256)
def _listing(text: str) -> Listing | None:
    try:
        with _parsing:
            tree = ast.parse(text)
            module = compile(tree, "listing", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    listing = Listing()
    for code in with_inner(module):
        listing.codes.setdefault(_place(code), []).append(code)
    _collect_namesakes(module, "", listing)
    _collect(tree, "", listing)
    listing.statements = tree.body
    declared = (each.names for each in statements(tree) if isinstance(each, ast.Global))
    listing.assigned_in_functions = frozenset(name for names in declared for name in names)
    for statement in tree.body:
        for name in made_by(statement):
            listing.makers.setdefault(name, []).append(statement)
    for function in statements(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _collect_globals(function, listing)
    return listing


def _collect_globals(function: ast.FunctionDef | ast.AsyncFunctionDef, listing: Listing) -> None:
    """Find the statements of a function that bind a global, which it declares, or change what one
    holds; and all names that it stores to."""
    inside = list(statements(function))
    declared = {name for each in inside if isinstance(each, ast.Global) for name in each.names}
    simple = [each for each in inside if isinstance(each, SIMPLE)]
    stored = [set(stored_by(each)) for each in simple]
    local = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    local |= names_in(function, ast.Store) - declared
    for each, changed in zip(simple, stored, strict=True):
        made = made_by(each) & declared if not isinstance(each, ast.Expr) else set()
        roots = {name.partition(".")[0] for name in changed} & listing.makers.keys()
        for name in made | roots - local:
            known = listing.makers.setdefault(name, [])
            if each not in known:  # in a function inside another one
                known += [each, *_calls_of(function, listing)]
    listing.stored_in_functions |= {name for changed in stored for name in changed}


def _calls_of(function: ast.FunctionDef | ast.AsyncFunctionDef, listing: Listing) -> list[ast.stmt]:
    """The statements of the module that call ``function`` and nothing else, as ``set_up()``."""
    return [
        each
        for each in listing.statements
        if isinstance(each, ast.Expr)
        and isinstance(each.value, ast.Call)
        and dotted_name(each.value.func) == function.name
    ]


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code`` and that of everything defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_inner(constant)


def blocks(node: ast.AST) -> list[tuple[str, list[ast.AST]]]:
    """The lists of statements, handlers and cases in ``node``, by the names of its fields."""
    return [
        (name, inner)
        for name in ("body", "handlers", "orelse", "finalbody", "cases")
        if name in node._fields and isinstance(inner := getattr(node, name), list)
    ]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and every statement, handler and case inside it, in the order of the text. Most of a
    tree is expressions, in which nothing is defined or imported."""
    yield node
    for _, inner in blocks(node):
        for each in inner:
            yield from statements(each)


def _collect_namesakes(code: types.CodeType, prefix: str, listing: Listing) -> None:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            name = f"{prefix}{constant.co_name}"
            listing.namesakes.setdefault(name, []).append(constant)
            _collect_namesakes(constant, f"{name}.", listing)


def _place(code: types.CodeType) -> tuple[int, str]:
    return code.co_firstlineno, code.co_name


def _collect(node: ast.AST, prefix: str, listing: Listing) -> None:
    for child in (each for _, block in blocks(node) for each in block):
        inner = prefix
        if isinstance(child, ast.ClassDef):
            listing.classes.setdefault(prefix + child.name, []).append(child)
            inner = f"{prefix}{child.name}."
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
            listing.functions[first, child.name] = child
            inner = f"{prefix}{child.name}.<locals>."
        _collect(child, inner, listing)
