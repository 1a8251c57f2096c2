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
from triton_dist._tuning.source.modules import EMPTY, File, file_at


def changes(recorded: Mapping[str, str], module: str, function: str) -> tuple[list[str], list[str]]:
    """Return a sentence for each statement that changed, and the labels that cannot be compared.

    ``recorded`` has digests by label. ``module`` is a dotted name, or the path of a ``.py`` file.
    """
    files, unknown, sentences = _Files(module, function), list[str](), dict[str, None]()
    for label, value in recorded.items():
        module_part, _, name = label.rpartition(":")
        file = EMPTY if value.startswith("bytecode ") else files.file_of(module_part)
        if label.startswith("library "):
            version = version_of(label.removeprefix("library "))
            if version and version != value:
                sentences[f"source: {label} was {value}, is {version}"] = None
        elif file.lines:
            sentences |= dict.fromkeys(files.changes(file, module_part, name, value.split()))
        else:
            unknown.append(label)
    return list(sentences), unknown


def package_path(path: Path) -> tuple[list[str], Path]:
    """Return the parts of the dotted name of a ``.py`` file, and the folder to import it from."""
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").exists():
        parts, root = [root.name, *parts], root.parent
    return parts, root


class _Files:
    """Source files of modules, found without importing the modules."""

    def __init__(self, module: str, function: str) -> None:
        self._function, path = function, Path(module).absolute()
        self._folders = [os.getcwd(), *(each or os.getcwd() for each in sys.path)]
        file, name = file_at(str(path)), function.partition(".")[0]
        if module.endswith(".py"):
            parts, root = package_path(path)
            self._folders.insert(0, str(root))
            self._function_module = ".".join(parts) if len(parts) > 1 else module
        else:
            self._function_module, file = module, self._file(module)
        # A package may import the function from the module that defines it.
        while file.imports.get(name):
            found, spec = min(file.imports[name]), self._spec(self._function_module)
            self._function_module = found.full_name(spec.parent if spec else "")
            file, name = self._file(self._function_module), found.attribute
        self._function_file = file

    def file_of(self, module_part: str) -> File:
        """Return the file of the module in a label. ``""`` is the module of the function."""
        return self._file(self._full(module_part)) if module_part else self._function_file

    def _full(self, module_part: str) -> str:
        top = self._function_module.partition(".")[0] if module_part.startswith(".") else ""
        return f"{top}{module_part.rstrip('.')}" or self._function_module

    @functools.cache  # noqa: B019
    def _spec(self, module: str) -> importlib.machinery.ModuleSpec | None:
        parent, folders = module.rpartition(".")[0], self._folders
        if parent:
            above = self._spec(parent)
            folders = list((above and above.submodule_search_locations) or ())
        return next(filter(None, (each.find_spec(module, folders) for each in sys.meta_path)), None)

    def _file(self, module: str) -> File:
        spec = self._spec(module)
        scope = {"__name__": module, "__loader__": spec and spec.loader}
        return file_at((spec and spec.origin) or "", scope)

    def changes(
        self, file: File, module_part: str, name: str, recorded: list[str]
    ) -> Iterator[str]:
        """Yield a sentence for each changed statement of one label."""
        is_inner = "<" in name  # an inner function or lambda; several may have this name
        found = file.definitions(name) if is_inner else file.statements_of(name)
        now = [each for each in found if name not in each.imports]
        new = [each for each in now if each.digest not in recorded]
        for tuned in file.definitions(self._function) if new else ():
            # The recorded digest of the tuned function is without the tuner's decorators.
            bare = file.without_tuner(tuned.line)
            new = [x for x in new if x not in bare or bare[x].digest not in recorded]
        if not now or (not new and len(now) < len(recorded)):
            yield f"source: {self._full(module_part)}: a statement that sets {name} is gone"
        for line in [x.shown_line for x in new] if not is_inner or len(new) == len(now) else ():
            text = file.lines[line - 1].strip()
            yield f"source: {self._full(module_part)}:{line} changed: {text}"
