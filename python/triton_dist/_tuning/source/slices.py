"""The slice of a function: the statements that decide what it computes.

That is the statement that contains it, and for each name that a statement of the slice reads, the
statements that bind or change that name, in its module or the one that it is imported from.
Libraries count by their versions. What there is no source of counts by its bytecode.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from triton_dist._tuning.source import libraries
from triton_dist._tuning.source.constants import Constants, text_of
from triton_dist._tuning.source.given import Given, cells_of, function_in
from triton_dist._tuning.source.modules import (
    File,
    Import,
    Statement,
    digest,
    dotted,
    file_at,
    roots,
    with_inner,
)
from triton_dist._tuning.source.snapshot import CONTAINERS, Snapshot, attribute

Globals = dict[str, Any]
"""Globals of a module. Two modules of one name, as after a new import, have different ones."""
_NONE: dict[str, Any] = {}
_LOOK_UPS = (ast.Call, ast.Attribute, ast.Subscript, ast.Await, ast.comprehension)
"""Parts of expressions whose value may differ by process."""


class Slice:
    """Digests of statements by label, in an order that is the same in all processes.

    Args:
        home: globals of the module of the function; labels of its statements are names alone.
    """

    def __init__(
        self,
        library: libraries.Libraries,
        constants: Constants,
        snapshot: Snapshot,
        home: Globals,
    ) -> None:
        self.digests: dict[str, str] = {}
        self.library, self.constants = library, constants
        self.given = Given(self, constants, snapshot)
        self._home = home
        self._visited: set[Any] = set()
        self._files: dict[int, File | None] = {}
        self._loaded: dict[int, bool] = {}
        self._tuned: dict[Statement, Statement] = {}
        self._changing: set[tuple[int, str]] = set()

    def root(self, function: types.FunctionType) -> None:
        """Leave out the tuner's decorators of a function: their arguments are compared by value."""
        scope, line = function.__globals__, function.__code__.co_firstlineno
        file = file_at(function.__code__.co_filename, scope)
        if file is not None and (found := file.around(line)) and file.has(function.__code__):
            self._tuned[found] = file.without_tuner(line)

    def function(self, function: types.FunctionType) -> str:
        """Follow a function by its code; returns its label."""
        scope, code = function.__globals__, function.__code__
        name = getattr(code, "co_qualname", function.__qualname__)
        label, top = self.label(scope, name), name.partition(".")[0]
        file = file_at(code.co_filename, scope)
        around = None if file is None or not file.has(code) else file.around(code.co_firstlineno)
        if around is not None and around.defines == top and "<locals>" not in name:
            if self._file(scope) is file:
                self.name(scope, top)
                return self.label(scope, top)
            self._enter(label, [around], scope)  # in another cell of a notebook
        elif around is not None and file is not None:
            found = file.definition(code) or around
            self._enter(label, [found], scope, cells_of(function))
            self.given.closure(function, found.nonlocals)
        elif label not in self.digests:
            self.digests[label] = f"bytecode {digest([bytecode(code)])}"
            self._follow({x for _, each in with_inner(code) for x in each.co_names}, scope)
            self.given.closure(function, ())
        return label

    def cls(self, cls: type) -> str:
        """Follow a class; returns its label."""
        module = sys.modules.get(cls.__module__)
        if module is None or self.library.has_module(cls.__module__):
            return f"{cls.__module__}.{cls.__qualname__}"
        methods = [x for x in vars(cls).values() if isinstance(x, types.FunctionType)]
        scopes = [x.__globals__ for x in methods if x.__module__ == cls.__module__]
        scope = next((x for x in scopes if x.get("__name__") == cls.__module__), vars(module))
        name, top = cls.__qualname__, cls.__qualname__.partition(".")[0]
        file, label = self._file(scope), self.label(scope, name)
        if file is None or not file.of(top) or not self._is_loaded(scope, file, cls):
            if label not in self.digests and any(map(function_in, vars(cls).values())):
                self.digests[label] = ""
                self.digests[label] = f"bytecode {digest(self.given.members(cls))}"
        elif "<locals>" not in name:
            self.name(scope, top)
            return self.label(scope, top)
        elif label not in self.digests:
            self._enter(label, file.definitions(lambda x, _: x == name), scope)
            for each in methods:
                self.given.closure(each, ())
        return label

    def name(self, scope: Globals, name: str) -> None:
        """Follow a global: the statements that bind or change it, and code that other modules have
        put into its value."""
        if (id(scope), name) in self._visited or self.library.has_module(_module_name(scope)):
            return
        self._visited.add((id(scope), name))
        file, value = self._file(scope), scope.get(name)
        if isinstance(value, types.ModuleType) or self.constants.ignores(name):
            return
        found = [] if file is None else [self._tuned.get(each, each) for each in file.of(name)]
        imports = [each.imports[name] for each in found if name in each.imports]
        if file is not None and not found:
            there = [sys.modules.get(_full(each, scope)) for each in file.stars]
            imports = [Import(x.__name__, 0, name) for x in there if x and name in vars(x)][-1:]
        for each in imports:
            self._imported(each, scope)
        found = [each for each in found if name not in each.imports]
        if any(self.library.has_module(_full(each, scope)) for each in imports):
            found = []  # what a library's object is used for does not change it
        if file is None or not (found or imports) or not self._is_loaded(scope, file, value):
            self._without_source(scope, name)
            return
        if found:
            self._enter(self.label(scope, name), found, scope)
            if not imports:
                self._constant(scope, name, value, found)
        own = function_in(value)
        if own is not None and own.__globals__ is scope and "." not in own.__qualname__:
            self.name(scope, own.__name__)  # perhaps another one was put in its place
        self.given.foreign(value, scope)

    def _enter(
        self, label: str, found: Iterable[Statement], scope: Globals, cells: Globals = _NONE
    ) -> None:
        found = list(found)
        self.digests[label] = " ".join(each.digest for each in found)
        for each in found:
            if each not in self._visited:
                self._visited.add(each)
                self._follow(each.reads, scope, cells, each.inner_imports)

    def _follow(
        self,
        chains: Iterable[str],
        scope: Globals,
        cells: Globals = _NONE,
        imports: Mapping[str, Import] = _NONE,
    ) -> None:
        """Follow dotted names that a statement reads.

        Args:
            cells: values of closure cells among them, which are followed elsewhere.
            imports: what functions in it import. It is imported now, if it can be.
        """
        for found in imports.values():
            self._imported(found, scope, load=True)
        for chain in sorted(chains):
            root, *path = chain.split(".")
            value = cells.get(root, scope.get(root))
            if root in imports:
                self._imported(imports[root], scope, path, load=True)
            elif isinstance(value, types.ModuleType):
                self._set_elsewhere(chain, scope)
                self._attribute(value, path)
            elif path == ["__subclasses__"] and isinstance(value, type):
                for cls in _subclasses(value):
                    self.cls(cls)
            elif root.endswith("*"):  # globals()[name]
                self._follow([each for each in scope if each.startswith(root[:-1])], scope)
            if root not in cells:
                self.name(scope, root)

    def _set_elsewhere(self, chain: str, scope: Globals) -> None:
        """Follow the statements of this module that set ``module.name`` of another one."""
        file = self._file(scope)
        if file is not None and (found := file.of(chain) if "." in chain else []):
            self._enter(self.label(scope, chain), found, scope)
            if chain in file.stored:
                holder = _value(scope, chain.rpartition(".")[0])
                self._changing.add((id(attribute(holder, "__dict__")), chain.rpartition(".")[2]))

    def _attribute(self, module: types.ModuleType, path: list[str]) -> None:
        """Follow what ``path`` leads to from a module."""
        is_op = self.given.custom_op(module, path)
        while path and not self.library.has(module):
            name, *path = path
            scope, value = vars(module), attribute(module, name)
            if not isinstance(value, types.ModuleType):
                known = name in scope or name.endswith("*")
                self._follow([name if known else "__getattr__"], scope)
                break
            module = value
        if self.library.has(module) and not is_op:
            self.version(module.__name__)

    def _imported(
        self, found: Import, scope: Globals, path: Iterable[str] = (), load: bool = False
    ) -> None:
        """Follow an imported name; ``path``: what is read from it."""
        full = _full(found, scope)
        if self.library.has_module(full):
            self.version(full)
        module = self.library.imported(full) if load else sys.modules.get(full)
        if module is not None and not self.library.has(module):
            name = [found.attribute] if found.attribute else []
            if load and name and not hasattr(module, name[0]):
                self.library.imported(f"{full}.{name[0]}")
            self._attribute(module, [*name, *path])

    def version(self, module: str) -> None:
        """Note the version of a library, which stands for its source."""
        package = module.partition(".")[0]
        if version := libraries.version_of(package):
            self.digests[f"library {package}"] = version

    def _without_source(self, scope: Globals, name: str) -> None:
        """Follow the value of a global of which no statement is known."""
        value = scope.get(name)
        try:
            text = "" if name not in scope or name.startswith("__") else text_of(value)
        except TypeError:
            if not isinstance(value, CONTAINERS):
                self.given.code(value)
        else:
            if text:
                self.constants.bound[self.constants.name(name, scope)] = text

    def _is_loaded(self, scope: Globals, file: File, value: Any) -> bool:
        """True if the file is what was imported, as far as the code of its functions tells; of a
        file that was edited since, true for a value whose own code is the same."""
        path = scope.get("__file__")
        # pytest rewrites the asserts of test modules: their bytecode differs from the file's.
        if type(scope.get("__loader__")).__module__.startswith("_pytest."):
            return True

        def codes(values: Iterable[Any]) -> list[types.CodeType]:
            found = [each.__code__ for each in map(function_in, [*values]) if each is not None]
            return [each for each in found if each.co_filename == path]

        if id(scope) not in self._loaded:
            self._loaded[id(scope)] = all(map(file.has, codes(scope.values())))
        own = codes([value, *(vars(value).values() if isinstance(value, type) else ())])
        return self._loaded[id(scope)] or (bool(own) and all(map(file.has, own)))

    def _constant(self, scope: Globals, name: str, value: Any, found: list[Statement]) -> None:
        """Note the value of a global, which another module may have set. It counts if it stands in
        the source, as then all ranks have it."""
        binding = [each for each in found if name in each.binds]
        nodes = [each.values.get(name) for each in binding]
        callees = [_value(scope, dotted(x.func)) for x in nodes if isinstance(x, ast.Call)]
        is_marked = any(attribute(each, "marks_a_constant", False) for each in callees)
        if type(value).__name__ == "constexpr":
            value = value.value
            nodes = [x.args[0] if isinstance(x, ast.Call) and x.args else None for x in nodes]
        if isinstance(value, CONTAINERS) and not is_marked:
            return
        try:
            text = text_of(value)
        except TypeError:
            return
        parts = [x for node in nodes if node is not None for x in ast.walk(node)]
        file, unique = self._file(scope), self.constants.name(name, scope)
        is_stored = file is not None and name in roots(file.stored)
        if (id(scope), name) in self._changing:
            self.constants.uncounted[unique] = "it changes as the program runs"
        elif is_marked:
            self.constants.literal[unique] = text
        elif is_stored or None in nodes or any(isinstance(x, _LOOK_UPS) for x in parts):
            if isinstance(value, (bool, int, float, complex, str, bytes, tuple, types.NoneType)):
                self.constants.uncounted[unique] = "it is computed when the program runs"
        elif any(isinstance(each, ast.Name) for each in parts):
            pass  # what it is computed from is noted
        elif len(binding) == 1 and not binding[0].is_conditional:
            self.constants.literal[unique] = text
        else:
            self.constants.bound[unique] = text

    def _file(self, scope: Globals) -> File | None:
        """The file of a module. Each is looked at once in a slice."""
        if id(scope) not in self._files:
            self._files[id(scope)] = file_at(scope.get("__file__") or "", scope)
        return self._files[id(scope)]

    def label(self, scope: Globals, name: str) -> str:
        """``module:name``, or the name alone in the module of the function. Other modules of its
        package are named without the package, which may get another name."""
        if scope is self._home:
            return name
        top, module = _module_name(self._home).partition(".")[0], _module_name(scope)
        inside = module.removeprefix(top) if f"{module}.".startswith(f"{top}.") else module
        return f"{inside or '.'}:{name}"


