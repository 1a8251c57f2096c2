"""Tells code that is installed from code that is written here: only the latter is followed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import sysconfig
import types
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_OWN = "triton_dist"
_TUNER = "triton_dist._tuning"  # how a result was found does not change what was timed
_SHIPPING = ("triton_dist.packs", "triton_dist._archive", "triton_dist.runtime.compiling")
"""Nor does where a kernel was compiled."""
_JIT = "triton_dist._jit"  # a kernel's options are in the text of its decorator
_LIBRARIES = frozenset({"torch", "triton", "numpy"})  # also when they are built in a source tree


class Libraries:
    """Modules whose versions stand for their code.

    Args:
        own: modules of the functions that are asked about. Their packages count as written here,
            wherever they are installed.
    """

    def __init__(self, own: Iterable[str | None]) -> None:
        self._own = {_OWN} | {(name or "").partition(".")[0] for name in own}
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
        if top in _LIBRARIES or top in sys.stdlib_module_names:
            return True
        if top in self._own:
            return False
        return self._has_file(getattr(sys.modules.get(name), "__file__", None) or "")

    def imported(self, name: str, level: int = 0, package: str = "") -> types.ModuleType | None:
        """The module that ``import`` finds; ``None`` for a library's, and if there is none."""
        try:
            full = importlib.util.resolve_name("." * level + name, package)
            return None if self.has_module(full) else importlib.import_module(full)
        except (ImportError, ValueError):
            return None

    def _has_file(self, file: str) -> bool:
        known = self._files.get(file)
        if known is None:
            known = self._files[file] = self._is_installed(file)
        return known

    def _is_installed(self, file: str) -> bool:
        _, installed, inside = file.rpartition("-packages/")  # site-packages, dist-packages
        if installed:
            return _top(inside) not in self._own
        return file.startswith(_stdlib()) or self._is_in_target(file)

    def _is_in_target(self, file: str) -> bool:
        """True if ``pip install --target`` put it there, into a folder of ``PYTHONPATH``. What lies
        beside such packages, as a program that is shipped with them, is written here."""
        for folder in filter(None, map(str, sys.path)):
            inside = file.removeprefix(folder.rstrip("/") + "/")
            if inside != file and _top(inside) in _installed_in(folder):
                return _top(inside) not in self._own
        return False


def is_library(module: str) -> bool:
    """True if ``module`` is installed, or part of Python, for who reads its values."""
    return Libraries(()).has_module(module)


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


@functools.cache
def _stdlib() -> str:
    return sysconfig.get_paths()["stdlib"] + "/"
