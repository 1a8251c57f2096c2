"""Parse a source file into statements, and list the names that each binds, changes and reads.

A statement here is at the top level of a module, or inside an ``if`` or ``try`` at the top level,
together with the condition. Its digest includes the syntax tree without docstrings, and the modules
from which the names that it reads are imported. Comments, formatting and line numbers are not
included. No values are read, so a file has equal statements in every process.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import linecache
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
_IRRELEVANT_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_params"})
"""Left out of digests. ``type_params`` exists since Python 3.12 only."""
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_RUN_TIME_NODES = {ast.Call, ast.Attribute, ast.Subscript, ast.Await, ast.comprehension}
"""An expression that contains one may have another value in each process."""
_CONTAINER_MUTATORS = frozenset({"add", "append", "extend", "insert", "setdefault", "update"})
_TUNER = "(contextual_)?autotune"
_TUNER_METHODS = frozenset({"", "tune", "best_config"})
"""Calls of these methods do not change their object. Empty: a call of a function."""


class Import(NamedTuple):
    """One name of an import statement. Without ``attribute``, the module itself is imported."""

    module: str
    attribute: str = ""

    def full_name(self, package: str | None) -> str:
        """Return the absolute module name; ``""`` if a relative import leaves ``package``."""
        with suppress(ImportError, ValueError):
            return importlib.util.resolve_name(self.module, package)
        return ""


class Statement:
    """A statement and the names in it. Names may be dotted, such as ``a.b``.

    The tuner's decorators of a function are a statement of their own, because a record of the
    function compares their arguments by value.

    Attributes:
        binds: names that the statement binds when the module is imported.
        changes: names of objects that the statement changes at import (``A`` for ``A[0] = 1``).
        call_arguments: names in a call whose result is not used (``fill(A)``). It may change them.
        called: functions that are called at import, and base classes.
        changed_later: names that functions in the statement change when they run.
        reads: names that are read, also in functions. ``a.*``: any attribute of ``a``. ``*``: any
            name of the module.
        imports, inner_imports: names that are imported at the top level, and in functions.
        aliases: names that may refer to one object.
        tuned_line: first line of the tuned function, if the statement is a decorator of the tuner.
        tuners: the tuner's decorators in the statement, each with the first line of its function.
    """

    def __init__(
        self, file: File, node: Any, conditions: Iterable[Any] = (), tuned_line: int = 0
    ) -> None:
        """Scan ``node``, which runs under ``conditions``."""
        self.line, self.end, self.shown_line = _first_line(node), node.end_lineno, node.lineno
        self.tuned_line, self.defines = tuned_line, getattr(node, "name", "")
        self.is_function = isinstance(node, _FUNCTIONS)
        self.binds, self.changes, self.call_arguments, self.called = (set[str]() for _ in range(4))
        self.changed_later, self.reads, self.aliases = (set[str]() for _ in range(3))
        self._not_local = set[str]()
        self.imports, self.inner_imports = dict[str, Import](), dict[str, Import]()
        self.registers_subclasses, self.tuners = False, dict[ast.expr, int]()
        tokens, pending = list[object](), list[tuple[Any, bool]]([([*conditions, node], False)])
        while pending:
            part, later = pending.pop()  # later: runs when a function is called, not at import
            if isinstance(part, list):
                pending += [((), later), *((each, later) for each in reversed(part))]
            elif not isinstance(part, ast.AST):
                tokens.append(part)
            elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                continue  # a docstring
            elif part not in self.tuners:
                tokens.append(part.__class__.__name__)
                self._scan(part, later)
                for each in getattr(part, "decorator_list", ()):
                    if file.is_from_triton_dist(each, _TUNER):
                        self.tuners[each] = _first_line(part)
                for field in part._fields:
                    if field not in _IRRELEVANT_FIELDS:
                        runs_later = later or (field == "body" and isinstance(part, _FUNCTIONS))
                        pending.append((getattr(part, field, None), runs_later))
        self._not_local.update(self.inner_imports, ["*"])
        for _, code in file.code_objects:
            if self.line <= code.co_firstlineno <= self.end:
                self._not_local.update(code.co_names, code.co_freevars)
        for names in (self.reads, self.changed_later):
            names -= {each for each in names if each.partition(".")[0] not in self._not_local}
        self.binds &= file.names  # without the variables of comprehensions
        read = sorted(first_parts(self.reads) & file.imports.keys())
        self.digest = digest([*tokens, *((each, sorted(file.imports[each])) for each in read)])
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        value, iterated = getattr(node, "value", None), getattr(node, "iter", None)
        for expression in (*targets, value, iterated):
            # After ``A = B["x"]``, ``A`` may be a part of ``B``.
            parts = getattr(expression, "elts", [expression])
            objects = [x for x in parts if isinstance(x, (ast.Name, ast.Subscript))]
            self.aliases |= set(map(base_name, objects))
        is_fixed = not conditions and not isinstance(node, ast.AugAssign)
        self.constant_kind = _constant_kind(file, value, is_fixed)

    def _scan(self, node: Any, later: bool) -> None:
        """Add the names that ``node`` itself, without its parts, binds, changes and reads."""
        kind = node.__class__
        changes = self.changed_later if later else self.changes
        if kind is ast.Name and not isinstance(node.ctx, ast.Load):
            self.binds |= set() if later else {node.id}
        elif kind is ast.Name:
            self.reads.add("*" if node.id == "globals" else node.id)
            self._not_local |= set() if later else {node.id}
        elif kind is ast.Attribute or kind is ast.Subscript:
            if not isinstance(node.ctx, ast.Load):
                changes.add(base_name(node))
            if chain := dotted(node):
                self.reads.add(chain)
            elif dotted(getattr(node.value, "value", None)) == "sys.modules":
                self.reads.add(getattr(node, "attr", ""))  # sys.modules[__name__].name
        elif kind is ast.Call:
            name, method = dotted(node.func), getattr(node.func, "attr", "")
            self.called |= set() if later else {name}
            if method in _CONTAINER_MUTATORS if later else method not in _TUNER_METHODS:
                changes.add(base_name(node.func.value))
            if name in ("getattr", "setattr", "vars") and node.args:
                attribute = getattr([*node.args, None][1], "value", "*")
                accessed = changes if name == "setattr" else self.reads
                accessed.add(f"{dotted(node.args[0])}.{attribute}")
        elif kind is ast.Expr and not later:
            if getattr(getattr(node.value, "func", None), "attr", None) not in _TUNER_METHODS:
                self.call_arguments |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        elif kind is ast.Import or kind is ast.ImportFrom:
            found = _imports_of(node)
            (self.inner_imports if later else self.imports).update(found)
            self.binds |= set() if later else found.keys()
        elif kind is ast.Global:
            self.changed_later.update(node.names)
        elif kind in _NAMED:
            names = {node.name, *(x.arg for x in getattr(node, "keywords", ()))}
            self.registers_subclasses |= bool(names & {"__init_subclass__", "metaclass"})
            callees = [getattr(each, "func", each) for each in node.decorator_list]
            if not later:
                self.binds.add(node.name)
                self.called |= set(map(dotted, (*getattr(node, "bases", ()), *callees)))
                self.changes |= {
                    base_name(x.value) for x in callees if isinstance(x, ast.Attribute)
                }


def _constant_kind(file: File, value: Any, is_fixed: bool) -> str:
    """Return the kind of constant that a statement binds to ``value``: ``"marked"`` with
    :func:`triton_dist.tune.constant`, ``"computed"`` at run time, ``"derived"`` from other names,
    ``"literal"``, or ``"conditional"``, which is a literal that other statements may replace."""
    if isinstance(value, ast.Call) and file.is_from_triton_dist(value, "constant"):
        return "marked"
    if isinstance(value, ast.Call) and dotted(value.func).endswith("constexpr"):
        value = next(iter(value.args), None)
    kinds = {type(each) for each in ast.walk(value)} if value else {ast.Call}
    if kinds & _RUN_TIME_NODES or ast.Name in kinds:
        return "computed" if kinds & _RUN_TIME_NODES else "derived"
    return "literal" if is_fixed else "conditional"


def _imports_of(node: ast.AST) -> dict[str, Import]:
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return {x.asname or x.name: Import(module, x.name) for x in node.names}
    names = node.names if isinstance(node, ast.Import) else ()
    pairs = ((x.asname or x.name.partition(".")[0], x) for x in names)
    return {name: Import(x.name if x.asname else name) for name, x in pairs}


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


def first_parts(names: Iterable[str]) -> set[str]:
    return {each.partition(".")[0] for each in names}


def _first_line(node: Any) -> int:
    """Return the line of the first decorator, or of the node, like ``co_firstlineno``."""
    return min(int(each.lineno) for each in (node, *getattr(node, "decorator_list", ())))


def names_in(code: types.CodeType, imported: Iterable[str] = ()) -> set[str]:
    """Return the names in a function, and in functions inside it, that are not local to them, or
    that are in ``imported``."""
    codes = [each for _, each in nested_code(code)]
    names = {name for each in codes for name in (*each.co_names, *each.co_freevars)}
    return names.union(*({*each.co_varnames}.intersection(imported) for each in codes))


class File:
    """The statements of a file, or of a notebook cell."""

    def __init__(self, lines: list[str], is_cell: bool = False) -> None:
        self.lines, self._is_cell = lines, is_cell
        tree = ast.parse("".join(lines))
        code = compile(tree, "", "exec", dont_inherit=True)
        self.code_objects, self.names = [*nested_code(code)][1:], {*code.co_names}
        self._codes_at = defaultdict[Any, list[tuple[str, types.CodeType]]](list)
        for each in self.code_objects:
            self._codes_at[each[1].co_firstlineno, each[1].co_name].append(each)
        nodes = [*_statement_nodes(tree.body)]
        self.imports = defaultdict[str, set[Import]](set)
        for name, found in (pair for node, _ in nodes for pair in _imports_of(node).items()):
            self.imports[name].add(found)
        self.star_imports = self.imports.pop("*", set())
        self.statements = list[Statement]()
        for node, conditions in nodes:
            statement = Statement(self, node, conditions)
            tuners = [Statement(self, x, (), line) for x, line in statement.tuners.items()]
            for tuner in tuners:
                tuner.binds = statement.binds
            self.statements += [statement, *tuners]
        self.changed_later = {name for each in self.statements for name in each.changed_later}
        self.changed_later |= first_parts(self.changed_later)
        self._by_name = self._index()

    def is_from_triton_dist(self, call: ast.expr, name: str) -> bool:
        """Return whether an expression is, or calls, a function of triton_dist whose name matches
        ``name``."""
        root, *path = dotted(getattr(call, "func", call)).split(".")
        full = (".".join([x.module, x.attribute, *path]) for x in self.imports.get(root, ()))
        return any(re.fullmatch(rf"triton_dist\b.*\.{name}", each) for each in full)

    def _index(self) -> dict[str, list[Statement]]:
        """Return the statements that bind or change a name. For a dotted name ``a.b``, return the
        statements that change ``a.b`` or a part of it."""
        defined = {each.defines: each for each in self.statements if each.defines}
        functions = {name for name, each in defined.items() if each.is_function}
        bound = {name for each in self.statements for name in each.binds}
        changes, by_name = defaultdict[str, list[Statement]](list), defaultdict[Any, Any](list)
        for each in self.statements:
            # A function is not changed by being called or passed to a call. A class is not changed
            # by constructing an object.
            callees = {name: defined[name] for name in each.called & defined.keys()}
            changed = each.changes | each.call_arguments - functions - callees.keys()
            later = each.changed_later
            changed |= {x for x in later if x.partition(".")[0] in bound - {each.defines}}
            for callee in callees.values():
                changed |= callee.changed_later  # ``set_up()`` changes what the function changes
                if each.defines and callee.registers_subclasses:
                    changed.add(callee.defines)
            changed |= {".".join(name.split(".")[:2]) for name in changed} | first_parts(changed)
            for name in changed:
                changes[name].append(each)
            for name in each.binds | changed:
                by_name[name].append(each)
        for group in (sorted(each.aliases) for each in self.statements if len(each.aliases) > 1):
            found = [each for name in group for each in changes[name]]
            for name in group:
                by_name[name] = [*dict.fromkeys([*by_name[name], *found])]
        return by_name

    def statements_of(self, name: str) -> list[Statement]:
        """Return the statements that bind or change ``name``, which may have one dot."""
        return self._by_name.get(name, [])

    def statements_at(self, line: int) -> list[Statement]:
        """Return the statements that contain a line."""
        return [x for x in self.statements if x.line <= line <= x.end and not x.tuned_line]

    def compiles_to(self, code: types.CodeType) -> bool:
        """Return whether the file compiles to ``code``, so it was not edited after the import."""
        return any(self._equal_codes(code))

    def num_earlier_definitions(self, code: types.CodeType, first_line: int = 0) -> int:
        """Return how many definitions since ``first_line`` have the dotted name of ``code`` and
        are before it."""
        path, found = next(self._equal_codes(code))
        same = [x for name, x in self.code_objects if name == path]
        return [x for x in same if x.co_firstlineno >= first_line].index(found)

    def _equal_codes(self, code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
        for each in self._codes_at.get((code.co_firstlineno, code.co_name), ()):
            # A notebook compiles each statement separately, which yields other instructions.
            if self._is_cell or each[1] == code:
                yield each


def _statement_nodes(body: Iterable[ast.stmt], conditions: Any = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the statements of ``body`` and inside its ``if`` and ``try``, with their conditions."""
    for node in body:
        if isinstance(node, ast.If):
            if "__name__" not in ast.dump(node.test):  # such a block runs in scripts only
                yield from _statement_nodes(node.body, (*conditions, "if", node.test))
            yield from _statement_nodes(node.orelse, (*conditions, "else", node.test))
        elif isinstance(node, ast.Try):
            block = [*node.body, *node.orelse, *node.finalbody]
            yield from _statement_nodes(block, (*conditions, "try"))
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
EMPTY_FILE = File([])


def parsed_file(path: str, scope: dict[str, Any] | None = None) -> File:
    """Return the statements of the file at ``path``; ``EMPTY_FILE`` if it cannot be read or parsed.

    If the file is in an archive, the loader in ``scope`` (globals of the module) returns its text.
    """
    linecache.checkcache(path)
    # An identical list is returned until the size or the modification time of the file changes.
    lines = linecache.getlines(path, scope)
    if path not in _files or _files[path][0] is not lines:
        file, errors = EMPTY_FILE, (SyntaxError, ValueError, RecursionError)
        with suppress(*errors), _parse_lock, no_garbage_collection():
            # Cells of notebooks have no modification time.
            is_cell = bool(lines) and linecache.cache[path][1] is None  # type: ignore[misc]
            file = File(lines, is_cell)
        _files[path] = lines, file
    return _files[path][1]
