"""The source of a function and of everything that it reaches, as digests.

A tuning result holds as long as the code that was timed: the function, its helpers, the Triton
kernels that it launches with their callees, closures, and globals that are constants. Reached means
named in the source; what comes in as an argument is not followed. Library code (standard library,
installed packages) is not followed either: its versions are in the fingerprint.

A comment, a docstring, formatting, or another place in the file or in the file system changes
nothing.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from typing import Any

from triton_dist._tuning import normalise
from triton_dist._tuning.values import codec

_OWN = "triton_dist"
_TUNER = "triton_dist._tuning"  # how a result was found does not change what was timed
_LIBRARIES = frozenset({"torch", "triton", "numpy"})  # also when they are built in a source tree


def source_digests(roots: Iterable[Callable[..., Any]]) -> dict[str, str]:
    """A digest for each function and class that ``roots`` reach, by qualified name."""
    walk = _Walk()
    for root in roots:
        walk.reference(root)
    return {
        name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in walk.texts.items()
    }


class _Walk:
    """Depth first, in the order of names, so that all ranks and processes get the same names."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._alive: list[object] = []  # an id means something only while its object lives

    def reference(
        self, value: Any, origin: tuple[types.ModuleType | None, str] = (None, "")
    ) -> str:
        """What ``value`` is, as text, and a visit to it if it is code.

        Args:
            origin: module and name of the global that holds it, for values that may change while
                the program runs: the text of their assignment counts, not what they hold at the
                moment.
        """
        if isinstance(value, types.ModuleType):
            return ""
        if isinstance(value, functools.partial):
            keywords = sorted(value.keywords.items())
            return f"partial {self.reference((value.func, *value.args, *keywords))}"
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            return self.reference(value.__func__)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if callable(getattr(value, "fn", None)):
            return self._wrapped(value)
        if type(value).__name__ == "constexpr":
            return self.reference(value.value)
        if isinstance(value, enum.Enum):
            return f"{self._class(type(value))}.{value.name}"
        if dataclasses.is_dataclass(value):
            fields = [self.reference(getattr(value, f.name)) for f in dataclasses.fields(value)]
            return f"{self._class(type(value))} {fields}"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.reference, value))})"
        if isinstance(value, (list, set, dict)):
            inside = value.values() if isinstance(value, dict) else value
            code = [self.reference(item) for item in inside if callable(item)]
            return f"{_assigned(*origin) or type(value).__name__} {sorted(code)}"
        try:
            return codec.text(codec.encode(value))
        except TypeError:
            return _assigned(*origin) or type(value).__qualname__

    def _wrapped(self, value: Any) -> str:
        """A Triton kernel (compiled or interpreted), its ``autotune`` or ``heuristics``, or a tuned
        function: all keep the function inside as ``fn``, and what changes its code beside it."""
        text = self.reference(value.fn)
        configs = getattr(value, "configs", None)
        if isinstance(configs, list) and all(map(codec.is_triton_config, configs)):
            text += f" configs {[self.reference(config) for config in configs]}"
        heuristics = getattr(value, "values", None)
        if isinstance(heuristics, dict):
            computed = [(name, self.reference(heuristics[name])) for name in sorted(heuristics)]
            text += f" heuristics {computed}"
        return text

    def _function(self, function: types.FunctionType) -> str:
        inner = getattr(function, "__wrapped__", None)
        if _is_library(function):
            return (
                f"{function.__module__}.{function.__qualname__}"
                if inner is None
                else self.reference(inner)
            )
        name, known = self._name(function)
        if known:
            return name
        code = function.__code__
        node = normalise.definition(code)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))

        def look_up(root: str) -> Any:
            if root in cells:
                try:
                    return cells[root].cell_contents
                except ValueError:  # not bound yet
                    return None
            return function.__globals__.get(root, _ABSENT)

        read, bound = normalise.global_names(code)
        roots = (read | cells.keys()) - bound
        lines = [self._defaults(function), "" if inner is None else self.reference(inner)]
        if node is None:
            lines = [normalise.bytecode(code), *lines]
            chains = roots
        else:
            lines = [normalise.normalised(node, _is_tuner(look_up)), *lines]
            chains = {chain for chain in normalise.chains(node) if chain.partition(".")[0] in roots}
            lines += [
                self._imported(function.__globals__, *each) for each in normalise.imports(node)
            ]
        module = sys.modules.get(function.__module__)
        self.texts[name] = "\n".join([*lines, *self._reached(chains, look_up, module)])
        return name

    def _class(self, cls: type) -> str:
        module = sys.modules.get(cls.__module__)
        if module is None or _is_library_module(cls.__module__, getattr(module, "__file__", None)):
            return f"{cls.__module__}.{cls.__qualname__}"
        name, known = self._name(cls)
        if known:
            return name
        node = normalise.definition(cls)
        if node is None:
            self.texts[name] = cls.__qualname__
            return name

        def look_up(root: str) -> Any:
            return vars(module).get(root, _ABSENT)

        text = normalise.normalised(node, _is_tuner(look_up))
        self.texts[name] = "\n".join(
            [text, *self._reached(normalise.chains(node), look_up, module)]
        )
        return name

    def _name(self, item: Any) -> tuple[str, bool]:
        """A unique name, and whether ``item`` was visited before."""
        known = self._names.get(id(item))
        if known is not None:
            return known, True
        # A wrapper has the name of what it wraps; its code has its own.
        own = item.__code__.co_name if hasattr(item, "__wrapped__") else item.__qualname__
        base = own.rpartition("<locals>.")[2]
        count = sum(name.partition("#")[0] == base for name in self.texts)
        name = base if count == 0 else f"{base}#{count + 1}"
        self._names[id(item)] = name
        self._alive.append(item)
        self.texts[name] = ""  # taken, while what it reaches is visited
        return name, False

    def _defaults(self, function: types.FunctionType) -> str:
        keyword = sorted((function.__kwdefaults__ or {}).items())
        return self.reference((*(function.__defaults__ or ()), *keyword))

    def _reached(
        self, chains: Iterable[str], look_up: Callable[[str], Any], module: types.ModuleType | None
    ) -> list[str]:
        """A line for each name that leads to code or a constant."""
        lines = []
        for chain in sorted(chains):
            root, *path = chain.split(".")
            value, holder, last = look_up(root), module, root
            for part in path:
                if not isinstance(value, (types.ModuleType, type)) or _is_library_value(value):
                    break
                holder = value if isinstance(value, types.ModuleType) else None
                value, last = getattr(value, part, _ABSENT), part
            if value is not _ABSENT:
                lines.append(f"{chain} = {self.reference(value, (holder, last))}")
        return lines

    def _imported(
        self, namespace: dict[str, Any], module: str, level: int, name: str | None
    ) -> str:
        """What a function imports when it is called; its module is imported now, as it will be
        then."""
        package = namespace.get("__package__") or ""
        try:
            full = importlib.util.resolve_name("." * level + module, package)
            if name is None or _is_library_module(full, None):
                return ""
            found = importlib.import_module(full)
        except (ImportError, ValueError):
            return ""
        return f"{module}.{name} = {self.reference(getattr(found, name, None), (found, name))}"


