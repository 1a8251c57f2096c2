"""JSON that a person reads: what fits on one line is on one line."""

from __future__ import annotations

import json
from typing import Any

_INDENT = 2


def readable_json(tree: Any, width: int = 100) -> str:
    """``tree`` as JSON with lines of at most ``width`` columns where a string allows it, newline at
    the end."""
    return _lines(tree, 0, 0, width) + "\n"


def _lines(tree: Any, depth: int, before: int, width: int) -> str:
    """``tree`` whose first line has ``before`` columns in front of it."""
    flat = json.dumps(tree, allow_nan=False)
    if not isinstance(tree, (dict, list)) or not tree or before + len(flat) < width:
        return flat
    indent = " " * (depth + _INDENT)
    if isinstance(tree, list):
        items = [_lines(item, depth + _INDENT, len(indent), width) for item in tree]
        opening, closing = "[", "]"
    else:
        names = [f"{json.dumps(name)}: " for name in tree]
        items = [
            name + _lines(item, depth + _INDENT, len(indent) + len(name), width)
            for name, item in zip(names, tree.values(), strict=True)
        ]
        opening, closing = "{", "}"
    return (
        opening + "\n" + ",\n".join(indent + item for item in items) + "\n" + " " * depth + closing
    )
