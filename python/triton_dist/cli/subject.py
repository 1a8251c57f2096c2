"""Finds the tuned function that a command is about."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from triton_dist import knobs
from triton_dist._tuning.values import codec
from triton_dist.errors import NoSuchFunction

if TYPE_CHECKING:
    from triton_dist.tune import AutoTuner


def module(name: str) -> ModuleType:
    """Import a module by its dotted name, or by the path of its ``.py`` file.

    Calls of tuned functions on its way tune nothing.

    Raises:
        NoSuchFunction: there is no such module, or it fails when it is imported.
    """
    if "" not in sys.path:  # as for a script that is run from here
        sys.path.insert(0, "")
    try:
        with knobs.having(knobs.autotune.variable, "0"):
            if name.endswith(".py"):
                return _from_file(Path(name).resolve())
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a script may end itself
        raise NoSuchFunction(
            name,
            f"it cannot be imported: {type(error).__name__}: {error}",
            "Give a dotted name that can be imported from here, or the path of the file",
        ) from error


def function_in(module: ModuleType, function: str) -> AutoTuner:
    """Return the tuned ``function``, ``name`` or ``Class.name``, of ``module``.

    Raises:
        NoSuchFunction: it has no such tuned function.
    """
    from triton_dist.tune import AutoTuner  # torch takes seconds, and other verbs need none

    value: Any = module
    for part in function.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise NoSuchFunction(
                f"{module.__name__}:{function}",
                f"{getattr(value, '__name__', value)!r} has no {part!r}",
                "Name it as in the module: function, or Class.method",
            ) from error
    if not isinstance(value, AutoTuner):
        raise NoSuchFunction(
            f"{module.__name__}:{function}",
            f"it is of {type(value)}, not a tuned function",
            "Name a function that is decorated with triton_dist.tune.autotune",
        )
    return value


def _from_file(path: Path) -> ModuleType:
    """Import a file: one of a package by its dotted name, a script by its path.

    Scripts of one name are two modules, and one called ``profile.py`` is not Python's.
    """
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").exists():
        parts.insert(0, root.name)
        root = root.parent
    sys.path.insert(0, str(root))
    if len(parts) > 1:
        return importlib.import_module(".".join(parts))
    name = f"{path.stem}_{codec.digest(str(path))[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
