"""Parse a source file into statements, and list the names that each binds, changes and reads.

A statement here is at the top level of a module, or inside an ``if`` or ``try`` at the top level,
together with the condition. Its digest includes the syntax tree without docstrings, and the modules
from which the names that it reads are imported. Comments, formatting and line numbers are not
included. No values are read, so a file has equal statements in every process.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import itertools
import linecache
import operator
import os
import re
import threading
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from triton_dist._tuning.values.codec import nested_code
from triton_dist.runtime.garbage import no_garbage_collection

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEFINITIONS = (*_NAMED, ast.Lambda)
_CONTAINER_MUTATORS = frozenset({"add", "append", "extend", "insert", "setdefault", "update"})
"""Methods that put a value into a container."""
_TUNER = "(contextual_)?autotune"
_HARMLESS_METHODS = frozenset({"tune", "best_config"})
"""Methods of a tuned function that do not change its code."""


class Import(NamedTuple):
    """One name of an import statement."""

    module: str
    """Begins with dots if the import is relative."""
    attribute: str = ""
    """The imported name in the module. Empty: the module itself is imported."""

    def full_name(self, package: str | None) -> str:
        """Return the absolute module name; ``""`` if a relative import leaves ``package``."""
        with suppress(ImportError, ValueError):
            return importlib.util.resolve_name(self.module, package)
        return ""


class Statement:
    """A statement and the names in it. Names may be dotted, such as ``a.b``.

    Attributes:
        binds: names that the statement binds when the module is imported.
        changes: names whose parts the statement assigns at import (``A`` for ``A[0] = 1``), or
            whose methods it calls.
        call_arguments: names in a call whose result is not used (``fill(A)``). It may change them.
        called: functions that are called at import, and base classes.
        assigned_later: names that functions in the statement change when they run.
        reads: names that are read, also in functions. In ``a.b*``, ``b`` is the beginning of an
            attribute's name.
        imports, inner_imports: names that are imported at the top level, and in functions.
        aliases: names that may refer to one object.
        values: by bound name, the expression of its value.
        without_tuner: by the first line of a tuned function, the statement without the function's
            tuner decorators.
    """

    def __init__(
        self, file: File, node: Any, conditions: Iterable[Any] = (), omit_tuner_at: int = 0
    ) -> None:
        """Scan ``node``, which runs under ``conditions``.

        Tuner decorators of a function that begins at the line ``omit_tuner_at`` are left out.
        """
        self.line, self.end, self.shown_line = _first_line(node), node.end_lineno, node.lineno
        self.defines: str = getattr(node, "name", "")
        self.is_function = isinstance(node, _FUNCTIONS)
        self.is_conditional = bool(conditions) or isinstance(node, ast.AugAssign)
        self.binds, self.changes, self.call_arguments, self.called = (set[str]() for _ in range(4))
        self.assigned_later, self.nonlocals, self.aliases = (set[str]() for _ in range(3))
        self.reads, self._inner_reads, tokens = set[str](), set[str](), list[object]()
        self.imports, self.inner_imports = dict[str, Import](), dict[str, Import]()
        self.registers_subclasses, tuned_lines, omitted = False, set[int](), set[ast.expr]()
        pending: list[tuple[Any, bool]] = [([*conditions, node], False)]
        while pending:
            part, later = pending.pop()  # later: runs when a function is called, not at import
            if isinstance(part, list):
                pending += [((), later), *((each, later) for each in reversed(part))]
            elif not isinstance(part, ast.AST):
                tokens.append(part)
            elif part not in omitted and not _is_text(part):
                tokens.append(part.__class__.__name__)
                self._scan(part, later)
                if isinstance(part, _NAMED):
                    decorators = part.decorator_list
                    tuner = {x for x in decorators if file.is_from_triton_dist(x, _TUNER)}
                    tuned_lines |= {_first_line(part) for _ in tuner}
                    omitted |= tuner if _first_line(part) == omit_tuner_at else set()
                for field in _fields(part.__class__):  # type: ignore[arg-type]
                    runs_later = later or (field == "body" and isinstance(part, _FUNCTIONS))
                    pending.append((getattr(part, field, None), runs_later))
        self.without_tuner = (
            {} if omit_tuner_at else {x: Statement(file, node, conditions, x) for x in tuned_lines}
        )
        names = {*self.inner_imports}  # and names in functions that are not local to them
        for _, code in file.code_objects:
            if self.line <= code.co_firstlineno <= self.end:
                names.update(code.co_names, code.co_freevars)
        self.reads |= {each for each in self._inner_reads if _first_part(each) in names}
        self.assigned_later = {each for each in self.assigned_later if _first_part(each) in names}
        self.binds &= file.names  # without the variables of comprehensions
        read = sorted(first_parts(self.reads) & file.imports.keys())
        self.digest = digest([*tokens, *((each, sorted(file.imports[each])) for each in read)])
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        pairs = [x for each in targets for x in _assigned_pairs(each, getattr(node, "value", None))]
        self.values = {x.id: y for x, y in pairs if y and isinstance(x, ast.Name)}
        for part in itertools.chain(*pairs, *_assigned_pairs(getattr(node, "iter", None), None)):
            while isinstance(part, ast.Subscript) and part not in targets:
                part = part.value  # after ``A = B["x"]``, ``A`` may be a part of ``B``
            self.aliases |= {part.id} if isinstance(part, ast.Name) else set()

    def _scan(self, node: Any, later: bool) -> None:
        kind = node.__class__
        reads = self._inner_reads if later else self.reads
        stores = self.assigned_later if later else self.changes
        if kind is ast.Name:
            if isinstance(node.ctx, ast.Load):
                reads.add(node.id)
            elif not later:
                self.binds.add(node.id)
        elif kind is ast.Attribute or kind is ast.Subscript:
            if not isinstance(node.ctx, ast.Load):
                stores.add(base_name(node))
            if chain := dotted(node):
                reads.add(chain)
            elif dotted(getattr(node.value, "value", None)) == "sys.modules":
                reads.add(getattr(node, "attr", ""))  # sys.modules[__name__].name
        elif kind is ast.Call:
            self._call(node, later, reads, stores)
        elif kind is ast.Expr:
            method = getattr(getattr(node.value, "func", None), "attr", "")
            if not later and method not in _HARMLESS_METHODS:
                self.call_arguments |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        elif kind is ast.Import or kind is ast.ImportFrom:
            found = _imports_of(node)
            (self.inner_imports if later else self.imports).update(found)
            if kind is ast.Import:  # ``import a.b`` binds ``a``, and imports ``a.b``
                self.inner_imports |= {f"import {x.name}": Import(x.name) for x in node.names}
            self.binds |= set() if later else found.keys()
        elif kind is ast.Global or kind is ast.Nonlocal:
            (self.assigned_later if kind is ast.Global else self.nonlocals).update(node.names)
        elif kind in _NAMED:
            if kind is ast.ClassDef:
                self.called.update(map(dotted, node.bases))
                self.registers_subclasses |= any(x.arg == "metaclass" for x in node.keywords)
            self.registers_subclasses |= node.name == "__init_subclass__"
            if not later:
                self.binds.add(node.name)
                callees = [getattr(each, "func", each) for each in node.decorator_list]
                self.called.update(map(dotted, callees))
                self.changes |= {
                    _first_part(dotted(x)) for x in callees if isinstance(x, ast.Attribute)
                }

    def _call(self, node: Any, later: bool, reads: set[str], stores: set[str]) -> None:
        name, method = dotted(node.func), getattr(node.func, "attr", "")
        first = dotted(node.args[0]) if node.args else ""
        self.called |= set() if later else {name}
        if method in _CONTAINER_MUTATORS if later else method not in ("", *_HARMLESS_METHODS):
            stores.add(base_name(node.func.value))
        if name in ("getattr", "setattr") and len(node.args) > 1 and first:
            constant = getattr(node.args[1], "value", None)
            attribute = constant if isinstance(constant, str) else "*"
            (reads if name == "getattr" else stores).add(f"{first}.{attribute}")
        elif name in ("globals", "vars"):
            self.reads.add(f"{first}.*" if node.args else "*")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _assigned_pairs(target: Any, value: Any) -> list[tuple[Any, Any]]:
    """Return the target and the value of an assignment, then the pairs of their elements."""
    elements = (getattr(each, "elts", ()) for each in (target, value))
    return [(target, value), *itertools.zip_longest(*elements)]


def _imports_of(node: ast.AST) -> dict[str, Import]:
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return {x.asname or x.name: Import(module, x.name) for x in node.names}
    names = node.names if isinstance(node, ast.Import) else ()
    return {
        x.asname or _first_part(x.name): Import(x.name if x.asname else _first_part(x.name))
        for x in names
    }


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """Return the fields in a digest. ``type_params`` exists since Python 3.12 only."""
    left_out = ("ctx", "kind", "type_comment", "type_params")
    return tuple(each for each in kind._fields if each not in left_out)


def digest(parts: Iterable[object]) -> str:
    return hashlib.blake2b("\n".join(map(repr, parts)).encode(), digest_size=6).hexdigest()


def dotted(node: ast.AST | None) -> str:
    """Return ``"a.b.c"`` for the expression ``a.b.c``; ``""`` for an expression of other form."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def base_name(node: Any) -> str:
    """Return the dotted name at the beginning of an expression: ``a.b`` for ``a.b[0].c()``, and
    ``a`` for ``vars(a)``."""
    if isinstance(node, ast.Call) and dotted(node.func) == "vars" and node.args:
        return base_name(node.args[0])
    inner = getattr(node, "value", getattr(node, "func", None))
    return dotted(node) or (base_name(inner) if isinstance(inner, ast.AST) else "")


