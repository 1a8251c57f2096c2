"""Specialisations of kernels, and the check whether a kernel can serve a launch.

A kernel also serves launches with a stricter specialisation: a kernel that was compiled for
pointers of any alignment serves aligned pointers. :meth:`Specialisation.mismatches` returns why a
kernel cannot serve a launch.
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

ArgumentPath = tuple[int, ...]
"""Index of an argument; for a member of a tuple, followed by its indices in the nested tuples."""


@dataclass(frozen=True)
class Specialisation:
    """Types, constants and alignments of arguments: everything that Triton specialises on."""

    types: Mapping[str, Any]
    """Type of each argument by name: a string such as ``*fp16``, or a tuple of types."""
    constants: Mapping[ArgumentPath, codec.Tree]
    attributes: Mapping[ArgumentPath, Mapping[str, int]]
    """Attributes of each argument by path, such as ``{"tt.divisibility": 16}``."""

    @functools.cached_property
    def leaves(self) -> dict[ArgumentPath, tuple[str, str]]:
        """Name and type by path. Members replace tuples, under names such as ``pair[0]``."""
        named = list(self.types.items())
        return {path: leaf for i, one in enumerate(named) for path, leaf in _leaves((i,), *one)}

    def to_tree(self) -> codec.Tree:
        """Return a JSON tree by argument name. Values are ``{"type": "*fp16", "tt.divisibility":
        16}`` or ``{"constant": 64}``; for a tuple, a list of such values."""
        return {n: self._tree((i,), arg_type) for i, (n, arg_type) in enumerate(self.types.items())}

    def _tree(self, path: ArgumentPath, arg_type: Any) -> codec.Tree:
        if isinstance(arg_type, (tuple, list)):
            return [self._tree((*path, index), inner) for index, inner in enumerate(arg_type)]
        if arg_type == CONSTANT:
            return {"constant": self.constants.get(path)}
        return {"type": str(arg_type), **self.attributes.get(path, {})}

    @classmethod
    def from_tree(cls, tree: Mapping[str, codec.Tree]) -> Specialisation:
        """Return the specialisation of a tree from ``to_tree``; raise for another format."""
        constants: dict[ArgumentPath, codec.Tree] = {}
        attributes: dict[ArgumentPath, dict[str, int]] = {}

        def read(path: ArgumentPath, node: Any) -> Any:
            if isinstance(node, list):
                return tuple(read((*path, index), inner) for index, inner in enumerate(node))
            if "constant" in node:
                constants[path] = node["constant"]
                return CONSTANT
            known = {name: int(value) for name, value in node.items() if name != "type"}
            if known:
                attributes[path] = known
            return str(node["type"])

        types = {name: read((i,), node) for i, (name, node) in enumerate(tree.items())}
        return cls(types, constants, attributes)

    def argument_texts(self) -> dict[str, str]:
        """Return readable text by name: ``*fp16, divisibility 16``, or the value of a constant."""
        return {name: _readable(tree) for name, tree in self.to_tree().items()}

    def mismatches(self, launch_specialisation: Specialisation) -> list[str]:
        """Return the reasons why a kernel with this specialisation cannot serve a launch with
        specialisation ``launch_specialisation``; empty if it can."""
        if list(self.types) != list(launch_specialisation.types):
            return [
                f"its arguments are ({', '.join(self.types)}), the function's arguments are "
                f"({', '.join(launch_specialisation.types)})"
            ]
        paths = [
            *self.leaves,
            *(path for path in launch_specialisation.leaves if path not in self.leaves),
        ]
        return [why for path in paths if (why := self._mismatch(path, launch_specialisation))]

    def _mismatch(self, path: ArgumentPath, launch_specialisation: Specialisation) -> str:
        call_name, call_type = launch_specialisation.leaves.get(path, ("", "nothing"))
        name, compiled_type = self.leaves.get(path, (call_name, "nothing"))
        if compiled_type == CONSTANT:
            compiled_value, call_value = (
                self.constants.get(path),
                launch_specialisation.constants.get(path),
            )
            has = f"it has {name} = {show(compiled_value)}"
            if call_type != CONSTANT:
                return f"{has}, the call has another value of type {call_type}"
            differs = codec.to_json(compiled_value) != codec.to_json(call_value)
            return f"{has}, the call has {show(call_value)}" if differs else ""
        value: Any = launch_specialisation.constants.get(path)
        if call_type == CONSTANT and not (type(value) is int and _fits_type(value, compiled_type)):
            return f"it takes {name} as {compiled_type}, the call has the constant {show(value)}"
        is_widened = (compiled_type, call_type) == ("i64", "i32")
        if call_type not in (CONSTANT, compiled_type) and not is_widened:
            return f"it takes {name} as {compiled_type}, the call has {call_type}"
        for attribute, needed in self.attributes.get(path, {}).items():
            if call_type == CONSTANT and attribute == DIVISIBILITY and value % needed == 0:
                continue
            if launch_specialisation.attributes.get(path, {}).get(attribute) != needed:
                if attribute != DIVISIBILITY:
                    return f"it requires {attribute} = {needed} of {name}, the call lacks it"
                what = "at an address" if compiled_type.startswith("*") else "to be"
                return f"it requires {name} {what} divisible by {needed}, the call's is not"
        return ""


def _leaves(
    path: ArgumentPath, name: str, arg_type: Any
) -> Iterator[tuple[ArgumentPath, tuple[str, str]]]:
    if isinstance(arg_type, (tuple, list)):
        for index, inner in enumerate(arg_type):
            yield from _leaves((*path, index), f"{name}[{index}]", inner)
    else:
        yield path, (name, str(arg_type))


def _readable(tree: Any) -> str:
    if isinstance(tree, list):
        return f"({', '.join(map(_readable, tree))})"
    if "constant" in tree:
        return str(show(tree["constant"]))
    known = [f"{name.removeprefix('tt.')} {n}" for name, n in tree.items() if name != "type"]
    return ", ".join([tree["type"], *known])


def _fits_type(value: int, arg_type: str) -> bool:
    bits = {"i8": 7, "i16": 15, "i32": 31, "i64": 63}.get(arg_type, 0)
    return -(2**bits) <= value < 2**bits and bits > 0


def constant_tree(value: Any) -> codec.Tree:
    """Return a constant of a kernel as a JSON tree; raise ``TypeError`` if this is not possible."""
    if isinstance(value, tl.constexpr):
        return constant_tree(value.value)
    if isinstance(value, tl.dtype):
        return {"triton.dtype": str(value)}
    if type(value) is tuple:
        return {"tuple": [constant_tree(item) for item in value]}
    if hasattr(value, "cache_key") and hasattr(value, "fn"):
        return {"kernel": f"{value.__module__}:{value.__qualname__}"}
    return codec.encode(value)


def restore_constant(tree: codec.Tree) -> Any:
    """Return the constant of a tree from ``constant_tree``. Raise ``ValueError`` if the constant
    cannot be restored, only compared."""
    match tree:
        case {"triton.dtype": str(name)}:
            return tl.dtype(name)
        case {"tuple": list(items)}:
            return tuple(map(restore_constant, items))
        case {"float": str(text)}:
            return float(text)
        case dict() | list():
            raise ValueError(f"{show(tree)} can only be compared")
    return tree


def is_restorable(tree: codec.Tree) -> bool:
    try:
        restore_constant(tree)
    except ValueError:
        return False
    return True
