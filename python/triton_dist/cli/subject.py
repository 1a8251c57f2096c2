"""Finds the tuned function that a command is about."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from triton_dist import knobs
from triton_dist.errors import NoSuchFunction

if TYPE_CHECKING:
    from triton_dist.tune import AutoTuner


def load(module_name: str, function: str) -> AutoTuner:
    """The tuned ``function``, ``name`` or ``Class.name``, of a module.

    Args:
        module_name: dotted name, or the path of a ``.py`` file; it is imported, and calls on its
            way tune nothing.

    Raises:
        NoSuchFunction: no such module, it fails when it is imported, or has no such tuned function.
    """
    from triton_dist.tune import AutoTuner  # torch takes seconds, and other verbs need none

    value: Any = _module(module_name)
    for part in function.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise NoSuchFunction(
                f"{module_name}:{function}",
                f"{getattr(value, '__name__', value)!r} has no {part!r}",
                "Name it as in the module: function, or Class.method",
            ) from error
    if not isinstance(value, AutoTuner):
        raise NoSuchFunction(
            f"{module_name}:{function}",
            f"it is of {type(value)}, not a tuned function",
            "Name a function that is decorated with triton_dist.tune.autotune",
        )
    return value


def _module(name: str) -> ModuleType:
    dotted = _dotted(Path(name)) if name.endswith(".py") else name
    if "" not in sys.path:  # as for a script that is run from here
        sys.path.insert(0, "")
    try:
        # A script that calls what it tunes must not change what a command is asked.
        with knobs.having(knobs.autotune.variable, "0"):
            return importlib.import_module(dotted)
    except (Exception, SystemExit) as error:  # a script may end itself
        raise NoSuchFunction(
            name,
            f"it cannot be imported: {type(error).__name__}: {error}",
            "Give a dotted name that can be imported from here, or the path of the file",
        ) from error


def _dotted(path: Path) -> str:
    """The name by which the file can be imported, now that its root is on the path."""
    path = path.resolve()
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").exists():
        parts.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return ".".join(parts)
