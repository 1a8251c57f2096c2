"""Compare the statements that a record depends on with the current files, without importing them.

A *label* names the statements that bind one name: ``module:name``, or only ``name`` for the module
of the tuned function. For other modules of the same package, ``module`` starts with a dot and
omits the name of the package.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from triton_dist._tuning.source.libraries import version_of
from triton_dist._tuning.source.modules import EMPTY_FILE, File, parsed_file


def changes(recorded: Mapping[str, str], module: str, function: str) -> tuple[list[str], list[str]]:
    """Return a sentence for each statement that changed, and the labels that cannot be compared.

    ``recorded`` has digests by label. ``module`` is a dotted name, or the path of a ``.py`` file.
    """
    files, unknown, sentences = _Files(module, function), list[str](), dict[str, None]()
    for label, value in recorded.items():
        module_part, _, name = label.rpartition(":")
        full = files.full_name(module_part)
        file = files.find(full) if module_part else files.home
        if value.startswith("bytecode "):
            file = EMPTY_FILE
        if label.startswith("library "):
            version = version_of(label.removeprefix("library "))
            if version and version != value:
                sentences[f"source: {label} was {value}, is {version}"] = None
        elif file.lines:
            sentences |= dict.fromkeys(_changes(file, full, name, value.split()))
        else:
            unknown.append(label)
    return list(sentences), unknown


def _changes(file: File, module: str, name: str, recorded: list[str]) -> Iterator[str]:
    """Yield a sentence for each changed statement of one label."""
    is_inner = "<" in name  # an inner function or lambda; several may have this name
    found = file.definitions(name) if is_inner else file.statements_of(name)
    now = [each for each in found if name not in each.imports]
    # The recorded digest of the tuned function is without the tuner's decorators.
    new = [
        each
        for each in now
        if {each.digest, *(bare.digest for bare in each.without_tuner.values())}.isdisjoint(
            recorded
        )
    ]
    if not now or (not new and len(now) < len(recorded)):
        yield f"source: {module}: a statement that sets {name} is gone"
    for line in [x.shown_line for x in new] if not is_inner or len(new) == len(now) else ():
        yield f"source: {module}:{line} changed: {file.lines[line - 1].strip()}"


def package_path(path: Path) -> tuple[list[str], Path]:
    """Return the parts of the dotted name of a ``.py`` file, and the folder to import it from."""
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").exists():
        parts, root = [root.name, *parts], root.parent
    return parts, root


class _Files:
    """Source files of modules, found without importing the modules. ``home`` defines ``function``,
    and has the name ``module``."""

    def __init__(self, module: str, function: str) -> None:
        self._folders = [os.getcwd(), *(each or os.getcwd() for each in sys.path)]
        self.module, self.home = module, parsed_file(os.path.abspath(module))
        if module.endswith(".py"):
            parts, root = package_path(Path(module).absolute())
            self._folders.insert(0, str(root))
            self.module = ".".join(parts) if len(parts) > 1 else module
        else:
            self.home = self.find(module)
        name = function.partition(".")[0]
        # A package may import the function from the module that defines it. Two modules may import
        # one name from each other, so each is visited once.
        visited = set[tuple[str, str]]()
        while found := min(self.home.imports.get(name, ()), default=None):
            if (self.module, name) in visited:
                break
            visited.add((self.module, name))
            spec, name = self._spec(self.module), found.attribute
            self.module = found.full_name(spec.parent if spec else "")
            self.home = self.find(self.module)

    def full_name(self, part: str) -> str:
        """Return the full name of a module in a label."""
        top = self.module.partition(".")[0] if part.startswith(".") else ""
        return f"{top}{part.rstrip('.')}" or self.module

    def find(self, module: str) -> File:
        """Return the file of a module; an empty file if it does not exist."""
        spec = self._spec(module)
        scope = {"__name__": module, "__loader__": spec and spec.loader}
        return parsed_file((spec and spec.origin) or "", scope)

    @functools.cache  # noqa: B019
    def _spec(self, module: str) -> importlib.machinery.ModuleSpec | None:
        parent, folders = module.rpartition(".")[0], self._folders
        if parent:
            above = self._spec(parent)
            folders = list((above and above.submodule_search_locations) or ())
        return next(filter(None, (each.find_spec(module, folders) for each in sys.meta_path)), None)
