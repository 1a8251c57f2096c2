"""Find the slice of a function: the statements that decide what the function computes.

The slice contains the statement that defines the function. For each name that a statement of the
slice reads, it also contains the statements that bind or change this name. They are in the same
module, or in the module from which the name is imported. To *follow* a value means to add its
statements to the slice. Libraries are compared by version, and code without source by bytecode.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from triton_dist._tuning.source import libraries, modules, runtime_values
from triton_dist._tuning.source.modules import File, Import, Statement, digest, parsed_file
from triton_dist._tuning.source.runtime_values import (
    COLLECTION_TYPES,
    MUTABLE_CONTAINER_TYPES,
    cells_of,
    describe,
    function_in,
    get_attribute,
    text_of,
)
from triton_dist._tuning.values import ConfigSpace, codec, original, qualified_name

Globals = dict[str, Any]
"""Globals of a module. If a module is imported again, its new functions have new globals."""
_EMPTY: dict[str, Any] = {}
_REGISTRY = types.MappingProxyType
"""Type of ``registry`` of functools.singledispatch."""
_MAX_VISITS = 10_000
"""Maximum number of values inside one global that are followed."""
_UNKNOWN = ast.Await(ast.Constant(None))
_RUN_TIME_EXPRESSIONS = {ast.Call, ast.Attribute, ast.Subscript, ast.Await, ast.comprehension}
"""Types of syntax nodes: the value of an expression that contains one may differ by process."""


class SourceDependencies(NamedTuple):
    """Code and constants that functions depend on, by name.

    There are three kinds of constants, because some values may differ between ranks, or between two
    starts of a program, although the code is equal.
    """

    digests: dict[str, str]
    """Digests of the statements that bind or change a name, in an order that is equal in all
    processes. Names of other modules are ``module:name``."""
    literal: dict[str, str]
    """Globals whose value is written in the source, which is equal on all ranks."""
    bound: dict[str, str]
    """Values that functions store, such as closure cells. Also globals that no statement binds, or
    that several or conditional statements bind. They are compared if they are equal on all ranks.
    """
    uncounted: dict[str, str]
    """Constants that are not compared, with the reason for each."""


class Slice:
    """Search for the statements and constants that functions depend on. The result is ``source``.

    Labels of statements are ``module:name``; without ``module`` for the module whose globals are
    ``home_globals``. ``ignore`` has names of constants to leave out, such as ``"RANK"`` or
    ``"op.RANK"``.
    """

    def __init__(
        self,
        library: libraries.Libraries,
        snapshot: runtime_values.Snapshot,
        ignore: Iterable[str],
        home_globals: Globals,
    ) -> None:
        self._library, self._snapshot = library, snapshot
        self._home_globals, self._ignore = home_globals, frozenset(ignore)
        self._followed: dict[tuple[object, int], object] = {}  # keeps objects, and thus their ids
        self._holder_ids: dict[str, int] = {}
        self._files: dict[int, File] = {}
        self._undecorated: dict[Statement, Statement] = {}
        self._names_set_at_run_time = set[str]()  # by other modules: ``module.step += 1``
        self.source = SourceDependencies({}, {}, {}, {})

    def follow_root(self, value: Any) -> None:
        """Follow what is tuned: a function, a partial, a bound method or a callable object."""
        if (function := function_in(original(value))) is not None:
            # Omit the tuner's decorators of the function, because their arguments are compared by
            # value. The statement may also contain hooks, such as ``prune_fn``. The tuned function
            # is followed before them.
            code = function.__code__
            file, line = self._file(function.__globals__, code), code.co_firstlineno
            undecorated = {
                each: each.without_tuner[line]
                for each in file.statements
                if line in each.without_tuner
            }
            self._undecorated = undecorated | self._undecorated
        self.follow(value)
        for name, item in self._snapshot.state(value).items():
            self._record_bound(name, item, value)

    def follow_code(self, value: types.FunctionType | type, by_name: bool) -> None:
        """Follow a function or a class by its definition. With ``by_name``, or if a statement of
        the module defines it, follow the global that contains it."""
        function = value if isinstance(value, types.FunctionType) else None
        code, scope = get_attribute(function, "__code__"), runtime_values.globals_of(value)
        name = get_attribute(code, "co_qualname", value.__qualname__)
        label, top = self.label(scope, name), name.partition(".")[0]
        file, module_file = self._file(scope, code), self._file(scope)
        in_module = file is module_file and file.statements_of(top)
        if by_name and top.startswith("<"):  # a lambda: find the global that contains it
            top = next((x for x, each in scope.items() if each is value), top)
        if by_name or (in_module and "<locals>" not in name):
            self.follow_global(scope, top)
            return
        functions = [function] if function else [*map(function_in, vars(value).values())]
        found, cells = list[Statement](), cells_of(function) if function else {}
        if file.lines and (function or in_module):
            # An inner function or class, or a function in another cell of a notebook.
            found = file.definitions(name, code)
            self._add_statements(label, found, scope, cells)
        elif any(functions):
            data = [(x, text_of(y)) for x, y in vars(value).items() if not x.startswith("__")]
            body = codec.encode_code(code) if function else sorted(data, key=str)
            self.source.digests.setdefault(label, f"bytecode {digest(body)}")
            inner = codec.nested_code(code) if function else ()
            self._follow_names({x for _, each in inner for x in each.co_names}, scope)
            self.follow(functions)
        for each in filter(None, functions):
            self._record_closure(each, {x for statement in found for x in statement.nonlocals})

    def follow_global(self, scope: Globals, name: str) -> None:
        """Follow a global: the statements that bind or change it, and functions and classes of
        other modules in its value."""
        if not self._mark_followed(name, scope) or self._library.has_module(_module_name(scope)):
            return
        file, value = self._file(scope), scope.get(name)
        if isinstance(value, types.ModuleType) or self._is_ignored(name):
            return
        found = [self._undecorated.get(each, each) for each in file.statements_of(name)]
        imports = [each.imports[name] for each in found if name in each.imports]
        if not found and name in scope:
            imports = [each._replace(attribute=name) for each in file.star_imports]
        for each in imports:
            self._follow_import(each, scope)
        found = [each for each in found if name not in each.imports]
        if found:
            self._add_statements(self.label(scope, name), found, scope)
            if not imports:
                self._record_constant(scope, file, name, found)
        if found or imports:
            self.follow(value, by_name=True)
        elif name in scope and not name.startswith("__") and (text := text_of(value)) is not None:
            self.source.bound[self._unique_name(name, scope)] = text
        elif not isinstance(value, MUTABLE_CONTAINER_TYPES):
            self.follow(value)

    def follow(self, value: Any, by_name: bool = False) -> None:
        """Follow the functions and classes in ``value``, and the classes of the data in it.

        Args:
            by_name: follow the globals that have the names of the functions and classes, and do
                not follow closures, because those in a global may differ by rank.
        """
        pending = [value]
        for _ in range(_MAX_VISITS):
            if not pending:
                break
            item = pending.pop()
            if isinstance(item, runtime_values.PLAIN_TYPES) or not self._mark_followed(
                by_name, item
            ):
                continue
            if isinstance(item, types.FunctionType):
                inner = [get_attribute(item, "__wrapped__"), get_attribute(item, "registry")]
                if self._library.defines(item):
                    self._is_library(item.__module__ or "")
                    inner += cells_of(item).values()
                else:
                    self.follow_code(item, by_name)
                pending += [x for x in inner if function_in(x) or isinstance(x, _REGISTRY)]
            elif isinstance(item, type):
                if not self._library.defines(item) and item.__module__ in sys.modules:
                    self.follow_code(item, by_name)
                    pending += [x for x in vars(item).values() if isinstance(x, COLLECTION_TYPES)]
            elif wrapped := [*runtime_values.wrapped_objects(item)]:
                pending += wrapped
                if not by_name:
                    self._record_configs(item)
            else:
                pending.append(type(item))
                if not by_name or isinstance(item, COLLECTION_TYPES):
                    pending += reversed(runtime_values.items_of(item))
                elif not self._library.defines(type(item)):
                    pending += runtime_values.attributes(item).values()

    def _mark_followed(self, kind: object, value: object) -> bool:
        """Note that ``value`` is followed. Return ``False`` if it was noted before."""
        key = kind, id(value)
        return key not in self._followed and self._followed.setdefault(key, value) is value

    def _record_configs(self, value: Any) -> None:
        if isinstance(value, functools.partial):
            self._record_closure(value)
        configs, space = get_attribute(value, "configs"), get_attribute(value, "config_space")
        unique = self._unique_name(f"configs of {qualified_name(value)}", value)
        if isinstance(configs, list) and configs and all(map(codec.is_triton_config, configs)):
            self.source.bound[unique] = codec.to_json(
                codec.encode(configs, with_bound_values=False)
            )
        if isinstance(space, ConfigSpace) and space.config_fn is not None:
            # Follow the function that returns the configs instead of calling it, because the tuned
            # function may never be called.
            self.follow(space.config_fn)
        elif isinstance(space, ConfigSpace):
            self.source.bound[unique] = space.digest
            self.follow([*space.functions, *space.classes])

    def _record_closure(self, value: Any, rebound: Iterable[str] = ()) -> None:
        """Record the closure cells and defaults of a function, or the arguments of a partial.

        Cells with names in ``rebound`` are assigned by the function itself.
        """
        for name, item in runtime_values.bound_values(value).items():
            short = name.rpartition(".")[2]
            if short == "__class__" or item is get_attribute(value, "__wrapped__"):
                self.follow(item)
            elif short in rebound:
                unique = self._unique_name(name, value)
                self.source.uncounted[unique] = "it changes as the function runs"
            else:
                self._record_bound(name, item, value)

    def _record_bound(self, name: str, value: Any, holder: object) -> None:
        """Record a value that ``holder`` stores: data as a constant. Follow code in the value."""
        if self._is_ignored(name):
            return
        name, kind = self._unique_name(name, holder), type(value).__name__
        value = value.value if kind == "constexpr" else value
        text = self._snapshot.text(value)
        if text is None and not isinstance(value, MUTABLE_CONTAINER_TYPES):
            text = describe(value)
        if text is not None:
            self.source.bound[name] = text
        elif isinstance(value, MUTABLE_CONTAINER_TYPES):
            self.source.uncounted[name] = f"a {kind}, which may change"
        elif not isinstance(value, types.ModuleType):  # names read from a module are followed
            self.source.uncounted[name] = f"a {kind}, compared by its class"
        self.follow(value)

    def _is_ignored(self, name: str) -> bool:
        """Return whether ``name`` is to be ignored. If so, record this."""
        ignored = name in self._ignore or name.rpartition(".")[2] in self._ignore
        if ignored:
            self.source.uncounted[name] = "ignored"
        return ignored

    def _unique_name(self, name: str, holder: object) -> str:
        """Return ``name``; with a number if another ``holder`` (a function or a module) uses it."""
        unique, number = name, 1
        while self._holder_ids.setdefault(unique, id(holder)) != id(holder):
            number += 1
            unique = f"{name}#{number}"
        return unique

    def _add_statements(
        self, label: str, found: list[Statement], scope: Globals, cells: Globals = _EMPTY
    ) -> None:
        digests = [each.digest for each in found]
        before = self.source.digests.get(label, "").split()
        if before and before != digests:  # several inner functions may have one name
            digests = sorted({*before, *digests})
        self.source.digests[label] = " ".join(digests)
        for each in found:
            # Several functions may be created by one statement, with different cells.
            if self._mark_followed("statement", each) or cells:
                self._follow_names(each.reads, scope, cells, each.inner_imports)

    def _follow_names(
        self,
        chains: Iterable[str],
        scope: Globals,
        cells: Globals = _EMPTY,
        imports: Mapping[str, Import] = _EMPTY,
    ) -> None:
        """Follow the dotted names ``chains`` that a statement reads.

        ``cells`` are followed elsewhere. ``imports`` are names that functions in the statement
        import when they run; they are imported now, if possible.
        """
        file = self._file(scope)
        for each in imports.values():
            self._follow_import(each, scope, load=True)
        for chain in sorted(chains):
            root, *path = chain.split(".")
            value = cells.get(root, scope.get(root))
            if root in imports:
                self._follow_import(imports[root], scope, path, load=True)
            elif isinstance(value, types.ModuleType):
                if path and (found := file.statements_of(chain)):
                    # This module sets ``module.name`` of another module.
                    self._add_statements(self.label(scope, chain), found, scope)
                    if chain in file.assigned_later:
                        self._names_set_at_run_time.add(path[-1])
                self._follow_attribute(value, path)
            elif path == ["__subclasses__"] and isinstance(value, type):
                self.follow(sorted(value.__subclasses__(), key=qualified_name))
            elif root == "*":  # globals()[name]
                self._follow_names(scope, scope)
            if root not in cells:
                self.follow_global(scope, root)

    def _follow_attribute(self, module: types.ModuleType, path: list[str]) -> None:
        names = [*module.__name__.split("."), *path]
        if names[:2] == ["torch", "ops"] and len(names) > 3:
            # torch has no public function that returns a custom op's function. This table exists
            # since torch 2.4.
            known = get_attribute(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
            self.follow(known.get("::".join(names[2:4])))
        elif not self._is_library(module.__name__) and path:
            value = get_attribute(module, path[0])
            if isinstance(value, types.ModuleType):
                self._follow_attribute(value, path[1:])
            else:
                known = path[0] in vars(module) or path[0].endswith("*")
                self._follow_names([path[0] if known else "__getattr__"], vars(module))

    def _follow_import(
        self, found: Import, scope: Globals, path: Iterable[str] = (), load: bool = False
    ) -> None:
        """Follow an imported name and its attributes ``path``. With ``load``, import the module if
        possible."""
        full = found.full_name(scope.get("__package__"))
        if self._is_library(full):
            return
        names = [found.attribute] if found.attribute else []
        for each in (full, *(f"{full}.{name}" for name in names)) if load else ():
            if not hasattr(sys.modules.get(full), found.attribute or "__name__"):
                with suppress(Exception, SystemExit):  # the module cannot run here
                    importlib.import_module(each)
        if full in sys.modules:
            self._follow_attribute(sys.modules[full], [*names, *path])

    def _is_library(self, module: str) -> bool:
        """Return whether a module belongs to a library. If so, record the version of the library,
        which is compared instead of the source."""
        package, is_library = module.partition(".")[0], self._library.has_module(module)
        if is_library and (version := libraries.version_of(package)):
            self.source.digests[f"library {package}"] = version
        return is_library

    def _record_constant(
        self, scope: Globals, file: File, name: str, found: list[Statement]
    ) -> None:
        """Record the present value of a global as a constant. Its statements decide the kind."""
        value: Any = scope.get(name)
        binding = [each for each in found if name in each.binds]
        nodes: list[Any] = [each.values.get(name, _UNKNOWN) for each in binding]
        is_marked = any(
            isinstance(x, ast.Call) and file.is_from_triton_dist(x, "constant") for x in nodes
        )
        if type(value).__name__ == "constexpr":
            value = value.value
            nodes = [next(iter(getattr(each, "args", ())), _UNKNOWN) for each in nodes]
        text = (
            text_of(value) if is_marked or not isinstance(value, MUTABLE_CONTAINER_TYPES) else None
        )
        if text is None:
            return
        source, unique = self.source, self._unique_name(name, scope)
        kinds = {type(part) for node in nodes for part in ast.walk(node)}
        later = self._names_set_at_run_time | modules.first_parts(file.assigned_later)
        if is_marked:
            source.literal[unique] = text
        elif name in later or kinds & _RUN_TIME_EXPRESSIONS:
            source.uncounted[unique] = "it is computed when the program runs"
        elif ast.Name not in kinds:  # the constants that an expression names are recorded instead
            is_fixed = len(binding) == 1 and not binding[0].is_conditional
            (source.literal if is_fixed else source.bound)[unique] = text

    def _file(self, scope: Globals, code: types.CodeType | None = None) -> File:
        """Return the file of ``code``, or of the module ``scope``; empty if edited after the
        import."""
        key = id(code or scope)
        if key not in self._files:
            path = code.co_filename if code else scope.get("__file__") or ""
            functions = filter(None, map(function_in, [*scope.values()]))
            codes = [code] if code else [each.__code__ for each in functions]
            file, loader = parsed_file(path, scope), type(scope.get("__loader__"))
            # pytest rewrites the asserts of test modules, so their bytecode differs from the file.
            is_rewritten = not code and loader.__module__.startswith("_pytest.")
            is_equal = is_rewritten or all(
                file.compiles_to(x) for x in codes if x.co_filename == path
            )
            self._files[key] = file if is_equal else modules.EMPTY_FILE
        return self._files[key]

    def label(self, scope: Globals, name: str) -> str:
        """Return ``module:name``, or ``name`` alone for the module of the tuned function.

        Other modules of the same package are named without the package, which may be renamed.
        """
        if scope is self._home_globals:
            return name
        top, module = _module_name(self._home_globals).partition(".")[0], _module_name(scope)
        relative = module.removeprefix(top) if f"{module}.".startswith(f"{top}.") else module
        return f"{relative or '.'}:{name}"


def _module_name(scope: Globals) -> str:
    """Return the importable name of a module, even if it was started with ``python -m``."""
    name, spec = scope.get("__name__") or "", scope.get("__spec__")
    return spec.name if name == "__main__" and spec is not None else name
