"""Source code without what cannot change its meaning, and the names that it uses."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definition(item: types.CodeType | type) -> Definition | None:
    """The statement that defined ``item``; ``None`` for a lambda, or when the source is not at
    hand."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
    except (OSError, TypeError, SyntaxError):
        return None
    first = tree.body[0] if tree.body else None
    return first if isinstance(first, Definition) else None


def normalised(node: Definition, drop: Callable[[ast.expr], bool]) -> str:
    """The text of ``node`` in one formatting: no comments, no docstrings, no decorators that
    ``drop`` names. Line numbers and file names are not in it."""
    for inner in ast.walk(node):
        if isinstance(inner, Definition):
            inner.decorator_list = [d for d in inner.decorator_list if not drop(d)]
            if ast.get_docstring(inner, clean=False) is not None:
                inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node)


def bytecode(code: types.CodeType) -> str:
    """What stands for the source when there is none: the instructions, constants and names."""
    constants = [
        bytecode(constant) if isinstance(constant, types.CodeType) else repr(constant)
        for constant in code.co_consts
    ]
    return repr((code.co_code.hex(), constants, code.co_names, code.co_varnames))


def chains(node: ast.AST) -> set[str]:
    """Dotted names that are read, such as ``tl.dot``, with all their beginnings."""
    found = set()
    for inner in ast.walk(node):
        name = dotted(inner)
        if name is not None and isinstance(getattr(inner, "ctx", None), ast.Load):
            found.add(name)
    return found


def dotted(node: ast.AST) -> str | None:
    """``"a.b.c"`` for an attribute chain on a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def global_names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Global names that ``code`` or a function inside it reads, and those that it binds anew."""
    read: set[str] = set()
    bound: set[str] = set()
    for inner in _with_inner(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(instruction.argval)
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                bound.add(instruction.argval)
    return read, bound


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


def imports(node: ast.AST) -> Iterator[tuple[str, int, str | None]]:
    """Imports inside a function: module, level of a relative import, and the name taken from it."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from ((alias.name, 0, None) for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom):
            yield from ((inner.module or "", inner.level, alias.name) for alias in inner.names)


def assignment(module: types.ModuleType, name: str) -> str | None:
    """The expression that the module's last top-level assignment gives ``name``."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return None
    found = None
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            found = ast.unparse(value)
    return found
