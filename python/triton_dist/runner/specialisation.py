"""Specialisations of kernels, and launches that fit them or do not.

A kernel serves the launches that it was specialised for, and those that are more special: one that
was made for pointers of any alignment serves aligned ones. :meth:`Specialisation.refusals` says,
before anything is launched, why a launch is none of these.
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
"""Type of an argument that is part of the code."""
DIVISIBILITY = "tt.divisibility"

Place = tuple[int, ...]
"""Index of an argument; after it, those of the tuples in it."""


@dataclass(frozen=True)
class Specialisation:
    """Types, constants and alignments of arguments: all that Triton makes a kernel for."""

    types: Mapping[str, Any]
    """Type of each argument by its name: a text such as ``*fp16``, or a tuple of them."""
    constants: Mapping[Place, codec.Tree]
    attributes: Mapping[Place, Mapping[str, int]]
    """Known of an argument at ``Place``: ``{"tt.divisibility": 16}``."""

    @functools.cached_property
    def leaves(self) -> dict[Place, tuple[str, str]]:
        """(name, type) of each argument that is no tuple; ``pair[0]`` for members of one."""
        named = list(self.types.items())
        return {place: leaf for i, one in enumerate(named) for place, leaf in _leaves((i,), *one)}

    def to_tree(self) -> codec.Tree:
        """By name ``{"type": "*fp16", "tt.divisibility": 16}`` or ``{"constant": 64}``; of a tuple
        a list of them."""
        return {n: self._tree((i,), kind) for i, (n, kind) in enumerate(self.types.items())}

    def _tree(self, place: Place, kind: Any) -> codec.Tree:
        if isinstance(kind, (tuple, list)):
            return [self._tree((*place, index), inner) for index, inner in enumerate(kind)]
        if kind == CONSTANT:
            return {"constant": self.constants.get(place)}
        return {"type": str(kind), **self.attributes.get(place, {})}

    @classmethod
    def from_tree(cls, tree: Mapping[str, codec.Tree]) -> Specialisation:
        """Read what ``to_tree`` wrote.

        Raises:
            KeyError, TypeError, AttributeError: it did not.
        """
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

    def shown(self) -> dict[str, str]:
        """By name what a person would say: ``*fp16, divisibility 16``; of a constant its value."""
        return {name: _shown(tree) for name, tree in self.to_tree().items()}

    def refusals(self, call: Specialisation) -> list[str]:
        """Sentences on what a launch specialised as ``call`` has that a kernel made for this one
        does not take; empty if it takes all."""
        if list(self.types) != list(call.types):
            return [
                f"its arguments are ({', '.join(self.types)}), those of the function "
                f"({', '.join(call.types)})"
            ]
        places = [*self.leaves, *(place for place in call.leaves if place not in self.leaves)]
        return [why for place in places if (why := self._refusal(place, call))]

    def _refusal(self, place: Place, call: Specialisation) -> str:
        name, wanted = self.leaves.get(place, (call.leaves.get(place, ("", ""))[0], "nothing"))
        _, have = call.leaves.get(place, ("", "nothing"))
        if wanted == CONSTANT:
            own, given = self.constants.get(place), call.constants.get(place)
            if have != CONSTANT:
                return f"it has {name} = {show(own)}, the call another value, of type {have}"
            differs = codec.text(own) != codec.text(given)
            return f"it has {name} = {show(own)}, the call {show(given)}" if differs else ""
        value: Any = call.constants.get(place)
        if have == CONSTANT and not (type(value) is int and _fits(value, wanted)):
            return f"it takes {name} as {wanted}, the call has the constant {show(value)}"
        if have != CONSTANT and have != wanted and (wanted, have) != ("i64", "i32"):
            return f"it takes {name} as {wanted}, the call has {have}"
        for attribute, needed in self.attributes.get(place, {}).items():
            if have == CONSTANT and attribute == DIVISIBILITY and value % needed == 0:
                continue
            if call.attributes.get(place, {}).get(attribute) != needed:
                if attribute != DIVISIBILITY:
                    return f"it needs {attribute} = {needed} of {name}, which the call's has not"
                what = "at an address" if wanted.startswith("*") else "to be"
                return f"it needs {name} {what} divisible by {needed}, that of the call is not"
        return ""


def _leaves(place: Place, name: str, kind: Any) -> Iterator[tuple[Place, tuple[str, str]]]:
    if isinstance(kind, (tuple, list)):
        for index, inner in enumerate(kind):
            yield from _leaves((*place, index), f"{name}[{index}]", inner)
    else:
        yield place, (name, str(kind))


def _shown(tree: Any) -> str:
    if isinstance(tree, list):
        return f"({', '.join(map(_shown, tree))})"
    if "constant" in tree:
        return str(show(tree["constant"]))
    known = [f"{name.removeprefix('tt.')} {n}" for name, n in tree.items() if name != "type"]
    return ", ".join([tree["type"], *known])


def _fits(value: int, kind: str) -> bool:
    bits = {"i8": 7, "i16": 15, "i32": 31, "i64": 63}.get(kind, 0)
    return -(2**bits) <= value < 2**bits and bits > 0


def tree_of(value: Any) -> codec.Tree:
    """A constant of a kernel as a tree of JSON; Triton's dtypes and kernels by their names.

    Raises:
        TypeError: a value that has no exact text.
    """
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
    """The constant that ``tree_of`` wrote as ``tree``.

    Raises:
        ValueError: it is of a kind that is only compared.
    """
    match tree:
        case {"triton.dtype": str(name)}:
            return tl.dtype(name)
        case {"tuple": list(items)}:
            return tuple(map(value_of, items))
        case {"float": str(text)}:
            return float(text)
        case dict() | list():
            raise ValueError(f"{show(tree)} is only compared")
    return tree


def can_be_read(tree: codec.Tree) -> bool:
    """True if ``value_of`` can."""
    try:
        value_of(tree)
    except ValueError:
        return False
    return True
