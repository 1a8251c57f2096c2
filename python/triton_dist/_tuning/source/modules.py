"""Parse a source file into statements, and list the names that each binds, changes and reads.

A statement is at the top level of a module, or in an ``if`` or ``try`` there, together with the
condition. Its digest covers its syntax tree without docstrings, and where the names that it reads
are imported from. Comments, formatting and line numbers are not part of the digest. No value is
read, so a text yields equal statements in every process.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
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
    level: int = 0
    """Number of dots of a relative import."""
    attribute: str = ""
    """The name in the module; if empty, the module itself."""

    def full_name(self, package: str | None) -> str:
        """Return the name of the module; ``""`` if a relative import leads out of ``package``."""
        with suppress(ImportError, ValueError):
            return importlib.util.resolve_name("." * self.level + self.module, package)
        return ""


class Statement:
    """A statement and the names in it, dotted names as ``a.b``.

    Attributes:
        binds: names that it binds when the module is imported.
        changes: places that it assigns at import, such as ``A[0] = 1``, or whose methods it calls.
        call_arguments: names in an expression statement, whose call may change them: ``fill(A)``.
        called: functions that it calls at import, and base classes.
        assigned_later: names that functions in it change when they run.
        reads: names that it reads, in functions too; ``a.b*``: ``b`` is the start of an attribute.
        imports, inner_imports: names that are imported at the top level, and in functions.
        aliases: names that may refer to one object.
        values: expressions that it binds names to.
    """

    def __init__(self, file: File, node: Any, headers: Iterable[Any] = (), cut: int = 0) -> None:
        """Scan ``node``.

        Args:
            headers: conditions under which it runs.
            cut: first line of a function whose tuner decorators are left out.
        """
        self.line, self.end, self.shown_line = _first_line(node), node.end_lineno, node.lineno
        self.defines: str = getattr(node, "name", "")
        self.is_function = isinstance(node, _FUNCTIONS)
        self.is_conditional = bool(headers) or isinstance(node, ast.AugAssign)
        self.binds, self.changes, self.call_arguments, self.called = (set[str]() for _ in range(4))
        self.assigned_later, self.nonlocals, self.aliases = (set[str]() for _ in range(3))
        self.reads, self._inner_reads, tokens = set[str](), set[str](), list[object]()
        self.imports, self.inner_imports = dict[str, Import](), dict[str, Import]()
        self.registers_subclasses, self.values = False, dict[str, ast.expr]()
        ahead: list[tuple[Any, bool]] = [([*headers, node], False)]
        while ahead:
            part, later = ahead.pop()  # later: it runs when a function is called, not at import
            if isinstance(part, list):
                tokens.append(len(part))
                ahead += [(each, later) for each in reversed(part)]
            elif isinstance(part, ast.AST):
                tokens.append(part.__class__.__name__)
                self._scan(part, later)
                is_function = isinstance(part, _FUNCTIONS)
                if isinstance(part, _NAMED):
                    if ast.get_docstring(part, clean=False) is not None:
                        part.body = part.body[1:] or [ast.Pass()]
                    if cut == _first_line(part):
                        decorators = part.decorator_list
                        part.decorator_list = [x for x in decorators if not file.is_own(x, _TUNER)]
                for field in _fields(part.__class__):  # type: ignore[arg-type]
                    runs_later = later or (is_function and field == "body")
                    ahead.append((getattr(part, field, None), runs_later))
            else:
                tokens.append(part)
        names = {*self.inner_imports}  # and names in functions that are not local to them
        for _, code in file.codes:
            if self.line <= code.co_firstlineno <= self.end:
                names.update(code.co_names, code.co_freevars)
        self.reads |= {each for each in self._inner_reads if _root(each) in names}
        self.assigned_later = {each for each in self.assigned_later if _root(each) in names}
        self.binds &= file.names  # without the variables of comprehensions
        read = sorted(roots(self.reads) & file.imports.keys())
        self.digest = digest([*tokens, *((each, sorted(file.imports[each])) for each in read)])
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = getattr(node, "value", None)
            parts: list[Any] = [*targets, value or getattr(node, "iter", None)]
            for part in (*parts, *(x for each in parts for x in getattr(each, "elts", ()))):
                while isinstance(part, ast.Subscript) and part not in targets:
                    part = part.value  # after ``A = B["x"]``, ``A`` may be a part of ``B``
                self.aliases |= {part.id} if isinstance(part, ast.Name) else set()
            for target in targets if value else ():
                elements, values = getattr(target, "elts", None), getattr(value, "elts", ())
                pairs: Any = zip(elements, values, strict=False) if elements else [(target, value)]
                self.values |= {x.id: y for x, y in pairs if isinstance(x, ast.Name)}

    def _scan(self, node: Any, later: bool) -> None:
        """Collect the names in one node of the syntax tree."""
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
                stores.add(place_of(node))
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
                self.changes |= {_root(dotted(x)) for x in callees if isinstance(x, ast.Attribute)}

    def _call(self, node: Any, later: bool, reads: set[str], stores: set[str]) -> None:
        name, method = dotted(node.func), getattr(node.func, "attr", "")
        first = dotted(node.args[0]) if node.args else ""
        if not later:
            self.called.add(name)
        if method in _CONTAINER_MUTATORS or (
            method and not later and method not in _HARMLESS_METHODS
        ):
            stores.add(place_of(node.func.value))
        if name in ("getattr", "setattr") and len(node.args) > 1 and first:
            attribute = str(getattr(node.args[1], "value", "*"))
            (reads if name == "getattr" else stores).add(f"{first}.{attribute}")
        elif name in ("globals", "vars"):
            self.reads.add(f"{first}.*" if node.args else "*")


def _imports_of(node: ast.AST) -> dict[str, Import]:
    """Return the names that an import statement binds."""
    if isinstance(node, ast.ImportFrom):
        module, level = node.module or "", node.level
        return {x.asname or x.name: Import(module, level, x.name) for x in node.names}
    names = node.names if isinstance(node, ast.Import) else ()
    return {x.asname or _root(x.name): Import(x.name if x.asname else _root(x.name)) for x in names}


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """Return the fields that are part of a digest.

    ``type_params`` exists since Python 3.12 only.
    """
    left_out = ("ctx", "kind", "type_comment", "type_params")
    return tuple(each for each in kind._fields if each not in left_out)


def digest(parts: Iterable[object]) -> str:
    return hashlib.blake2b("\n".join(map(repr, parts)).encode(), digest_size=6).hexdigest()


def dotted(node: ast.AST | None) -> str:
    """Return ``"a.b.c"`` for this expression, ``""`` for other expressions than names."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def place_of(node: Any) -> str:
    """Return ``a.b`` for ``a.b[0].c()``, and ``a`` for ``vars(a)``: the name at the beginning."""
    if isinstance(node, ast.Call) and dotted(node.func) == "vars" and node.args:
        return place_of(node.args[0])
    inner = getattr(node, "value", getattr(node, "func", None))
    return dotted(node) or (place_of(inner) if isinstance(inner, ast.AST) else "")