_ABSENT = types.ModuleType("absent")


def _is_tuner(look_up: Callable[[str], Any]) -> Callable[[ast.expr], bool]:
    """Says whether a decorator is the tuner's own: its arguments are compared by value
    elsewhere."""

    def is_tuner(decorator: ast.expr) -> bool:
        callee = decorator.func if isinstance(decorator, ast.Call) else decorator
        chain = (normalise.dotted(callee) or "").split(".")
        value = look_up(chain[0])
        for part in chain[1:]:
            value = getattr(value, part, None)
        return str(getattr(value, "__module__", "")).startswith(_TUNER)

    return is_tuner


def _assigned(module: types.ModuleType | None, name: str) -> str | None:
    return None if module is None else normalise.assignment(module, name)


def _is_library(function: types.FunctionType) -> bool:
    return _is_library_module(function.__module__ or "", function.__code__.co_filename)


def _is_library_value(value: types.ModuleType | type) -> bool:
    if isinstance(value, types.ModuleType):
        return _is_library_module(value.__name__, getattr(value, "__file__", None))
    return _is_library_module(value.__module__, None)


def _is_library_module(name: str, file: str | None) -> bool:
    """Whether code is installed rather than written here; triton_dist counts as written here."""
    top = name.partition(".")[0]
    if name.startswith(_TUNER) or top in _LIBRARIES or top in sys.stdlib_module_names:
        return True
    if top == _OWN:
        return False
    file = file or getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file or file.startswith(_stdlib())


@functools.cache
def _stdlib() -> str:
    return sysconfig.get_paths()["stdlib"] + "/"