def _first_part(name: str) -> str:
    return name.partition(".")[0]


def first_parts(names: Iterable[str]) -> set[str]:
    return {_first_part(each) for each in names}


def _first_line(node: Any) -> int:
    """Return the line of the first decorator, or of the node, like ``co_firstlineno``."""
    return min(int(each.lineno) for each in (node, *getattr(node, "decorator_list", ())))


def _location(code: types.CodeType) -> tuple[int, str]:
    return code.co_firstlineno, code.co_name


class File:
    """The statements of a file, or of a notebook cell, and which of them bind or change a name."""

    def __init__(self, lines: list[str], is_cell: bool = False) -> None:
        self.lines, self._is_cell = lines, is_cell
        tree = ast.Module(_parse(lines), [])  # not kept: it is large
        code = compile(tree, "", "exec", dont_inherit=True)
        self.code_objects, self.names = [*nested_code(code)][1:], {*code.co_names}
        # A notebook compiles each statement separately, which yields other instructions.
        self._comparable_codes = {
            _location(each) if is_cell else each for _, each in self.code_objects
        }
        self._matched_codes: dict[int, types.CodeType] = {}
        self.imports: dict[str, set[Import]] = {}
        leaves = [*_statement_nodes(tree.body)]
        for node, _ in leaves:
            for name, found in _imports_of(node).items():
                self.imports.setdefault(name, set()).add(found)
        self.star_imports = self.imports.pop("*", set())
        self.statements = [Statement(self, *each) for each in leaves]
        self.assigned_later = {name for each in self.statements for name in each.assigned_later}
        self._dotted, self._by_name = self._index()

    def is_from_triton_dist(self, call: ast.expr, name: str) -> bool:
        """Return whether an expression is, or calls, a function of triton_dist whose name matches
        ``name``."""
        root, *path = dotted(getattr(call, "func", call)).split(".")
        full = (".".join([x.module, x.attribute, *path]) for x in self.imports.get(root, ()))
        return any(re.fullmatch(rf"triton_dist\b.*\.{name}", each) for each in full)

    def _index(self) -> tuple[list[tuple[list[str], Statement]], dict[str, list[Statement]]]:
        """Return the statements that change dotted names, and those that bind or change a name."""
        defined = {each.defines: each for each in self.statements if each.defines}
        functions = {name for name, each in defined.items() if each.is_function}
        bound = {name for each in self.statements for name in each.binds}
        changes, by_name = defaultdict[str, list[Statement]](list), defaultdict[Any, Any](list)
        for each in self.statements:
            callees = {name: defined[name] for name in each.called & defined.keys()}
            # A function is not changed by being called or passed to a call. A class is not changed
            # by constructing an object.
            changed = first_parts(each.changes) | each.call_arguments - functions - callees.keys()
            changed |= first_parts(each.assigned_later) & bound - {each.defines}
            for name, callee in callees.items():  # ``set_up()`` changes what the function changes
                changed |= first_parts(callee.assigned_later)
                changed |= {name} if each.defines and callee.registers_subclasses else set()
            for name in changed:
                changes[name].append(each)
            for name in each.binds | changed:
                by_name[name].append(each)
        for group in (sorted(each.aliases) for each in self.statements if len(each.aliases) > 1):
            found = [each for name in group for each in changes[name]]
            for name in group:
                by_name[name] = [*dict.fromkeys([*by_name[name], *found])]
        stored = ((x, each) for each in self.statements for x in each.changes | each.assigned_later)
        return [(name.split("."), each) for name, each in stored if "." in name], by_name

    def statements_of(self, name: str) -> list[Statement]:
        """Return the statements that bind or change ``name``.

        For a dotted name ``a.b``, return the statements that assign ``a.b``, a part of it
        (``a.b.c``), or a name of which it is a part.
        """
        parts = name.split(".")
        if len(parts) == 1:
            return self._by_name.get(name, [])
        return [x for path, x in self._dotted if all(map(operator.eq, path, parts))]

    def compiles_to(self, code: types.CodeType) -> bool:
        """Return whether the file compiles to ``code``, so it was not edited after the import."""
        if self._matched_codes.get(id(code)) is not code:  # a hash of a code object is slow
            if (_location(code) if self._is_cell else code) not in self._comparable_codes:
                return False
            self._matched_codes[id(code)] = code
        return True

    def num_earlier_definitions(self, code: types.CodeType) -> int:
        """Return the number of earlier definitions with the dotted name of ``code``."""
        location = _location(code)
        path, found = min(
            self.code_objects, key=lambda each: (each[1] != code, _location(each[1]) != location)
        )
        return [each for name, each in self.code_objects if name == path].index(found)

    @functools.cache  # noqa: B019
    def definitions(self, name: str, code: types.CodeType | None = None) -> list[Statement]:
        """Return the definitions of functions, lambdas and classes with a name, in file order.

        Only the definition itself is a part of the returned statement, without the code around it.

        Args:
            name: end of the qualified name.
            code: return only the definition that has this code.
        """
        end = f".{name.replace('.<locals>', '')}"
        same = [each for path, each in self.code_objects if path.endswith(end)]
        if code is not None:
            same = [each for _, each in self.code_objects if _location(each) == _location(code)]
        places = {*map(_location, same)}
        nodes: list[Any] = [x for each in _parse(self.lines) for x in ast.walk(each)]
        nodes = [x for x in nodes if isinstance(x, _DEFINITIONS)]
        nodes = [x for x in nodes if (_first_line(x), getattr(x, "name", "<lambda>")) in places]
        nodes.sort(key=lambda each: (each.lineno, each.col_offset))
        if code in same and len(same) == len(nodes):  # several lambdas may be in one line
            nodes = [nodes[same.index(code)]]
        return [Statement(self, node, (), _first_line(node)) for node in nodes]