def _root(name: str) -> str:
    return name.partition(".")[0]


def roots(names: Iterable[str]) -> set[str]:
    return {_root(each) for each in names}


def _first_line(node: Any) -> int:
    """Return the line of the first decorator, as in a code object."""
    return min(int(each.lineno) for each in (node, *getattr(node, "decorator_list", ())))


def _place(code: types.CodeType) -> tuple[int, str]:
    return code.co_firstlineno, code.co_name


class File:
    """The statements of a file, and which of them bind or change a name."""

    def __init__(self, lines: list[str], is_cell: bool = False) -> None:
        self.lines, self._is_cell = lines, is_cell
        tree = ast.Module(_parse(lines), [])  # not kept: it is large
        code = compile(tree, "", "exec", dont_inherit=True)
        self.codes, self.names = [*nested_code(code)][1:], {*code.co_names}
        self._known_codes = {each for _, each in self.codes}
        self._matched: dict[int, types.CodeType] = {}
        self.imports: dict[str, set[Import]] = {}
        leaves = [*_leaves(tree.body)]
        for node, _ in leaves:
            for name, found in _imports_of(node).items():
                self.imports.setdefault(name, set()).add(found)
        self.stars = self.imports.pop("*", set())
        self.statements = [Statement(self, *each) for each in leaves]
        self.assigned_later = {place for each in self.statements for place in each.assigned_later}
        places = ((x, each) for each in self.statements for x in each.changes | each.assigned_later)
        self._dotted = [(place.split("."), each) for place, each in places if "." in place]
        self._by_name = self._index()

    def is_own(self, call: ast.expr, name: str) -> bool:
        """Return whether an expression refers to, or calls, the function ``name`` of this package.

        Args:
            name: a regular expression.
        """
        root, *path = dotted(getattr(call, "func", call)).split(".")
        full = (".".join([x.module, x.attribute, *path]) for x in self.imports.get(root, ()))
        return any(re.fullmatch(rf"triton_dist\b.*\.{name}", each) for each in full)

    def _index(self) -> dict[str, list[Statement]]:
        defined = {each.defines: each for each in self.statements if each.defines}
        functions = {name for name, each in defined.items() if each.is_function}
        bound = {name for each in self.statements for name in each.binds}
        changes, by_name = defaultdict[str, list[Statement]](list), defaultdict[Any, Any](list)
        for each in self.statements:
            # Passing a function to a call, calling it or constructing an object does not change it.
            changed = each.call_arguments - functions - (each.called & defined.keys())
            for name in each.called & defined.keys():
                # ``set_up()`` changes what the function changes.
                changed |= roots(defined[name].assigned_later)
                if each.defines and defined[name].registers_subclasses:
                    changed.add(name)
            changed |= roots(each.changes) | roots(each.assigned_later) & bound - {each.defines}
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
        """Return the statements that bind or change ``name``.

        For ``module.name``, return those that assign it, a part of it, or what it is a part of.
        """
        parts = name.split(".")
        if len(parts) == 1:
            return self._by_name.get(name, [])
        return [x for place, x in self._dotted if all(map(operator.eq, place, parts))]

    def has(self, code: types.CodeType) -> bool:
        """Return whether the file compiles to ``code``: it was not edited after the import."""
        if self._matched.get(id(code)) is not code:  # a hash of a code object takes 60 us
            # A notebook compiles each statement by itself, which yields other instructions.
            in_cell = self._is_cell and any(_place(code) == _place(each) for _, each in self.codes)
            if not in_cell and code not in self._known_codes:
                return False
            self._matched[id(code)] = code
        return True

    def ordinal(self, code: types.CodeType) -> int:
        """Return the number of definitions before ``code`` that have its dotted name."""
        place = _place(code)
        path, found = min(self.codes, key=lambda each: (each[1] != code, _place(each[1]) != place))
        return [each for name, each in self.codes if name == path].index(found)

    @functools.cache  # noqa: B019
    def definitions(self, name: str, code: types.CodeType | None = None) -> list[Statement]:
        """Return functions, lambdas and classes in file order, without the statements around them.

        Args:
            name: end of the qualified name.
            code: code of the function, if only its definition is wanted.
        """
        end = f".{name.replace('.<locals>', '')}"
        same = [x for path, x in self.codes if path.endswith(end)]
        if code is not None:
            same = [each for _, each in self.codes if _place(each) == _place(code)]
        places = {*map(_place, same)}
        tree = ast.Module(_parse(self.lines), [])
        nodes: list[Any] = [each for each in ast.walk(tree) if isinstance(each, _DEFINITIONS)]
        nodes = [x for x in nodes if (_first_line(x), getattr(x, "name", "<lambda>")) in places]
        nodes.sort(key=lambda each: (each.lineno, each.col_offset))
        if code in same and len(same) == len(nodes):  # several lambdas may be in one line
            nodes = [nodes[same.index(code)]]
        return [Statement(self, node, (), _first_line(node)) for node in nodes]

    @functools.cache  # noqa: B019
    def without_tuner(self, line: int) -> dict[Statement, Statement]:
        """Return the statement around ``line``, and this statement without the tuner's decorators
        of the function that begins there."""
        pairs = zip(self.statements, _leaves(_parse(self.lines)), strict=True)
        return {x: Statement(self, *leaf, line) for x, leaf in pairs if x.line <= line <= x.end}


