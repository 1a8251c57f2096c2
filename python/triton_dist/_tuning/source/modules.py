"""Parse a source file into statements, and list the names that each binds, changes and reads.

A statement is one at the top level of a module, or inside an ``if`` or ``try`` there, then together
with the condition. Its digest covers its syntax tree without docstrings, and where the imported
names that it reads come from; comments, formatting and the place in the file do not count. No value
is looked at: the same text gives the same statements in every process.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import gc
import hashlib
import linecache
import os
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

_FUTURE = __future__.annotations.compiler_flag
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MUTATORS = frozenset({"add", "append", "extend", "insert", "setdefault", "update"})
"""Methods that put something into a container."""
_USES = frozenset({"tune", "best_config"})
"""Methods of a tuned function, which change no code."""


class Import(NamedTuple):
    """One name of an import statement."""

    module: str
    level: int = 0
    """Dots of a relative import."""
    attribute: str | None = None
    """The name in the module; ``None``: the module itself."""


class Statement:
    """A statement and the names in it, dotted ones as ``a.b``.

    Args:
        headers: conditions of the ``if`` and ``try`` statements that it is in.
        globals_: names that functions in it have no local variable for.
    """

    def __init__(self, node: Any, headers: tuple[Any, ...], globals_: set[str]) -> None:
        self.node, self.headers = node, headers
        self.line, self.end = _first_line(node), node.end_lineno
        self.defines: str = getattr(node, "name", "")
        self.is_conditional = bool(headers) or isinstance(node, ast.AugAssign)
        self.binds: set[str] = set()
        self.changes: set[str] = set()  # names whose attributes or items it assigns
        self.calls: set[str] = set()  # names of which it calls a method: A.append(1), @A.register
        self.given: set[str] = set()  # names that a call may change: fill(A)
        self.runs: set[str] = set()  # functions that it calls, and base classes
        self.stored: set[str] = set()  # names that functions in it change when they run
        self.nonlocals: set[str] = set()
        self.reads: set[str] = set()  # also a.b*: attributes of a that begin with b
        self._inner_reads: set[str] = set()  # by functions in it
        self.imports: dict[str, Import] = {}
        self.inner_imports: dict[str, Import] = {}  # by functions in it, when they run
        self.registers_subclasses = False
        self.aliases: list[tuple[str, str]] = []  # names that may stand for one object
        self.values: dict[str, ast.expr] = {}  # expressions that it binds names to
        self.origins: list[str] = []  # of the imported names that it reads
        for part in (*headers, node):
            self._scan(part, False)
        names = globals_ | self.inner_imports.keys()
        self.reads |= {each for each in self._inner_reads if _root(each) in names}
        self.stored = {each for each in self.stored if _root(each) in names}
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                self._assign(target, node.value)
            self._alias(targets)
        elif isinstance(node, ast.For):
            self._alias([node.target, *getattr(node.iter, "elts", ())])

    @functools.cached_property
    def digest(self) -> str:
        return digest([*_tokens([*self.headers, self.node]), *self.origins])

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        self._alias([target, value])
        if isinstance(target, ast.Name):
            self.values[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = getattr(value, "elts", ())
            for each, part in zip(target.elts, parts, strict=False):
                self._assign(each, part)
            if isinstance(value, ast.Call):  # of ``setter, getter = make()`` one may change both
                self._alias(target.elts)

    def _alias(self, nodes: Iterable[ast.expr]) -> None:
        names = [each.id for each in nodes if isinstance(each, ast.Name)]
        self.aliases += [(names[0], other) for other in names[1:]]

    def _scan(self, node: Any, later: bool) -> None:
        """Collect the names in a part. ``later``: it runs when a function is called, not when the
        module is imported."""
        kind: Any = node.__class__
        inner: tuple[ast.AST, ...] = ()
        if isinstance(node, (str, type(None))):
            return
        if kind is ast.Name:
            if isinstance(node.ctx, ast.Load):
                self._read(node.id, later)
            elif not later:
                self.binds.add(node.id)
            return
        if kind is ast.Attribute:
            self._attribute(node, later)
        elif kind is ast.Subscript:
            if not isinstance(node.ctx, ast.Load):
                self._store(node.value, later)
        elif kind is ast.Call:
            self._call(node, later)
        elif kind is ast.Expr:
            call = node.value
            if not later and isinstance(call, ast.Call) and _method(call) not in _USES:
                given = [*call.args, *(each.value for each in call.keywords), call.func]
                self.given |= {root_of(each) for each in given}
        elif kind is ast.Import or kind is ast.ImportFrom:
            self._import(node, later)
        elif kind is ast.Global:
            self.stored.update(node.names)
        elif kind is ast.Nonlocal:
            self.nonlocals.update(node.names)
        elif kind in _FUNCTIONS or kind is ast.ClassDef:
            if kind is ast.Lambda:
                inner = (node.body,)
            else:
                self._definition(node, later)
                inner = () if kind is ast.ClassDef else tuple(node.body)
        for each in ast.iter_child_nodes(node):
            self._scan(each, later or each in inner)

    def _read(self, chain: str, later: bool) -> None:
        (self._inner_reads if later else self.reads).add(chain)

    def _store(self, node: ast.AST, later: bool, name: str = "") -> None:
        """Note that what an expression stands for, or its attribute, is changed in place."""
        (self.stored if later else self.changes).add((dotted(node) or root_of(node)) + name)

    def _attribute(self, node: ast.Attribute, later: bool) -> None:
        if chain := dotted(node):
            # ``module.__dict__[name]`` may read any attribute.
            self._read(chain.removesuffix("__dict__") + "*" * (node.attr == "__dict__"), later)
        elif dotted(getattr(node.value, "value", None)) == "sys.modules":
            self.reads.add(node.attr)  # sys.modules[__name__].name
        if not isinstance(node.ctx, ast.Load):
            self._store(node, later)

    def _call(self, node: ast.Call, later: bool) -> None:
        name, method, first = dotted(node.func), _method(node), [*node.args, None][0]
        if not later:
            self.runs.add(name)
            if method and method not in _USES:
                self.calls.add(root_of(node.func))
        elif method in _MUTATORS:
            self._store(node.func.value, later)  # type: ignore[attr-defined]
        if name in ("getattr", "setattr") and len(node.args) > 1 and (place := dotted(first)):
            attribute = f".{_beginning(node.args[1])}"
            self._read(place + attribute, later)
            if name == "setattr":
                self._store(node.args[0], later, attribute)
        elif name in ("globals", "vars"):
            self.reads.add("*" if first is None else f"{dotted(first)}.*")
        elif name.endswith("import_module") and first is not None:
            self.inner_imports[f"import {_beginning(first)}"] = Import(_beginning(first))

    def _import(self, node: ast.Import | ast.ImportFrom, later: bool) -> None:
        found = self.inner_imports if later else self.imports
        for each in node.names:
            name = each.asname or each.name
            if isinstance(node, ast.ImportFrom):
                found[name] = Import(node.module or "", node.level, each.name)
            elif each.asname:
                found[name] = Import(each.name)
            else:  # ``import a.b`` binds ``a``
                self.inner_imports[f"import {name}"] = Import(name)
                found[_root(name)] = Import(_root(name))
        self.binds |= set() if later else found.keys()

    def _definition(self, node: Any, later: bool) -> None:
        if isinstance(node, ast.ClassDef):
            self.runs.update(map(dotted, node.bases))
            self.registers_subclasses |= "metaclass" in {each.arg for each in node.keywords}
        self.registers_subclasses |= node.name == "__init_subclass__"
        if not later:
            self.binds.add(node.name)
            callees = [getattr(each, "func", each) for each in node.decorator_list]
            self.runs.update(map(dotted, callees))
            self.calls |= {root_of(each) for each in callees if isinstance(each, ast.Attribute)}


def _tokens(node: Any) -> Iterator[object]:
    """The syntax tree without docstrings, in one line."""
    if isinstance(node, list):
        yield len(node)
        for each in node:
            yield from _tokens(each)
    elif isinstance(node, ast.AST):
        yield node.__class__.__name__
        for field in _fields(node.__class__):  # type: ignore[arg-type]
            value: Any = getattr(node, field, None)
            if field == "body" and isinstance(node, _DEFINITIONS):
                has_text = ast.get_docstring(node, clean=False) is not None
                value = (value[1:] or [ast.Pass()]) if has_text else value
            if field != "type_params" or value:  # new in Python 3.12
                yield from _tokens(value)
    else:
        yield node


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(each for each in kind._fields if each not in ("ctx", "kind", "type_comment"))


def digest(parts: Iterable[object]) -> str:
    return hashlib.blake2b("\n".join(map(repr, parts)).encode(), digest_size=6).hexdigest()


def dotted(node: ast.AST | None) -> str:
    """``"a.b.c"`` for such an expression, ``""`` for others."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def root_of(node: ast.AST) -> str:
    """``a`` for ``a.b[0].c()`` and ``vars(a)``; ``""`` if it begins with another expression."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        is_vars = isinstance(node, ast.Call) and dotted(node.func) == "vars" and node.args
        node = node.args[0] if is_vars else getattr(node, "value", getattr(node, "func", None))  # type: ignore[union-attr,assignment]
    return node.id if isinstance(node, ast.Name) else ""


def _method(node: ast.Call) -> str:
    return getattr(node.func, "attr", "")


def _root(name: str) -> str:
    return name.partition(".")[0]


def roots(names: Iterable[str]) -> set[str]:
    return {_root(each) for each in names}


def _beginning(node: ast.AST) -> str:
    """The text that an expression gives; ``"begin*"`` if only its beginning is known."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    parts = [node.left] if isinstance(node, ast.BinOp) else getattr(node, "values", ())[:1]
    return f"{_beginning(parts[0]).rstrip('*')}*" if parts else "*"