def _module_name(scope: Globals) -> str:
    """Name of a module, also if it was started with ``python -m``."""
    name, spec = scope.get("__name__") or "", scope.get("__spec__")
    return spec.name if name == "__main__" and spec is not None else name


def _full(found: Import, scope: Globals) -> str:
    """Name of the module that a name is imported from."""
    try:
        relative = "." * found.level + found.module
        return importlib.util.resolve_name(relative, scope.get("__package__") or "")
    except (ImportError, ValueError):
        return ""


def _value(scope: Globals, chain: str) -> Any:
    """The value of a dotted name; ``None`` if it has none."""
    root, *path = chain.split(".")
    value = scope.get(root, getattr(builtins, root, None))
    for part in path:
        value = attribute(value, part)
    return value


def _subclasses(cls: type) -> list[type]:
    """All classes that derive from ``cls``, in the order of their names."""
    subclasses: list[type] = cls.__subclasses__()
    found = {each for sub in subclasses for each in (sub, *_subclasses(sub))}
    return sorted(found, key=lambda each: (each.__module__, each.__qualname__))


def bytecode(code: types.CodeType) -> object:
    """Instructions, constants and names, the same in all processes of a version of Python."""
    constants = [
        bytecode(x) if isinstance(x, types.CodeType)
        else sorted(map(repr, x)) if isinstance(x, frozenset) else x
        for x in code.co_consts
    ]  # fmt: skip
    return code.co_code, constants, code.co_names, code.co_varnames
