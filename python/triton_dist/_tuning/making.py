"""Names that a statement makes, changes and reads."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
_CHANGING = ("add", "append", "extend", "insert", "setdefault", "update")
"""Methods of containers that put something into them."""


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
        return {root_of(each) for each in methods if not only_used(each.value)}
    if isinstance(statement, (ast.Import, ast.ImportFrom)) or _is_main(statement):
        return set()
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            found.add(root_of(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found |= set() if only_used(node.func.value) else {root_of(node.func)}
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and not only_used(getattr(call.func, "value", call)):
        given = (each for each in call.args if isinstance(each, ast.Name))
        found |= {each.id for each in given if not only_used(each)}
    return found


def _is_main(statement: ast.stmt) -> bool:
    """``if __name__ == "__main__":`` runs in scripts alone."""
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def root_of(node: ast.expr) -> str:
    """The first name of ``a.b[0].c``; "" if it begins with another expression."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def stored_by(statement: ast.stmt) -> Iterator[str]:
    """Dotted names that a statement assigns to, or whose value it changes in place."""
    for node in ast.walk(statement):
        place: ast.expr | None = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            place = node
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            place = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            place = node.func.value if node.func.attr in _CHANGING else None
        elif isinstance(node, ast.Call) and _is_setting(node):
            yield f"{dotted_name(node.args[0])}.{getattr(node.args[1], 'value', '')}"
        if place is not None and (name := dotted_name(place)):
            yield name


def _is_setting(call: ast.Call) -> bool:
    """True for ``setattr(place, "name", value)``."""
    return dotted_name(call.func) == "setattr" and len(call.args) == 3


def dotted_name(node: ast.expr) -> str:
    """The dotted name of ``node``; ``type(self)`` and ``self.__class__`` are ``cls``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and dotted_name(node.func) == "type":
        return "cls"
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return "cls" if node.attr == "__class__" else f"{base}.{node.attr}" if base else ""
    return ""


def names_in(node: ast.AST, context: type[ast.expr_context]) -> frozenset[str]:
    """Names that are read, or bound, in ``node``."""
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return frozenset(each.id for each in names if isinstance(each.ctx, context))


def calls_super(statement: ast.stmt) -> bool:
    calls = (each for each in ast.walk(statement) if isinstance(each, ast.Call))
    return any(dotted_name(each.func) == "super" for each in calls)
