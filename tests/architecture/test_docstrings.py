"""Docstrings begin with a noun or a verb: a thing, or what is done."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import modules, name, tree

SUBORDINATE = re.compile(r"(How|If|Of|That|What|When|Where|Whether|Which|Who|Whose|Why)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of those of modules, classes, functions and attributes."""
    for node in ast.walk(tree(path)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


def test_no_docstring_begins_with_a_subordinate_clause() -> None:
    found = [
        f"{name(path)}:{line}: {text.splitlines()[0]}"
        for path in modules()
        for line, text in docstrings(path)
        if SUBORDINATE.match(text)
    ]
    assert not found, "begin with a noun or a verb:\n" + "\n".join(found)
