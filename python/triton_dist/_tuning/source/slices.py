"""Find the slice of a function: the statements that decide what the function computes.

The slice contains the statement that defines the function. For each name that a statement of the
slice reads, it also contains the statements that bind or change this name. They are in the same
module, or in the module from which the name is imported. To *follow* a value means to add its
statements to the slice. Libraries are compared by version, and code without source by bytecode.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

from triton_dist._tuning.source import libraries, modules
from triton_dist._tuning.source import runtime_values as values
from triton_dist._tuning.source.modules import File, Import, Statement, digest, parsed_file
from triton_dist._tuning.source.runtime_values import function_in, get_attribute, text_of
from triton_dist._tuning.values import (
    ConfigSpace,
    FunctionIdentity,
    codec,
    original,
    qualified_name,
)

Globals = dict[str, Any]
"""Globals of a module. If a module is imported again, its new functions have new globals."""
_EMPTY: dict[str, Any] = {}
_MAX_VISITS = 10_000
"""Maximum number of values inside one global that are followed."""


class SourceDependencies(NamedTuple):
    """Code and constants that functions depend on, by name.

    Attributes:
        digests: digests of the statements that bind or change a name, in an order that is equal in
            all processes. Names of other modules are ``module:name``.
        literal: globals whose value is written in the source, which is equal on all ranks.
        bound: values that functions store, such as closure cells, and globals that no statement or
            several statements bind. They are compared if they are equal on all ranks.
        uncounted: constants that are not compared, with the reason for each.
    """

    digests: dict[str, str]
    literal: dict[str, str]
    bound: dict[str, str]
    uncounted: dict[str, str]


def source_of(roots: Iterable[Callable[..., Any]]) -> SourceDependencies:
    """Return the statements and constants that the functions ``roots`` depend on."""
    return sources_of(roots, ())[0]


def sources_of(
    roots: Iterable[Callable[..., Any]],
    hooks: Iterable[Callable[..., Any]],
    ignore: Iterable[str] = (),
    snapshot: values.Snapshot | None = None,
    classes: Iterable[type] = (),
) -> tuple[SourceDependencies, SourceDependencies]:
    """Return the statements and constants that ``roots`` depend on, and those on which only
    ``hooks`` depend.

    Args:
        ignore: names of constants to leave out, such as ``"RANK"`` or ``"op.RANK"``.
        snapshot: texts that changeable values had at decoration.
        classes: classes of values that the roots are called with.
    """
    roots, hooks = list(roots), list(hooks)
    inner = [original(each) for each in (*roots, *hooks)]
    library = libraries.Libraries(each.__module__ for each in inner)
    home_globals = values.globals_of(inner[0]) if inner else {}
    source_slice = _Slice(library, snapshot or values.Snapshot(()), ignore, home_globals)
    for each in roots:
        source_slice.follow_root(each)
    source_slice.follow(list(classes))
    roots_source, source_slice.source = source_slice.source, SourceDependencies({}, {}, {}, {})
    for each in hooks:  # adds what was not found before
        source_slice.follow_root(each)
    return roots_source, source_slice.source


def identity_of(function: Callable[..., Any], tunables: Iterable[str]) -> FunctionIdentity:
    """Return the name, module and signature that identify a function in records. If several
    functions of a file are equal in these, the second and later functions also have a number."""
    identity, inner = FunctionIdentity.of(function, tunables), function_in(original(function))
    if inner is None:
        return identity
    file, suffix = parsed_file(inner.__code__.co_filename, inner.__globals__), ""
    if not file.compiles_to(inner.__code__):  # without source, the bytecode identifies the function
        suffix = f"code {digest(codec.encode_code(inner.__code__))[:8]}"
    elif num_earlier := file.num_earlier_definitions(inner.__code__):
        suffix = f"definition {num_earlier + 1}"
    return identity.with_suffix_in_signature(suffix) if suffix else identity


class _Slice:
    """Search for the statements and constants that functions depend on. The result is ``source``.
    ``home_globals`` are the globals of the module of the tuned function."""

    def __init__(
        self,
        library: libraries.Libraries,
        snapshot: values.Snapshot,
        ignore: Iterable[str],
        home_globals: Globals,
    ) -> None:
        self._library, self._snapshot = library, snapshot
        self._home_globals, self._ignore = home_globals, frozenset(ignore)
        self._followed: dict[tuple[object, int], object] = {}  # keeps objects, and thus their ids
        self._holder_ids: dict[str, int] = {}
        self._files: dict[int, File] = {}
        self._roots = set[tuple[File, int]]()
        self._names_set_at_run_time = set[str]()  # by other modules: ``module.step += 1``
        self.source = SourceDependencies({}, {}, {}, {})

    def follow_root(self, value: Any) -> None:
        """Follow what is tuned: a function, a partial, a bound method or a callable object."""
        if (function := function_in(original(value))) is not None:
            # The arguments of its tuner are compared by value. They may contain hooks, such as
            # ``prune_fn``, which are followed after the tuned function.
            code = function.__code__
            self._roots.add((self._file(function.__globals__, code), code.co_firstlineno))
        self.follow(value)
        self._record_stored(value, self._snapshot.state(value))

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
            if isinstance(item, values.PLAIN_TYPES) or not self._mark_followed(by_name, item):
                continue
            if isinstance(item, FunctionType):
                inner = [get_attribute(item, "__wrapped__"), get_attribute(item, "registry")]
                if self._library.defines(item):
                    self._is_library(item.__module__ or "")
                    inner += values.cells_of(item).values()
                else:
                    self._follow_code(item, by_name)
                # ``registry`` of functools.singledispatch is a mapping.
                pending += [x for x in inner if function_in(x) or isinstance(x, MappingProxyType)]
            elif isinstance(item, type):
                if not self._library.defines(item) and item.__module__ in sys.modules:
                    self._follow_code(item, by_name)
                    members = vars(item).values()
                    pending += [x for x in members if isinstance(x, values.COLLECTION_TYPES)]
            elif wrapped := [*values.wrapped_objects(item)]:
                pending += wrapped
                if not by_name:
                    self._record_configs(item)
            else:
                pending.append(type(item))
                if not by_name or isinstance(item, values.COLLECTION_TYPES):
                    pending += reversed(values.items_of(item))
                elif not self._library.defines(type(item)):
                    pending += values.attributes(item).values()

    def _follow_code(self, value: FunctionType | type, by_name: bool) -> None:
        """Follow a function or a class. With ``by_name``, or if it is at the top level of a module,
        follow the global that contains it."""
        function = value if isinstance(value, FunctionType) else None
        code, scope = get_attribute(function, "__code__"), values.globals_of(value)
        name = get_attribute(code, "co_qualname", value.__qualname__)
        file, top = self._file(scope, code), name.partition(".")[0]
        found = file.statements_at(code.co_firstlineno) if code else file.statements_of(top)
        if top.startswith("<"):  # a lambda
            top = min((x for each in found for x in each.binds), default=top)
            name = f"{top}.{name}"
        if by_name or (found and file is self._file(scope) and "<" not in name):
            self._follow_global(scope, top)
            return
        members = map(function_in, vars(value).values())
        functions = [function] if function else [*filter(None, members)]
        if found:
            # An inner function or class, a lambda, or a function in another cell of a notebook.
            number = file.num_earlier_definitions(code, found[0].line) if code else 0
            label = self._label(scope, f"{name}#{number}" if number else name)
            self._add_statements(label, found, scope, function)
        elif functions:
            data = [(x, text_of(y)) for x, y in vars(value).items() if not x.startswith("__")]
            body = codec.encode_code(code) if code else sorted(data, key=str)
            self.source.digests.setdefault(self._label(scope, name), f"bytecode {digest(body)}")
            self._follow_names(modules.names_in(code) if code else (), scope)
            self.follow(functions)
        for each in functions:
            self._record_stored(each, values.bound_values(each))

    def _follow_global(self, scope: Globals, name: str) -> None:
        """Follow a global: the statements that bind or change it, and functions and classes of
        other modules in its value."""
        if not self._mark_followed(name, scope) or self._library.has_module(_module_name(scope)):
            return
        file, value = self._file(scope), scope.get(name)
        if isinstance(value, ModuleType) or self._is_ignored(name):
            return
        found = [x for x in file.statements_of(name) if (file, x.tuned_line) not in self._roots]
        imports = [each.imports[name] for each in found if name in each.imports]
        if not found and name in scope:
            imports = [each._replace(attribute=name) for each in file.star_imports]
        for each in imports:
            self._follow_import(each, scope)
        found = [each for each in found if name not in each.imports]
        if found:
            self._add_statements(self._label(scope, name), found, scope)
            if not imports:
                self._record_constant(scope, name, found)
        if found or imports:
            self.follow(value, by_name=True)
        elif name in scope and not name.startswith("__") and (text := text_of(value)) is not None:
            self._record(self.source.bound, name, text, scope)
        elif not isinstance(value, values.MUTABLE_CONTAINER_TYPES):
            self.follow(value)

    def _add_statements(
        self,
        label: str,
        found: list[Statement],
        scope: Globals,
        function: FunctionType | None = None,
    ) -> None:
        """Add statements to the slice, and follow the names that they read. Of a statement that
        contains an inner ``function``, follow only the names in the function."""
        digests = [each.digest for each in found]
        before = self.source.digests.get(label, "").split()
        if before and before != digests:  # several lambdas may have one label
            digests = sorted({*before, *digests})
        self.source.digests[label] = " ".join(digests)
        for each in found:
            if function is not None:
                names = modules.names_in(function.__code__, each.inner_imports)
                cells = values.cells_of(function)
                reads = {x for x in each.reads if x.partition(".")[0] in names}
                self._follow_names(reads, scope, cells, each.inner_imports)
            elif self._mark_followed("statement", each):
                self._follow_names(each.reads, scope, {}, each.inner_imports)

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
        for chain in sorted(chains):
            root, *path = chain.split(".")
            value = cells.get(root, scope.get(root))
            if root in imports:
                self._follow_import(imports[root], scope, path, load=True)
            elif isinstance(value, ModuleType):
                name = ".".join([root, *path[:1]])
                if path and (found := file.statements_of(name)):
                    # This module sets ``module.name`` of another module.
                    self._add_statements(self._label(scope, name), found, scope)
                    if name in file.changed_later:
                        self._names_set_at_run_time.add(path[0])
                self._follow_attribute(value, path)
            elif path == ["__subclasses__"] and isinstance(value, type):
                self.follow(sorted(value.__subclasses__(), key=qualified_name))
            elif root == "*":  # globals()[name]
                self._follow_names(scope, scope)
            if root not in cells:
                self._follow_global(scope, root)

    def _follow_import(
        self, found: Import, scope: Globals, path: Iterable[str] = (), load: bool = False
    ) -> None:
        """Follow an imported name and its attributes ``path``. With ``load``, import modules that
        are not imported yet."""
        full = found.full_name(scope.get("__package__"))
        names = [found.attribute] if found.attribute else []
        if not self._is_library(full) and (module := _module(full, load)) is not None:
            self._follow_attribute(module, [*names, *path], load)

    def _follow_attribute(self, module: ModuleType, path: list[str], load: bool = False) -> None:
        """Follow an attribute of a module: ``["a", "b"]`` for ``module.a.b``."""
        names = [*module.__name__.split("."), *path]
        if names[:2] == ["torch", "ops"] and len(names) > 3:
            # torch has no public function that returns a custom op's function. This table exists
            # since torch 2.4.
            known = get_attribute(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
            self.follow(known.get("::".join(names[2:4])))
        elif not self._is_library(module.__name__) and path:
            value = get_attribute(module, path[0])
            if value is None and load:
                value = _module(f"{module.__name__}.{path[0]}", load)
            if isinstance(value, ModuleType):
                self._follow_attribute(value, path[1:], load)
            else:
                is_known = path[0] in vars(module) or path[0] == "*"
                self._follow_names([path[0] if is_known else "__getattr__"], vars(module))

    def _is_library(self, module: str) -> bool:
        """Return whether a module belongs to a library. If so, record the version of the library,
        which is compared instead of the source."""
        package, is_library = module.partition(".")[0], self._library.has_module(module)
        if is_library and (version := libraries.version_of(package)):
            self.source.digests[f"library {package}"] = version
        return is_library

    def _record_constant(self, scope: Globals, name: str, found: list[Statement]) -> None:
        """Record the present value of a global. The statements that bind it decide the kind."""
        source, value = self.source, _constexpr_value(scope.get(name))
        kinds = [each.constant_kind for each in found if name in each.binds]
        is_changed = name in self._file(scope).changed_later | self._names_set_at_run_time
        if isinstance(value, values.MUTABLE_CONTAINER_TYPES) and "marked" not in kinds:
            return
        if (text := text_of(value)) is None:
            return
        if "marked" in kinds or (kinds == ["literal"] and not is_changed):
            self._record(source.literal, name, text, scope)
        elif "computed" in kinds or is_changed:
            self._record(source.uncounted, name, "it is computed when the program runs", scope)
        elif "derived" not in kinds:
            self._record(source.bound, name, text, scope)

    def _record_configs(self, value: Any) -> None:
        """Record the configs of a tuned function or kernel, or the arguments of a partial."""
        configs, space = get_attribute(value, "configs"), get_attribute(value, "config_space")
        stored = values.bound_values(value) if isinstance(value, functools.partial) else {}
        if isinstance(space, ConfigSpace):
            # Follow a function that returns the configs instead of calling it, because the tuned
            # function may never be called.
            configs = space.config_fn or [space.digest, *space.functions, *space.classes]
        if configs:
            configs = tuple(configs) if isinstance(configs, list) else configs
            stored[f"configs of {qualified_name(value)}"] = configs
        self._record_stored(value, stored)

    def _record_stored(self, holder: Any, stored: dict[str, Any]) -> None:
        """Record the values that ``holder`` stores, by name: data as constants. Follow code in the
        values."""
        for name, value in stored.items():
            short, value = name.rpartition(".")[2], _constexpr_value(value)
            if short == "__class__" or value is get_attribute(holder, "__wrapped__"):
                self.follow(value)
            elif short in values.reassigned_cells(holder):
                self._record(self.source.uncounted, name, "it changes as the function runs", holder)
            elif not self._is_ignored(name):
                text = self._snapshot.text(value)
                if text is None and not isinstance(value, values.MUTABLE_CONTAINER_TYPES):
                    text = values.describe(value)
                if text is not None:
                    self._record(self.source.bound, name, text, holder)
                elif not isinstance(value, ModuleType):  # names read from a module are followed
                    reason = f"a {type(value).__name__}, whose content may change"
                    self._record(self.source.uncounted, name, reason, holder)
                self.follow(value)

    def _record(self, kind: dict[str, str], name: str, text: str, holder: object) -> None:
        """Record a constant. Its name has a number if another ``holder`` (a function or a module)
        has a constant of this name."""
        unique, number = name, 1
        while self._holder_ids.setdefault(unique, id(holder)) != id(holder):
            number += 1
            unique = f"{name}#{number}"
        kind[unique] = text

    def _is_ignored(self, name: str) -> bool:
        """Return whether ``name`` is to be ignored. If so, record this."""
        is_ignored = not self._ignore.isdisjoint([name, name.rpartition(".")[2]])
        if is_ignored:
            self.source.uncounted[name] = "ignored"
        return is_ignored

    def _mark_followed(self, kind: object, value: object) -> bool:
        """Note that ``value`` is followed. Return ``False`` if it was noted before."""
        key = kind, id(value)
        return key not in self._followed and self._followed.setdefault(key, value) is value

    def _file(self, scope: Globals, code: CodeType | None = None) -> File:
        """Return the file of ``code``, or of the module ``scope``; empty if edited after the
        import."""
        key = id(code or scope)
        if key not in self._files:
            path = code.co_filename if code else scope.get("__file__") or ""
            file, loader = parsed_file(path, scope), type(scope.get("__loader__"))
            # pytest rewrites the asserts of test modules, so their bytecode differs from the file.
            contents = [] if loader.__module__.startswith("_pytest.") else [*scope.values()]
            functions = filter(None, map(function_in, contents))
            codes = [code] if code else [each.__code__ for each in functions]
            is_equal = all(file.compiles_to(x) for x in codes if x.co_filename == path)
            self._files[key] = file if is_equal else modules.EMPTY_FILE
        return self._files[key]

    def _label(self, scope: Globals, name: str) -> str:
        """Return ``module:name``, without the package of the tuned function, which may be renamed,
        or ``name`` alone for the module of the tuned function."""
        top, module = _module_name(self._home_globals).partition(".")[0], _module_name(scope)
        relative = module.removeprefix(top) if f"{module}.".startswith(f"{top}.") else module
        return name if scope is self._home_globals else f"{relative or '.'}:{name}"


def _constexpr_value(value: Any) -> Any:
    return value.value if type(value).__name__ == "constexpr" else value


def _module(name: str, load: bool) -> ModuleType | None:
    if load and name not in sys.modules:
        with suppress(Exception, SystemExit):  # the module cannot run here
            importlib.import_module(name)
    return sys.modules.get(name)


def _module_name(scope: Globals) -> str:
    """Return the importable name of a module, even if it was started with ``python -m``."""
    name, spec = scope.get("__name__") or "", scope.get("__spec__")
    return spec.name if name == "__main__" and spec is not None else name