def _first_line(node: Any) -> int:
    """The line of the first decorator, as a code object has it."""
    return min(int(each.lineno) for each in (node, *getattr(node, "decorator_list", ())))


def with_inner(code: types.CodeType, name: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """``code`` and all that is defined in it, with dotted names."""
    yield name, code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from with_inner(each, f"{name}.{each.co_name}")


class File:
    """The statements of a file, and which of them bind or change a name."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        tree, code = _parse("".join(lines))
        self._codes = [*with_inner(code)][1:]
        self._set_of_codes = {each for _, each in self._codes}
        self.imports: dict[str, set[Import]] = {}
        self.statements = [self._statement(*each) for each in _leaves(tree.body)]
        for each in self.statements:
            each.binds &= {*code.co_names}  # not what a comprehension binds
            for name, found in each.imports.items():
                self.imports.setdefault(name, set()).add(found)
        self.stars = self.imports.pop("*", set())
        self.stored = {place for each in self.statements for place in each.stored}
        self._by_name: dict[str, list[Statement]] = {}
        self._index()

    def _statement(self, node: Any, headers: tuple[Any, ...] = (), first: int = 0) -> Statement:
        first = first or _first_line(node)
        codes = [x for _, x in self._codes if first <= x.co_firstlineno <= node.end_lineno]
        names = {name for code in codes for name in (*code.co_names, *code.co_freevars)}
        return self._with_imports(Statement(node, headers, names))

    def _with_imports(self, statement: Statement) -> Statement:
        """``statement``, whose digest covers where the names that it reads are imported from."""
        read = sorted(roots(statement.reads) & self.imports.keys())
        statement.origins = [f"{root} {sorted(map(repr, self.imports[root]))}" for root in read]
        return statement

    def _index(self) -> None:
        defined = {each.defines: each for each in self.statements if each.defines}
        functions = {name for name, each in defined.items() if isinstance(each.node, _FUNCTIONS)}
        bound = {name for each in self.statements for name in each.binds}
        changes: dict[str, list[Statement]] = {}
        for each in map(self._with_imports, self.statements):
            # To pass a function to a call, to call it or to make an object does not change it.
            changed = each.calls | each.given - functions - (each.runs & defined.keys())
            for name in each.runs & defined.keys():  # ``set_up()`` changes what the function does
                changed |= roots(defined[name].stored)
                if each.defines and defined[name].registers_subclasses:
                    changed.add(name)
            changed |= roots(each.changes) | roots(each.stored) & bound - {each.defines}
            for name in changed:
                changes.setdefault(name, []).append(each)
            for name in each.binds | changed:
                self._by_name.setdefault(name, []).append(each)
        for one, other in (pair for each in self.statements for pair in each.aliases):
            for name, same in ((one, other), (other, one)):
                known = self._by_name.setdefault(name, [])
                known += [each for each in changes.get(same, ()) if each not in known]

    def of(self, name: str) -> list[Statement]:
        """The statements that bind or change ``name``; of ``module.name`` those that assign it, a
        part of it or what it is part of."""
        if "." not in name:
            return self._by_name.get(name, [])
        return [
            each
            for each in self.statements
            for place in each.changes | each.stored
            if "." in place and (f"{place}.".startswith(f"{name}.") or name.startswith(f"{place}."))
        ]

    def around(self, line: int) -> Statement | None:
        return next((each for each in self.statements if each.line <= line <= each.end), None)

    def has(self, code: types.CodeType) -> bool:
        """True if the file compiles to ``code``: it was not edited after the import."""
        if code not in self._set_of_codes and (around := self.around(code.co_firstlineno)):
            # A notebook compiles each statement by itself, and without the imports before it
            # calls of functions in modules have other instructions.
            node, flags = ast.Module([around.node], []), code.co_flags & _FUTURE
            alone = compile(node, "", "exec", flags, dont_inherit=True)
            self._set_of_codes |= {each for _, each in with_inner(alone)}
        return code in self._set_of_codes

    def ordinal(self, code: types.CodeType) -> int:
        """Return how many definitions before that of ``code`` have its dotted name."""
        place = code.co_firstlineno, code.co_name
        known = [(name, x, (x.co_firstlineno, x.co_name)) for name, x in self._codes]
        path = next(name for name, _, each in known if each == place)
        same = [(x == code, each == place) for name, x, each in known if name == path]
        return same.index(max(same))

    def definition(
        self, code: types.CodeType, is_dropped: Callable[[ast.expr], bool]
    ) -> Statement | None:
        """The definition of ``code`` alone, of a function or lambda inside a statement, without
        some decorators."""
        place = code.co_firstlineno, code.co_name
        nodes = [
            each
            for name, each in self._definitions()
            if (_first_line(each), name.rpartition(".")[2]) == place
        ]
        codes = [x for _, x in self._codes if (x.co_firstlineno, x.co_name) == place]
        # Several lambdas may be in one line.
        index = codes.index(code) if code in codes and len(codes) == len(nodes) else 0
        return (
            self._statement(_without(nodes[index], place[0], is_dropped), (), place[0])
            if nodes
            else None
        )

    def definitions(self, name: str) -> list[Statement]:
        """All definitions with this qualified name."""
        return [self._statement(node) for full, node in self._definitions() if full == name]

    def lines_of(self, name: str) -> list[int]:
        """The first lines of definitions with this qualified name."""
        return [_first_line(node) for full, node in self._definitions() if full == name]

    def without(
        self, statement: Statement, line: int, is_dropped: Callable[[ast.expr], bool]
    ) -> Statement:
        """``statement`` without some decorators of the function that begins in ``line``."""
        node = _without(statement.node, line, is_dropped)
        return self._statement(node, statement.headers, statement.line)

    def _definitions(self) -> list[tuple[str, Any]]:
        """Functions, lambdas and classes, with their qualified names, in the order of the file."""

        def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, Any]]:
            if isinstance(node, (*_DEFINITIONS, ast.Lambda)):
                name = prefix + getattr(node, "name", "<lambda>")
                yield name, node
                prefix = f"{name}." if isinstance(node, ast.ClassDef) else f"{name}.<locals>."
            for each in ast.iter_child_nodes(node):
                yield from inside(each, prefix)

        found = [pair for each in self.statements for pair in inside(each.node, "")]
        return sorted(found, key=lambda each: (each[1].lineno, each[1].col_offset))


def _without(node: Any, line: int, is_dropped: Callable[[ast.expr], bool]) -> Any:
    node = copy.deepcopy(node)
    for each in ast.walk(node):
        if getattr(each, "decorator_list", ()) and _first_line(each) == line:
            each.decorator_list = [x for x in each.decorator_list if not is_dropped(x)]  # type: ignore[attr-defined]
    return node


def _leaves(body: Iterable[ast.stmt], headers: Any = ()) -> Iterator[tuple[ast.stmt, Any]]:
    """Statements, those in ``if`` and ``try`` one by one, with what decides whether they run."""
    for node in body:
        if isinstance(node, ast.If):
            if "__name__" not in ast.dump(node.test):  # what runs in scripts alone
                yield from _leaves(node.body, (*headers, "if", node.test))
            yield from _leaves(node.orelse, (*headers, "else", node.test))
        elif isinstance(node, ast.Try):
            yield from _leaves([*node.body, *node.orelse, *node.finalbody], (*headers, "try"))
            for handler in node.handlers:
                yield from _leaves(handler.body, (*headers, "except", handler.type))
        else:
            yield node, headers


_parsing = threading.Lock()
"""Python 3.11 raises ``SystemError`` if threads parse at the same time."""


def _forget_lock() -> None:
    """In the child of a fork, where the thread that holds the lock is missing."""
    global _parsing
    _parsing = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def _parse(text: str) -> tuple[ast.Module, types.CodeType]:
    with _parsing:
        was_enabled = gc.isenabled()
        gc.disable()  # parsing makes no garbage, and collections take half of its time
        try:
            tree = ast.parse(text)
            return tree, compile(tree, "", "exec", dont_inherit=True)
        finally:
            if was_enabled:
                gc.enable()


_files: dict[str, tuple[list[str], File | None]] = {}


def file_at(path: str, scope: dict[str, Any] | None = None) -> File | None:
    """The statements of a file; ``None`` if there is no text.

    Args:
        scope: globals of its module, whose loader has the text of a file in an archive.
    """
    linecache.checkcache(path)
    lines = linecache.getlines(path, scope)  # the same list, until size or time of change differ
    if path not in _files or _files[path][0] is not lines:
        try:
            _files[path] = lines, File(lines) if lines else None
        except (SyntaxError, ValueError, RecursionError):
            _files[path] = lines, None
    return _files[path][1]