def _statement_nodes(body: Iterable[ast.stmt], conditions: Any = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the statements of ``body`` and inside its ``if`` and ``try``, with their conditions."""
    for node in body:
        if isinstance(node, ast.If):
            if "__name__" not in ast.dump(node.test):  # such a block runs in scripts only
                yield from _statement_nodes(node.body, (*conditions, "if", node.test))
            yield from _statement_nodes(node.orelse, (*conditions, "else", node.test))
        elif isinstance(node, ast.Try):
            yield from _statement_nodes(
                [*node.body, *node.orelse, *node.finalbody], (*conditions, "try")
            )
            for handler in node.handlers:
                yield from _statement_nodes(handler.body, (*conditions, "except", handler.type))
        else:
            yield node, conditions


_parse_lock = threading.RLock()
"""Lets one thread parse at a time, because Python 3.11 otherwise raises ``SystemError``."""
os.register_at_fork(
    before=_parse_lock.acquire,
    after_in_parent=_parse_lock.release,
    after_in_child=_parse_lock.release,
)
_files: dict[str, tuple[list[str], File]] = {}


def _parse(lines: list[str]) -> list[ast.stmt]:
    with _parse_lock, no_garbage_collection():
        return ast.parse("".join(lines)).body


EMPTY_FILE = File([])


def parsed_file(path: str, scope: dict[str, Any] | None = None) -> File:
    """Return the statements of the file at ``path``; ``EMPTY_FILE`` if it cannot be read or parsed.

    If the file is in an archive, the loader in ``scope`` (globals of the module) returns its text.
    """
    linecache.checkcache(path)
    # An identical list is returned until the size or the modification time of the file changes.
    lines = linecache.getlines(path, scope)
    if path not in _files or _files[path][0] is not lines:
        file = EMPTY_FILE
        with (
            suppress(SyntaxError, ValueError, RecursionError),
            _parse_lock,
            no_garbage_collection(),
        ):
            # Cells of notebooks have no modification time.
            file = File(lines, linecache.cache[path][1] is None) if lines else EMPTY_FILE  # type: ignore[misc]
        _files[path] = lines, file
    return _files[path][1]
