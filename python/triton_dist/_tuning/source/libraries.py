"""Tells code that is installed from code that is written here: only the latter is followed."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import sysconfig
import types
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

_OWN = "triton_dist"
_TUNER = "triton_dist._tuning"  # how a result was found does not change what was timed
_SHIPPING = ("triton_dist.packs", "triton_dist._archive", "triton_dist.runtime.compiling")
"""Nor does where a kernel was compiled."""
_JIT = "triton_dist._jit"  # a kernel's options are in the text of its decorator
_INSTALLED = re.compile("/(?:site|dist)-packages/")
_LIBRARIES = frozenset({"torch", "triton", "numpy"})  # also when they are built in a source tree


class Libraries:
    """Modules whose versions stand for their code.

    Args:
        own: modules of the functions that are asked about. Their packages count as written here,
            wherever they are installed.
    """

    def __init__(self, own: Iterable[str | None]) -> None:
        names = [name or "" for name in own]
        # Of ``python -m package.module``, where the module is called "__main__".
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        started = getattr(spec, "name", "") if "__main__" in names else ""
        self._own = {_OWN} | {name.partition(".")[0] for name in (*names, started)}
        self._own_files = {_file_of(name) for name in names} - {""}
        self._modules: dict[str, bool] = {}
        self._files: dict[str, bool] = {}

    def has(self, value: types.ModuleType | type) -> bool:
        return self.has_module(
            value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        )

    def has_function(self, function: types.FunctionType) -> bool:
        # functools.wraps gives a library's wrapper the module of what it wraps: the file tells.
        return self.has_module(function.__module__ or "") or self._has_file(
            function.__code__.co_filename
        )

    def has_module(self, name: str) -> bool:
        known = self._modules.get(name)
        if known is None:
            known = self._modules[name] = self._has_module(name)
        return known

    def _has_module(self, name: str) -> bool:
        top = name.partition(".")[0]
        if is_tuner(name) or name == _JIT or name.startswith(_SHIPPING):
            return True
        file = _file_of(name)
        if top in _LIBRARIES:
            return True
        if top in sys.stdlib_module_names and (not file or file.startswith(_stdlib())):
            return True  # another one of that name is the program's
        return top not in self._own and self._has_file(file)

    def imported(self, name: str) -> types.ModuleType | None:
        """Import a module; ``None`` for a library's, and if there is none."""
        try:
            return None if self.has_module(name) else importlib.import_module(name)
        except (Exception, SystemExit):  # of a module that cannot run here
            return None

    def _has_file(self, file: str) -> bool:
        known = self._files.get(file)
        if known is None:
            known = self._files[file] = self._is_installed(file)
        return known

    def _is_installed(self, file: str) -> bool:
        if file in self._own_files:
            return False
        installed = _INSTALLED.split(file)
        if len(installed) > 1:
            return _top(installed[-1]) not in self._own
        return file.startswith(_stdlib()) or self._is_in_target(file)

    def _is_in_target(self, file: str) -> bool:
        """True if ``pip install --target`` put it there, into a folder of ``PYTHONPATH``. What lies
        beside such packages, as a program that is shipped with them, is written here."""
        for folder in filter(None, map(str, sys.path)):
            inside = file.removeprefix(folder.rstrip("/") + "/")
            if inside != file and _top(inside) in _installed_in(folder):
                return _top(inside) not in self._own
        return False


@functools.cache
def version_of(package: str) -> str:
    """The distribution that a package at the top of a path is of, and its version; "" for what is
    not installed by itself. Those of torch and Triton stand in every record."""
    if package in _LIBRARIES or package in sys.stdlib_module_names:
        return ""
    try:
        return f"{package} {metadata.version(package)}"
    except (metadata.PackageNotFoundError, ValueError):
        names = metadata.packages_distributions().get(package, [])
        return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))


def is_tuner(module: str) -> bool:
    """True if ``module`` is part of the tuner itself."""
    return module == _TUNER or module.startswith(_TUNER + ".")


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """The modules and packages in ``folder`` that pip put there, by its own lists."""
    names: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with suppress(OSError), record.open(encoding="utf-8", errors="replace") as lines:
            names.update(_top(line.partition(",")[0]) for line in lines)
    return frozenset(names)


def _top(path: str) -> str:
    """The name of a module or package, by its file."""
    return path.partition("/")[0].removesuffix(".py")


def _file_of(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or ""


@functools.cache
def _stdlib() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(paths[each] + "/" for each in ("stdlib", "platstdlib"))
