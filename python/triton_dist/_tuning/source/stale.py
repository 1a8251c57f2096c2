"""Compare the statements that a record depends on with the current files, without importing them.

A *label* names the statements that bind one name: ``module:name``, or only ``name`` for the module
of the tuned function. For other modules of the same package, ``module`` starts with a dot and
omits the name of the package.
"""

from __future__ import annotations

import functools
import itertools
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
    folders = [os.getcwd(), *(each or os.getcwd() for each in sys.path)]
    if module.endswith(".py"):
        parts, root = package_path(Path(module).absolute())
        folders, module = [str(root), *folders], ".".join(parts)
    find = functools.cache(functools.partial(_find, folders))
    name = function.partition(".")[0]
    # A package may import the function from the module that defines it. Two modules may import one
    # name from each other, so each is visited once.
    visited = set[tuple[str, str]]()
    while found := min(find(module)[0].imports.get(name, ()), default=None):
        if (module, name) in visited:
            break
        visited.add((module, name))
        module, name = found.full_name(find(module)[1]), found.attribute
    unknown, sentences = list[str](), dict[str, None]()
    for label, value in recorded.items():
        part, _, name = label.rpartition(":")
        package = module.partition(".")[0] if part.startswith(".") else ""
        full = f"{package}{part.rstrip('.')}" or module
        file = EMPTY_FILE if value.startswith("bytecode ") else find(full)[0]
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
    # A function inside another is a part of the statement with the name of the outer function.
    found = file.statements_of(name) or file.statements_of(name.partition(".")[0])
    now = [each for each in found if name not in each.imports]
    # The record of a tuned function does not contain the statement of its tuner.
    new = [each for each in now if each.digest not in recorded and not each.tuned_line]
    if not now or (not new and len(now) < len(recorded)):
        yield f"source: {module}: a statement that sets {name} is gone"
    for line in [each.shown_line for each in new]:
        yield f"source: {module}:{line} changed: {file.lines[line - 1].strip()}"


def package_path(path: Path) -> tuple[list[str], Path]:
    """Return the parts of the dotted name of a ``.py`` file, and the folder to import it from."""
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").exists():
        parts, root = [root.name, *parts], root.parent
    return parts, root


def _find(folders: list[str], module: str) -> tuple[File, str]:
    """Return the file of a module, empty if it does not exist, and the name of its package."""
    spec = None
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        found = (each.find_spec(name, folders) for each in sys.meta_path)
        spec = next(filter(None, found), None)
        folders = list((spec and spec.submodule_search_locations) or ())
    scope = {"__name__": module, "__loader__": spec and spec.loader}
    return parsed_file((spec and spec.origin) or "", scope), (spec and spec.parent) or ""
