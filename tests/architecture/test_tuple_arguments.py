"""Tuples among the arguments of kernels keep the rules of ``docs/how-to/wait-for-a-peer.md``.

Triton breaks most of them in silence: two tuples whose members have the same types are one to it,
whatever their fields are called. A tuple of kernels is a ``NamedTuple`` whose fields are all
``Any``.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import pytest

from tests.architecture.source import modules, name, tree

# ``values`` and ``type`` are what Triton's own tuples have by these names.
FORBIDDEN = {"values", "type"}

Classes = dict[str, tuple[str, ...]]
Parameters = dict[str, ast.expr | None]
"""By name; of those that are not annotated, ``None``."""


def classes_in(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            if all(ast.unparse(field.annotation) == "Any" for field in fields):
                yield node.name, tuple(ast.unparse(field.target) for field in fields)


def kernels_in(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef, set[str]]]:
    """Functions for the device, and what they do not specialise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if ast.unparse(decorator).split("(")[0] in ("jit", "gluon.jit"):
                    words = [
                        each.value for each in ast.walk(decorator) if isinstance(each, ast.Constant)
                    ]
                    yield node, {word for word in words if isinstance(word, str)}


def parameters_of(kernel: ast.FunctionDef) -> Parameters:
    return {each.arg: each.annotation for each in kernel.args.args}


def members_read(kernel: ast.FunctionDef) -> dict[str, set[str]]:
    """By parameter, its attributes that are read."""
    read: dict[str, set[str]] = {parameter: set() for parameter in parameters_of(kernel)}
    for node in ast.walk(kernel):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            read.get(node.value.id, set()).add(node.attr)
    return read


def offences_of_classes(classes: Classes) -> Iterator[str]:
    known: dict[frozenset[str], str] = {}
    for each, fields in classes.items():
        if FORBIDDEN & set(fields):
            yield f"{each}: {FORBIDDEN & set(fields)} mean something else to Triton"
        other = known.setdefault(frozenset(fields), each)
        if other != each:
            yield f"{each}: the fields of {other}"


def offences_of_kernels(
    kernels: Iterable[tuple[ast.FunctionDef, set[str]]], classes: Classes
) -> Iterator[str]:
    """``classes``: of the whole package. A parameter is of the class whose field is read of it."""
    fields = {field for each in classes.values() for field in each}
    class_of: dict[str, str] = {}
    for kernel, unspecialised in kernels:
        parameters = parameters_of(kernel)
        for unknown in sorted(unspecialised - parameters.keys()):
            yield f"{kernel.name}: {unknown} is not a parameter, and Triton ignores its name"
        for parameter, read in members_read(kernel).items():
            if not read & fields or read & {"dtype", "to", "load", "store"}:
                continue  # a tensor, a pointer or a descriptor
            fitting = [each for each, members in classes.items() if read <= set(members)]
            if parameter in class_of:
                fitting = [each for each in fitting if each == class_of[parameter]]
            if not fitting:
                yield f"{kernel.name}: {parameter} is of no class, or of two: {sorted(read)}"
            elif len(fitting) == 1:
                class_of[parameter] = fitting[0]
            if parameter in unspecialised:
                yield f"{kernel.name}: {parameter} is specialised all the same"
        yield from offences_of_body(kernel, parameters, classes)


def offences_of_body(
    kernel: ast.FunctionDef, parameters: Parameters, classes: Classes
) -> Iterator[str]:
    constants = {each for each, kind in parameters.items() if kind is not None}
    for node in ast.walk(kernel):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in classes and node.args:
            yield f"{kernel.name}: {ast.unparse(node.func)} is made by position"
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in constants:
            taken = members_read(kernel)[ast.unparse(node.value)]
            if any(taken & set(fields) for fields in classes.values()):
                yield f"{kernel.name}: {ast.unparse(node)} makes tensors of constants"


def offences(trees: Sequence[ast.AST]) -> list[str]:
    classes = dict(each for tree in trees for each in classes_in(tree))
    kernels = [each for tree in trees for each in kernels_in(tree)]
    return [*offences_of_classes(classes), *offences_of_kernels(kernels, classes)]


@pytest.fixture(scope="module")
def trees() -> list[ast.AST]:
    return [tree(path) for path in modules() if name(path).startswith("kernels/")]


def test_tuples_of_kernels_keep_the_rules(trees: list[ast.AST]) -> None:
    found = offences(trees)
    assert not found, "\n".join(found)


def test_kernels_have_few_parameters(trees: list[ast.AST]) -> None:
    kernels = [kernel for each in trees for kernel, _ in kernels_in(each)]
    assert len(kernels) > 50
    long = {kernel.name: n for kernel in kernels if (n := len(parameters_of(kernel))) > 20}
    assert not long, "group what belongs together in tuples"


GOOD = """
    class Slot(NamedTuple):
        data: Any
        epoch: Any

    class Tile(NamedTuple):
        M: Any
        N: Any

    @jit(do_not_specialize=["rank"])
    def kernel(slot, rank, tile: tl.constexpr):
        M: tl.constexpr = tile.M
        inner(Slot(data=slot.data, epoch=slot.epoch), M)

    @jit
    def inner(slot, M: tl.constexpr):
        tl.store(slot.data, M)
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("M: Any\n        N", "epoch: Any\n        data", "the fields of Slot"),
        ("N: Any", "type: Any", "mean something else"),
        ('["rank"]', '["rank", "slot"]', "specialised all the same"),
        ('["rank"]', '["ranks"]', "is not a parameter"),
        ("Slot(data=slot.data, epoch=", "Slot(slot.data, epoch=", "by position"),
        ("M: tl.constexpr = tile.M", "M: tl.constexpr = tile.M; u = tile", "makes tensors"),
        ("tl.store(slot.data, M)", "tl.store(slot.M, M)", "of no class, or of two"),
    ],
)
def test_a_rule_that_is_broken_is_found(old: str, new: str, found: str) -> None:
    assert offences([ast.parse(textwrap.dedent(GOOD))]) == []
    assert old in GOOD
    broken = ast.parse(textwrap.dedent(GOOD.replace(old, new)))
    assert any(found in each for each in offences([broken]))
