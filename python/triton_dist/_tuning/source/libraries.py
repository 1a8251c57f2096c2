"""Distinguish installed libraries, which are compared by version, from code of the project."""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
import types
from collections.abc import Iterable
from importlib import metadata

_THIS_PACKAGE = "triton_dist"
_IRRELEVANT_MODULES = (
    "triton_dist._tuning",
    "triton_dist.packs",
    "triton_dist._archive",
    "triton_dist.runtime.compiling",
    "triton_dist._jit",
)
"""Modules of this package that do not change what is timed, because they only find results, ship
results or compile. ``_jit`` is included, because the arguments of its decorator are part of the
source of each kernel."""
_INSTALLED = re.compile("/(?:site|dist)-packages/")
_STDLIB = tuple(sysconfig.get_path(each) + "/" for each in ("stdlib", "platstdlib"))
_LIBRARIES = frozenset({"torch", "triton", "numpy"})
"""Libraries even if they are imported from a source tree."""


class Libraries:
    """The modules that are libraries and not part of the project.

    The packages of ``function_modules`` belong to the project, even if they are installed.
    """

    def __init__(self, function_modules: Iterable[str | None]) -> None:
        names = {name or "" for name in function_modules}
        if "__main__" in names:  # the module's name in ``python -m package.module``
            names.add(getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", ""))
        packages = {_THIS_PACKAGE} | {name.partition(".")[0] for name in names}
        self._project = packages | {_file_of(name) for name in names} - {""}
        self.has_module = functools.cache(self._has_module)

    def defines(self, value: type | types.FunctionType) -> bool:
        """Return whether ``value`` is defined in a library."""
        # A wrapper that a library made has the ``__module__`` of the wrapped function. Its file is
        # the library's.
        file = value.__code__.co_filename if isinstance(value, types.FunctionType) else ""
        return self.has_module(value.__module__ or "") or self._has_file(file)

    def _has_module(self, name: str) -> bool:
        top, file = name.partition(".")[0], _file_of(name)
        if top in _LIBRARIES or name.startswith(_IRRELEVANT_MODULES):
            return True
        # A module of the project may have the name of a standard module, so check its file.
        return self._has_file(file) if file else top in sys.stdlib_module_names

    def _has_file(self, file: str) -> bool:
        return file not in self._project and _package_of(file) not in {"", *self._project}


@functools.cache
def version_of(package: str) -> str:
    """Return name and version of the distribution that has a top-level package.

    Return ``""`` if no distribution has it, and for this package, the standard library, torch,
    Triton and NumPy. The versions of torch and Triton are in every record.
    """
    if package in {_THIS_PACKAGE, *_LIBRARIES, *sys.stdlib_module_names}:
        return ""
    try:
        return f"{package} {metadata.version(package)}"
    except (metadata.PackageNotFoundError, ValueError):
        names = metadata.packages_distributions().get(package, [])
        return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))


@functools.cache
def _package_of(file: str) -> str:
    """Return the top-level package of an installed file; ``""`` if the file is not installed."""
    found = [_top(each) for each in _INSTALLED.split(file)[1:]]
    for folder in () if found else filter(None, map(str, sys.path)):
        # ``pip install --target`` installs into any folder, which may contain programs too.
        inside = file.removeprefix(folder.rstrip("/") + "/")
        if inside != file and _top(inside) in _installed_in(folder):
            found.append(_top(inside))
    found += ["(standard library)"] if file.startswith(_STDLIB) and not found else []
    return found[-1] if found else ""


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """Return the modules and packages in ``folder`` that are in pip's lists of files."""
    found = metadata.distributions(path=[folder])
    return frozenset(_top(str(file)) for each in found for file in each.files or ())


def _top(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def _file_of(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or ""