def _leaves(body: Iterable[ast.stmt], headers: Any = ()) -> Iterator[tuple[Any, Any]]:
    """Yield statements, also from inside ``if`` and ``try``, and the conditions of each."""
    for node in body:
        if isinstance(node, ast.If):
            if "__name__" not in ast.dump(node.test):  # it runs in scripts only
                yield from _leaves(node.body, (*headers, "if", node.test))
            yield from _leaves(node.orelse, (*headers, "else", node.test))
        elif isinstance(node, ast.Try):
            yield from _leaves([*node.body, *node.orelse, *node.finalbody], (*headers, "try"))
            for handler in node.handlers:
                yield from _leaves(handler.body, (*headers, "except", handler.type))
        else:
            yield node, headers


_parsing = threading.RLock()
"""Python 3.11 raises ``SystemError`` if threads parse at the same time."""
os.register_at_fork(
    before=_parsing.acquire, after_in_parent=_parsing.release, after_in_child=_parsing.release
)
_files: dict[str, tuple[list[str], File]] = {}


def _parse(lines: list[str]) -> list[ast.stmt]:
    with _parsing, no_garbage_collection():
        return ast.parse("".join(lines)).body


EMPTY = File([])


def file_at(path: str, scope: dict[str, Any] | None = None) -> File:
    """Return the statements of a file, or ``EMPTY`` without a text that can be parsed.

    Args:
        scope: globals of its module, whose loader has the text of a file in an archive.
    """
    linecache.checkcache(path)
    lines = linecache.getlines(path, scope)  # the same list until size or time of change differ
    if path not in _files or _files[path][0] is not lines:
        file = EMPTY
        with suppress(SyntaxError, ValueError, RecursionError), _parsing, no_garbage_collection():
            # Cells of notebooks have no time of change.
            file = File(lines, linecache.cache[path][1] is None) if lines else EMPTY  # type: ignore[misc]
        _files[path] = lines, file
    return _files[path][1]
