"""Finds the source of running code: what defined a function or a class, and what made a global.

A file is read, parsed and compiled once. The compiled code is compared with the code that runs, so
that a file that was edited after it was imported is not mistaken for what was timed.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(eq=False)
class Listing:
    """Definitions of one file."""

    functions: dict[tuple[int, str], Definition] = field(default_factory=dict)
    """By the line of the first decorator, or of ``def``, and name: as code objects have them."""
    classes: dict[str, Definition] = field(default_factory=dict)
    """By qualified name."""
    codes: dict[tuple[int, str], list[types.CodeType]] = field(default_factory=dict)
    """By the same. Several lambdas may be on one line."""
    makers: dict[str, list[ast.stmt]] = field(default_factory=dict)
    """The statements that bind or change a global, by its name."""
    statements: list[ast.stmt] = field(default_factory=list)
    """All of the module, in order."""
    assigned_in_functions: frozenset[str] = frozenset()
    """Names that some function declares ``global``."""

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
    return None if listing is None else listing.classes.get(item.__qualname__)


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
        and any(_root(each) == name for each in statement.targets)
    ]


def set_by_methods(cls: type, name: str) -> Iterator[tuple[ast.stmt, frozenset[str]]]:
    """The statements in methods of ``cls`` that assign to the attribute ``name`` of the object,
    ``self.name = value``, each with the names that are the method's own."""
    node = definition(cls)
    for method in () if node is None else node.body:
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        inside = list(ast.walk(method))
        given = [each.arg for each in inside if isinstance(each, ast.arg)]
        names = [each for each in inside if isinstance(each, ast.Name)]
        local = frozenset(given + [each.id for each in names if isinstance(each.ctx, ast.Store)])
        for statement in statements(method) if given else ():
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and any(
                isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and (_root(each), each.attr) == (given[0], name)
                for each in ast.walk(statement)
            ):
                yield statement, local


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
    codes = [getattr(value, "__code__", None) for value in list(vars(holder).values())]
    found = [code for code in codes if isinstance(code, types.CodeType)]
    return [code for code in found if code.co_filename == file]


@functools.lru_cache(maxsize=256)
def _listing(text: str) -> Listing | None:
    try:
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


def _collect_globals(function: ast.AST, listing: Listing) -> None:
    """Find the statements of a function that bind a global, which it declares."""
    inside = list(statements(function))
    declared = {name for each in inside if isinstance(each, ast.Global) for name in each.names}
    for each in inside if declared else ():
        if isinstance(each, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for name in made_by(each) & declared:
                known = listing.makers.setdefault(name, [])
                if each not in known:  # in a function inside another one
                    known.append(each)


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
            listing.classes[prefix + child.name] = child
            inner = f"{prefix}{child.name}."
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
            listing.functions[first, child.name] = child
            inner = f"{prefix}{child.name}.<locals>."
        _collect(child, inner, listing)


def made_by(
    statement: ast.stmt, only_used: Callable[[ast.expr], bool] = lambda node: False
) -> set[str]:
    """Names that ``statement`` binds, and those whose value it changes in place: ``A[0] = 1``,
    ``A.append(1)``, ``fill(A)``, ``@A.register`` above a definition.

    Args:
        only_used: true for what its methods do not change, nor their arguments, nor a function that
            takes it.
    """
    if isinstance(statement, Definition):
        called = [getattr(each, "func", each) for each in statement.decorator_list]
        methods = [each for each in called if isinstance(each, ast.Attribute)]
        return {_root(each) for each in methods if not only_used(each.value)}
    if isinstance(statement, (ast.Import, ast.ImportFrom)) or _is_main(statement):
        return set()
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            found.add(_root(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found |= set() if only_used(node.func.value) else {_root(node.func)}
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and not only_used(getattr(call.func, "value", call)):
        given = (each for each in call.args if isinstance(each, ast.Name))
        found |= {each.id for each in given if not only_used(each)}
    return found


def _is_main(statement: ast.stmt) -> bool:
    """``if __name__ == "__main__":`` runs in scripts alone."""
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
