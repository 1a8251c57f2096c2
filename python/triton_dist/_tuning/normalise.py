"""Source code without what cannot change its meaning, and the names that it uses."""

from __future__ import annotations

import ast
import copy
import dis
import functools
import types
from typing import NamedTuple

from triton_dist._tuning.definitions import blocks, statements, with_inner
from triton_dist._tuning.making import Definition


class Import(NamedTuple):
    """An import inside a function."""

    name: str
    """The name that it has there."""
    module: str
    level: int
    """Dots of a relative import."""
    attribute: str | None
    """The name in the module; ``None``: the module itself."""


@functools.lru_cache(maxsize=4096)
def decorators(node: Definition) -> tuple[ast.expr, ...]:
    """Those of ``node`` and of every definition inside it."""
    inner = (each for each in statements(node) if isinstance(each, Definition))
    return tuple(decorator for each in inner for decorator in each.decorator_list)


@functools.lru_cache(maxsize=4096)
def normalised(node: Definition, dropped: frozenset[ast.expr]) -> str:
    """The text of ``node`` in one formatting: no comments, no docstrings, no ``dropped``
    decorators. Line numbers and file names are not in it."""
    return ast.unparse(_without(node, dropped))


@functools.lru_cache(maxsize=8192)
def statement(node: ast.stmt) -> str:
    """The text of a statement of a module, without comments and docstrings."""
    return ast.unparse(_without(node, frozenset()))


@functools.lru_cache(maxsize=4096)
def chains(node: ast.AST, dropped: frozenset[ast.expr] = frozenset()) -> frozenset[str]:
    """Dotted names that are read, such as ``tl.dot``, with all their beginnings; not in
    ``dropped``."""
    found, ahead = set(), [node]
    while ahead:
        inner = ahead.pop()
        if inner in dropped:
            continue
        ahead += ast.iter_child_nodes(inner)
        if isinstance(inner, (ast.Name, ast.Attribute)) and isinstance(inner.ctx, ast.Load):
            name = dotted(inner)
            if name is not None:
                found.add(name)
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def header_names(node: Definition, dropped: frozenset[ast.expr]) -> frozenset[str]:
    """Names that are read where ``node`` is defined, not when it runs: in its decorators and
    defaults."""
    header: list[ast.AST | None] = [each for each in node.decorator_list if each not in dropped]
    if not isinstance(node, ast.ClassDef):
        header += [*node.args.defaults, *node.args.kw_defaults]
    names = [inner for each in header if each is not None for inner in ast.walk(each)]
    return frozenset(name.id for name in names if isinstance(name, ast.Name))


@functools.lru_cache(maxsize=4096)
def defaults(node: Definition) -> dict[str, ast.expr]:
    """The expressions of default values, by parameter."""
    if isinstance(node, ast.ClassDef):
        return {}
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    last = positional[len(positional) - len(given.defaults) :]
    pairs = [*zip(last, given.defaults, strict=True)]
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        pairs += [] if value is None else [(argument, value)]
    return {argument.arg: value for argument, value in pairs}


@functools.lru_cache(maxsize=4096)
def called_on_super(node: ast.AST) -> frozenset[str]:
    """Attributes of ``super()`` that are read."""
    return frozenset(
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Call)
        and dotted(each.value.func) == "super"
    )


def dotted(node: ast.AST) -> str | None:
    """``"a.b.c"`` for an attribute chain on a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


@functools.lru_cache(maxsize=4096)
def imports(node: ast.AST) -> tuple[Import, ...]:
    """Every import inside ``node``."""
    found = []
    for inner in statements(node):
        if isinstance(inner, ast.Import):
            found += [Import(each.asname or each.name, each.name, 0, None) for each in inner.names]
        elif isinstance(inner, ast.ImportFrom):
            module, level = inner.module or "", inner.level
            found += [
                Import(each.asname or each.name, module, level, each.name) for each in inner.names
            ]
    return tuple(found)


def bytecode(code: types.CodeType) -> str:
    """A text in place of missing source: the instructions, constants and names."""
    return repr((code.co_code.hex(), constants(code), code.co_names, code.co_varnames))


def constants(code: types.CodeType) -> list[str]:
    return [
        bytecode(constant) if isinstance(constant, types.CodeType) else _stable(constant)
        for constant in code.co_consts
    ]


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Global names that ``code`` or a function inside it reads, and those that it binds anew."""
    read: set[str] = set()
    bound: set[str] = set()
    for inner in with_inner(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(instruction.argval)
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                bound.add(instruction.argval)
    return frozenset(read), frozenset(bound)


@functools.lru_cache(maxsize=4096)
def chains_of_code(code: types.CodeType) -> frozenset[str]:
    """Dotted names that ``code`` reads, as ``chains``: of what has no source, such as a lambda."""
    found, chain = set(), ""
    for inner in with_inner(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
                chain = instruction.argval
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
                chain = f"{chain}.{instruction.argval}"
            else:
                chain = ""
                continue
            found.add(chain)
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def rebound_cells(code: types.CodeType) -> frozenset[str]:
    """The closure cells that ``code``, or a function inside it, binds anew."""
    return frozenset(
        instruction.argval
        for inner in with_inner(code)
        for instruction in dis.get_instructions(inner)
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF")
        and instruction.argval in code.co_freevars
    )


def _without(node: ast.AST, dropped: frozenset[ast.expr]) -> ast.AST:
    """``node`` without docstrings and ``dropped`` decorators. Statements are copied; expressions,
    in which nothing is defined, are shared."""
    own = copy.copy(node)
    for name, inner in blocks(own):
        setattr(own, name, [_without(each, dropped) for each in inner])
    if isinstance(own, Definition):
        own.decorator_list = [each for each in own.decorator_list if each not in dropped]
        if ast.get_docstring(own, clean=False) is not None:
            own.body = own.body[1:] or [ast.Pass()]
    return own


def _stable(constant: object) -> str:
    """Its ``repr``; that of a set is in another order in each process."""
    if isinstance(constant, frozenset):
        return f"frozenset({sorted(map(_stable, constant))})"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_stable, constant))})"
    return repr(constant)
