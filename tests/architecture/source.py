"""The package's source, for the tests that read it."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "triton_dist"


@cache
def modules() -> list[Path]:
    """Every module of the package, but ``__init__`` ones that say nothing."""
    return sorted(
        path for path in PACKAGE.rglob("*.py") if path.read_text(encoding="utf-8").strip()
    )


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def uses(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted name) of everything imported or read as an attribute of an imported name.

    Names are written out as imported: after ``import torch.distributed as dist``, ``dist.barrier``
    is ``torch.distributed.barrier``. What is imported for type checking alone does not count.
    """
    found: list[tuple[int, str]] = []
    aliases: dict[str, str] = {}
    nodes = list(_walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append((node.lineno, alias.name))
                top = alias.name.split(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found.append((node.lineno, f"{node.module}.{alias.name}"))
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes:
        if isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            if dotted is not None:
                top, rest = dotted.split(".", 1)
                if top in aliases:
                    found.append((node.lineno, f"{aliases[top]}.{rest}"))
    return found


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Like ``ast.walk``, without the bodies of ``if TYPE_CHECKING:``."""
    pending = deque([node])
    while pending:
        node = pending.popleft()
        if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            yield node
            pending.extend(ast.iter_child_nodes(node))


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None
