"""Specialisations of kernels, and the check whether a launch fits a specialisation.

A kernel also serves launches with a stricter specialisation: a kernel that was compiled for
pointers of any alignment serves aligned pointers. :meth:`Specialisation.mismatches` returns why a
launch does not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.show import show

CONSTANT = "constexpr"
"""Type of an argument that is a compile-time constant."""
DIVISIBILITY = "tt.divisibility"

Place = tuple[int, ...]
"""Index of an argument, followed by the indices in nested tuples."""


@dataclass(frozen=True)
class Specialisation:
    """Types, constants and alignments of arguments: everything that Triton specialises on."""

    types: Mapping[str, Any]
    """Type of each argument by name: a text such as ``*fp16``, or a tuple of types."""
    constants: Mapping[Place, codec.Tree]
    attributes: Mapping[Place, Mapping[str, int]]
    """Attributes of the argument at ``Place``, such as ``{"tt.divisibility": 16}``."""

    @functools.cached_property
    def leaves(self) -> dict[Place, tuple[str, str]]:
        """Return (name, type) of each argument; members of a tuple are named ``pair[0]``."""
        named = list(self.types.items())
        return {place: leaf for i, one in enumerate(named) for place, leaf in _leaves((i,), *one)}

    def to_tree(self) -> codec.Tree:
        """Return ``{"type": "*fp16", "tt.divisibility": 16}`` or ``{"constant": 64}`` by name.

        A tuple is a list of these.
        """
        return {n: self._tree((i,), kind) for i, (n, kind) in enumerate(self.types.items())}

    def _tree(self, place: Place, kind: Any) -> codec.Tree:
        if isinstance(kind, (tuple, list)):
            return [self._tree((*place, index), inner) for index, inner in enumerate(kind)]
        if kind == CONSTANT:
            return {"constant": self.constants.get(place)}
        return {"type": str(kind), **self.attributes.get(place, {})}

    @classmethod
    def from_tree(cls, tree: Mapping[str, codec.Tree]) -> Specialisation:
        """Return the specialisation that ``to_tree`` wrote; raise for another format."""
        constants: dict[Place, codec.Tree] = {}
        attributes: dict[Place, dict[str, int]] = {}

        def read(place: Place, node: Any) -> Any:
            if isinstance(node, list):
                return tuple(read((*place, index), inner) for index, inner in enumerate(node))
            if "constant" in node:
                constants[place] = node["constant"]
                return CONSTANT
            known = {name: int(value) for name, value in node.items() if name != "type"}
            if known:
                attributes[place] = known
            return str(node["type"])

        types = {name: read((i,), node) for i, (name, node) in enumerate(tree.items())}
        return cls(types, constants, attributes)

    def readable(self) -> dict[str, str]:
        """Return readable text by name: ``*fp16, divisibility 16``, or the value of a constant."""
        return {name: _readable(tree) for name, tree in self.to_tree().items()}

    def mismatches(self, call: Specialisation) -> list[str]:
        """Return why a kernel with this specialisation cannot serve a launch specialised as
        ``call``; empty if it can."""
        if list(self.types) != list(call.types):
            return [
                f"its arguments are ({', '.join(self.types)}), the function's arguments are "
                f"({', '.join(call.types)})"
            ]
        places = [*self.leaves, *(place for place in call.leaves if place not in self.leaves)]
        return [why for place in places if (why := self._mismatch(place, call))]

    def _mismatch(self, place: Place, call: Specialisation) -> str:
        call_name, call_type = call.leaves.get(place, ("", "nothing"))
        name, compiled_type = self.leaves.get(place, (call_name, "nothing"))
        if compiled_type == CONSTANT:
            compiled_value, call_value = self.constants.get(place), call.constants.get(place)
            has = f"it has {name} = {show(compiled_value)}"
            if call_type != CONSTANT:
                return f"{has}, the call has another value of type {call_type}"
            differs = codec.text(compiled_value) != codec.text(call_value)
            return f"{has}, the call has {show(call_value)}" if differs else ""
        value: Any = call.constants.get(place)
        if call_type == CONSTANT and not (type(value) is int and _fits(value, compiled_type)):
            return f"it takes {name} as {compiled_type}, the call has the constant {show(value)}"
        is_widened = (compiled_type, call_type) == ("i64", "i32")
        if call_type not in (CONSTANT, compiled_type) and not is_widened:
            return f"it takes {name} as {compiled_type}, the call has {call_type}"
        for attribute, needed in self.attributes.get(place, {}).items():
            if call_type == CONSTANT and attribute == DIVISIBILITY and value % needed == 0:
                continue
            if call.attributes.get(place, {}).get(attribute) != needed:
                if attribute != DIVISIBILITY:
                    return f"it requires {attribute} = {needed} of {name}, the call's lacks it"
                what = "at an address" if compiled_type.startswith("*") else "to be"
                return f"it requires {name} {what} divisible by {needed}, the call's is not"
        return ""


def _leaves(place: Place, name: str, kind: Any) -> Iterator[tuple[Place, tuple[str, str]]]:
    if isinstance(kind, (tuple, list)):
        for index, inner in enumerate(kind):
            yield from _leaves((*place, index), f"{name}[{index}]", inner)
    else:
        yield place, (name, str(kind))


def _readable(tree: Any) -> str:
    if isinstance(tree, list):
        return f"({', '.join(map(_readable, tree))})"
    if "constant" in tree:
        return str(show(tree["constant"]))
    known = [f"{name.removeprefix('tt.')} {n}" for name, n in tree.items() if name != "type"]
    return ", ".join([tree["type"], *known])


def _fits(value: int, kind: str) -> bool:
    bits = {"i8": 7, "i16": 15, "i32": 31, "i64": 63}.get(kind, 0)
    return -(2**bits) <= value < 2**bits and bits > 0


def tree_of(value: Any) -> codec.Tree:
    """Return a constant of a kernel as a JSON tree; raise ``TypeError`` if it has no exact text."""
    if isinstance(value, tl.constexpr):
        return tree_of(value.value)
    if isinstance(value, tl.dtype):
        return {"triton.dtype": str(value)}
    if type(value) is tuple:
        return {"tuple": [tree_of(item) for item in value]}
    if hasattr(value, "cache_key") and hasattr(value, "fn"):
        return {"kernel": f"{value.__module__}:{value.__qualname__}"}
    return codec.encode(value)


def value_of(tree: codec.Tree) -> Any:
    """Return the constant of a tree; raise ``ValueError`` if it can only be compared."""
    match tree:
        case {"triton.dtype": str(name)}:
            return tl.dtype(name)
        case {"tuple": list(items)}:
            return tuple(map(value_of, items))
        case {"float": str(text)}:
            return float(text)
        case dict() | list():
            raise ValueError(f"{show(tree)} can only be compared")
    return tree


def can_be_read(tree: codec.Tree) -> bool:
    try:
        value_of(tree)
    except ValueError:
        return False
    return True
