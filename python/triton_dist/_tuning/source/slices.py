"""The slice of a function: the statements that decide what it computes.

That is the statement that contains it, and for each name that a statement of the slice reads, the
statements that bind or change that name, in its module or the one that it is imported from.
Libraries count by their versions. What there is no source of counts by its bytecode.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from triton_dist._tuning.source import libraries
from triton_dist._tuning.source.constants import text_of
from triton_dist._tuning.source.given import (
    COLLECTIONS,
    CONTAINERS,
    PLAIN,
    Snapshot,
    attribute,
    attributes,
    cells_of,
    function_in,
    held_by,
    inside,
    is_code,
    items_of,
)
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
from triton_dist._tuning.values import ConfigSpace, codec, original, qualified_name

Globals = dict[str, Any]
"""Globals of a module. Two modules of one name, as after a new import, have different ones."""
_NONE: dict[str, Any] = {}
_MOST_VISITS = 10_000
"""Values of one global that are looked into."""
_LOOK_UPS = (ast.Call, ast.Attribute, ast.Subscript, ast.Await, ast.comprehension)
"""Parts of expressions whose value may differ by process."""


class Source(NamedTuple):
    """Code and constants that functions depend on, by name.

    Ranks and starts may differ in some constants and mean the same function, so there are three
    kinds of them.
    """

    digests: dict[str, str]
    """Digests of the statements that bind or change a name, in an order that is the same in all
    processes. Names of other modules are ``module:name``."""
    literal: dict[str, str]
    """Globals whose values are in the source. All ranks have the same source."""
    bound: dict[str, str]
    """Values that a function was given when it was made. They count if all ranks have the same."""
    uncounted: dict[str, str]
    """Constants that do not count, each with the reason."""


class Slice:
    """Finds statements and constants.

    Args:
        home: globals of the module of the function; labels of its statements are names alone.
        ignore: names of constants that do not count, such as ``"RANK"`` or ``"op.RANK"``.
    """

    def __init__(
        self,
        library: libraries.Libraries,
        snapshot: Snapshot,
        ignore: Iterable[str],
        home: Globals,
    ) -> None:
        self.source = Source({}, {}, {}, {})
        self.digests, self._library, self._snapshot = self.source.digests, library, snapshot
        self._home, self._ignore = home, frozenset(ignore)
        self._visited: set[Any] = set()
        self._followed: dict[tuple[str, int], object] = {}  # keeps objects, and with them their ids
        self._holders: dict[str, int] = {}
        self._files: dict[int, File | None] = {}
        self._loaded: dict[int, bool] = {}
        self._tuned: dict[Statement, Statement] = {}
        self._changing: set[tuple[int, str]] = set()

    def root(self, value: Any) -> None:
        """Follow what is tuned: a function, a partial, a bound method or a callable object."""
        function = function_in(original(value))
        file, around = (None, None) if function is None else _place_of(function)
        # The tuned function is the first root: hooks may be in the same statement. The arguments of
        # its tuner decorators count by value.
        if file and around and function and around not in self._tuned:
            self._tuned[around] = file.without_tuner(function.__code__.co_firstlineno)
        self.follow(value)
        for name, item in self._snapshot.state(value).items():
            self._bind(name, item, value)
        if isinstance(value, functools.partial):
            self.root(value.func)

    def function(self, function: types.FunctionType) -> str:
        """Follow a function by its code; returns its label."""
        scope, code = function.__globals__, function.__code__
        name = getattr(code, "co_qualname", function.__qualname__)
        label, top = self.label(scope, name), name.partition(".")[0]
        file, around = _place_of(function)
        if around is not None and around.defines == top and "<locals>" not in name:
            if self._file(scope) is file:
                self.name(scope, top)
                return self.label(scope, top)
            self._enter(label, [around], scope)  # in another cell of a notebook
        elif around is not None and file is not None:
            found = file.definition(code) or around
            self._enter(label, [found], scope, cells_of(function))
            self._closure(function, found.nonlocals)
        elif label not in self.digests:
            self.digests[label] = f"bytecode {digest([bytecode(code)])}"
            self._follow({x for _, each in with_inner(code) for x in each.co_names}, scope)
            self._closure(function)
        return label

    def cls(self, cls: type) -> str:
        """Follow a class; returns its label."""
        module = sys.modules.get(cls.__module__)
        if module is None or self._library.has_module(cls.__module__):
            return f"{cls.__module__}.{cls.__qualname__}"
        methods = [x for x in vars(cls).values() if isinstance(x, types.FunctionType)]
        scope, name, top = vars(module), cls.__qualname__, cls.__qualname__.partition(".")[0]
        file, label = self._file(scope), self.label(scope, name)
        if file is None or not file.of(top) or not self._is_loaded(scope, file, cls):
            functions = [x for x in vars(cls).values() if function_in(x) is not None]
            if label not in self.digests and functions:
                self.digests[label] = f"bytecode {digest(_texts_in(cls))}"
                self.follow(functions)
        elif "<locals>" not in name:
            self.name(scope, top)
            return self.label(scope, top)
        elif label not in self.digests:
            self._enter(label, file.definitions(lambda x, _: x == name), scope)
            for each in methods:
                self._closure(each)
        return label

    def name(self, scope: Globals, name: str) -> None:
        """Follow a global: the statements that bind or change it, and code that other modules have
        put into its value."""
        if (id(scope), name) in self._visited or self._library.has_module(_module_name(scope)):
            return
        self._visited.add((id(scope), name))
        file, value = self._file(scope), scope.get(name)
        if isinstance(value, types.ModuleType) or self._ignores(name):
            return
        found = [] if file is None else [self._tuned.get(each, each) for each in file.of(name)]
        imports = [each.imports[name] for each in found if name in each.imports]
        if file is not None and not found:
            there = [
                sys.modules.get(each.full_name(scope.get("__package__"))) for each in file.stars
            ]
            imports = [Import(x.__name__, 0, name) for x in there if x and name in vars(x)][-1:]
        for each in imports:
            self._imported(each, scope)
        found = [each for each in found if name not in each.imports]
        if any(
            self._library.has_module(each.full_name(scope.get("__package__"))) for each in imports
        ):
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
        self.follow(value, scope)

    def follow(self, value: Any, home: Globals | None = None) -> None:
        """Follow the code that ``value`` is or holds, and the classes of data in it.

        Args:
            home: globals of the module whose statements make ``value``. Code of this module is
                followed already. Only the code of other modules is followed, which they
                registered or put in the place of the module's own.
        """
        seen, ahead = set[int](), [value]
        while ahead and len(seen) < _MOST_VISITS:
            item = ahead.pop()
            if id(item) in seen or isinstance(item, PLAIN):
                continue
            seen.add(id(item))
            if home is None and not self._is_new("value", item):
                continue
            if isinstance(item, types.FunctionType):
                ahead += self._of_function(item, home)
            elif isinstance(item, type):
                if home is None or item.__module__ != home.get("__name__"):
                    self.cls(item)
                if home is not None and not self._library.has(item):
                    ahead += [x for x in vars(item).values() if isinstance(x, COLLECTIONS)]
            elif isinstance(item, functools.partial):
                for name, each in held_by(item).items() if home is None else ():
                    self._bind(name, each, item)
                ahead += [*item.args, *item.keywords.values()] if home is not None else ()
                ahead.append(item.func)
            elif isinstance(item, types.MethodType):
                is_class = isinstance(item.__self__, type)
                keep = is_class or home is not None
                ahead += [item.__func__, item.__self__ if keep else type(item.__self__)]
            elif (inner := inside(item)) is not None:
                ahead += [inner, *([item.fset] if isinstance(item, property) else ())]
                if home is None:
                    self._configs(item)
            else:
                ahead.append(type(item))
                if home is None or isinstance(item, COLLECTIONS):
                    ahead += reversed(items_of(item).values())
                elif not self._library.has(type(item)):
                    ahead += attributes(item).values()

    def _is_new(self, kind: str, value: object) -> bool:
        key = kind, id(value)
        return key not in self._followed and self._followed.setdefault(key, value) is value

    def _of_function(self, function: types.FunctionType, home: Globals | None) -> list[Any]:
        """Follow a function; returns functions that it wraps or chooses from."""
        inner = [attribute(function, "__wrapped__"), attribute(function, "registry")]
        if self._library.has_function(function):
            self.version(function.__module__ or "")
            inner += cells_of(function).values()
        elif home is None:
            self.function(function)
        elif function.__globals__ is not home:  # values in a closure may differ by rank
            full = getattr(function.__code__, "co_qualname", function.__qualname__)
            self.name(function.__globals__, full.partition(".")[0])
        kinds = (types.FunctionType, types.MappingProxyType)  # the latter of singledispatch
        return [x for x in inner if isinstance(x, kinds) or function_in(x) is not None]

    def _configs(self, value: Any) -> None:
        """Note the configs of a tuned function or a Triton kernel that is not a global."""
        configs, space = attribute(value, "configs"), attribute(value, "config_space")
        unique = self._unique(f"configs of {qualified_name(value)}", value)
        if isinstance(configs, list) and configs and all(map(codec.is_triton_config, configs)):
            self.source.bound[unique] = codec.text(codec.encode(configs, binding=False))
        if isinstance(space, ConfigSpace) and space.maker is not None:
            self.follow(space.maker)  # not called: perhaps the function never is
        elif isinstance(space, ConfigSpace):
            self.source.bound[unique] = space.digest
            self.follow([*space.functions, *space.classes])

    def _closure(self, function: types.FunctionType, rebound: Iterable[str] = ()) -> None:
        """Note what an inner function binds: closure cells and defaults."""
        for name, value in held_by(function).items():
            short = name.rpartition(".")[2]
            if short == "__class__" or value is attribute(function, "__wrapped__"):
                self.follow(value)
            elif short in rebound:
                unique = self._unique(name, function)
                self.source.uncounted[unique] = "it changes as the function runs"
            else:
                self._bind(name, value, function)

    def _bind(self, name: str, value: Any, holder: object) -> None:
        """Note a value that ``holder`` binds: its data is a constant, its code is followed."""
        if self._ignores(name):
            return
        name = self._unique(name, holder)
        if type(value).__name__ == "constexpr":
            value = value.value
        text = self._snapshot.text(value)
        if text is None and not isinstance(value, CONTAINERS):
            with suppress(TypeError):
                text = text_of(value)
        kind, items = type(value).__name__, items_of(value)
        if text is not None:
            self.source.bound[name] = text
        elif isinstance(value, CONTAINERS):
            self.source.uncounted[name] = f"a {kind}, which may change"
        elif items:
            for each, item in items.items() if self._is_new("items", value) else ():
                self._bind(f"{name}.{each}", item, value)
        elif is_code(value):
            self.source.bound[name] = self._name_of(value)
        elif not isinstance(value, types.ModuleType):  # what is read from a module is followed
            self.source.uncounted[name] = f"a {kind}, of which the class counts"
        self.follow(value)

    def _name_of(self, value: Any) -> str:
        """Return a name for code that is the same in all processes."""
        inner = function_in(value) or value
        if isinstance(inner, types.FunctionType) and not self._library.has_function(inner):
            return self.label(inner.__globals__, inner.__qualname__)
        named = inner if hasattr(inner, "__qualname__") else type(inner)
        if isinstance(named, type):
            return self.cls(named)
        return f"{attribute(named, '__module__', '')}.{named.__qualname__}"

    def _ignores(self, name: str) -> bool:
        """Return whether ``name`` does not count, and note it then."""
        ignored = name in self._ignore or name.rpartition(".")[2] in self._ignore
        if ignored:
            self.source.uncounted[name] = "ignored"
        return ignored

    def _unique(self, name: str, holder: object) -> str:
        """Return ``name``, with a number if another ``holder``, such as a module, has it too."""
        unique, number = name, 1
        while self._holders.setdefault(unique, id(holder)) != id(holder):
            number += 1
            unique = f"{name}#{number}"
        return unique

    def _custom_op(self, space: types.ModuleType, path: list[str]) -> bool:
        """Follow ``torch.ops.space.name`` of ``torch.library.custom_op``; False for all else."""
        names = [*space.__name__.split("."), *path]
        if names[:2] != ["torch", "ops"] or len(names) < 4:
            return False
        # No public function of torch returns it. This table exists from torch 2.4 on.
        known = attribute(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
        function = attribute(known.get("::".join(names[2:4])), "_init_fn")
        if isinstance(function, types.FunctionType):
            self.follow(function)
            self.name(function.__globals__, function.__name__)  # with what registers kernels
        return True

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
                cls: type
                for cls in sorted(value.__subclasses__(), key=qualified_name):
                    self.cls(cls)
            elif root == "*":  # globals()[name]
                self._follow(scope, scope)
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
        is_op = self._custom_op(module, path)
        while path and not self._library.has(module):
            name, *path = path
            scope, value = vars(module), attribute(module, name)
            if not isinstance(value, types.ModuleType):
                known = name in scope or name.endswith("*")
                self._follow([name if known else "__getattr__"], scope)
                break
            module = value
        if self._library.has(module) and not is_op:
            self.version(module.__name__)

    def _imported(
        self, found: Import, scope: Globals, path: Iterable[str] = (), load: bool = False
    ) -> None:
        """Follow an imported name; ``path``: what is read from it."""
        full = found.full_name(scope.get("__package__"))
        if self._library.has_module(full):
            self.version(full)
        module = self._library.imported(full) if load else sys.modules.get(full)
        if module is not None and not self._library.has(module):
            name = [found.attribute] if found.attribute else []
            if load and name and not hasattr(module, name[0]):
                self._library.imported(f"{full}.{name[0]}")
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
            if name in scope and not name.startswith("__"):
                self.source.bound[self._unique(name, scope)] = text_of(value)
        except TypeError:
            if not isinstance(value, CONTAINERS):
                self.follow(value)

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
        file, unique = self._file(scope), self._unique(name, scope)
        is_stored = file is not None and name in roots(file.stored)
        if (id(scope), name) in self._changing:
            self.source.uncounted[unique] = "it changes as the program runs"
        elif is_marked:
            self.source.literal[unique] = text
        elif is_stored or None in nodes or any(isinstance(x, _LOOK_UPS) for x in parts):
            if isinstance(value, (bool, int, float, complex, str, bytes, tuple, types.NoneType)):
                self.source.uncounted[unique] = "it is computed when the program runs"
        elif any(isinstance(each, ast.Name) for each in parts):
            pass  # what it is computed from is noted
        elif len(binding) == 1 and not binding[0].is_conditional:
            self.source.literal[unique] = text
        else:
            self.source.bound[unique] = text

    def _file(self, scope: Globals) -> File | None:
        """Return the file of a module. Each is looked at once in a slice."""
        if id(scope) not in self._files:
            self._files[id(scope)] = file_at(scope.get("__file__") or "", scope)
        return self._files[id(scope)]

    def _is_loaded(self, scope: Globals, file: File, value: Any) -> bool:
        """Return whether the file is what was imported, judged by the code of its functions.

        In a file that was edited after the import, a value whose own code is unchanged counts.
        """

        def found(values: Iterable[Any]) -> list[bool]:
            codes = [each.__code__ for each in map(function_in, values) if each is not None]
            return [file.has(x) for x in codes if x.co_filename == scope.get("__file__")]

        if id(scope) not in self._loaded:
            # pytest rewrites the asserts of test modules: their bytecode differs from the file's.
            is_rewritten = type(scope.get("__loader__")).__module__.startswith("_pytest.")
            self._loaded[id(scope)] = is_rewritten or all(found([*scope.values()]))
        if self._loaded[id(scope)]:
            return True
        own = found([value, *(vars(value).values() if isinstance(value, type) else ())])
        return bool(own) and all(own)

    def label(self, scope: Globals, name: str) -> str:
        """``module:name``, or the name alone in the module of the function. Other modules of its
        package are named without the package, which may get another name."""
        if scope is self._home:
            return name
        top, module = _module_name(self._home).partition(".")[0], _module_name(scope)
        inside = module.removeprefix(top) if f"{module}.".startswith(f"{top}.") else module
        return f"{inside or '.'}:{name}"


def _place_of(function: types.FunctionType) -> tuple[File | None, Statement | None]:
    """Return the file of a function and the statement around it, if it runs as it is there."""
    file = file_at(function.__code__.co_filename, function.__globals__)
    if file is None or not file.has(function.__code__):
        return None, None
    return file, file.around(function.__code__.co_firstlineno)


def _module_name(scope: Globals) -> str:
    """Name of a module, also if it was started with ``python -m``."""
    name, spec = scope.get("__name__") or "", scope.get("__spec__")
    return spec.name if name == "__main__" and spec is not None else name


def _value(scope: Globals, chain: str) -> Any:
    """The value of a dotted name; ``None`` if it has none."""
    root, *path = chain.split(".")
    value = scope.get(root, getattr(builtins, root, None))
    for part in path:
        value = attribute(value, part)
    return value


def _texts_in(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of data in a class."""
    for name, member in sorted(vars(cls).items()):
        if not name.startswith("__"):
            with suppress(TypeError):
                yield name, text_of(member)


def bytecode(code: types.CodeType) -> object:
    """Instructions, constants and names, the same in all processes of a version of Python."""
    constants = [
        bytecode(x) if isinstance(x, types.CodeType)
        else sorted(map(repr, x)) if isinstance(x, frozenset) else x
        for x in code.co_consts
    ]  # fmt: skip
    return code.co_code, constants, code.co_names, code.co_varnames
