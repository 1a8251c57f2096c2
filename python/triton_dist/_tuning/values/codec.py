"""Python values as JSON trees: exact, canonical and readable, so that they can name a cache entry.

``None``, ``bool``, ``int``, ``str``, finite ``float`` and ``list`` are themselves; all else is an
object whose first name says what it is: ``{"tuple": [1, 2]}``, ``{"dtype": "torch.float16"}``. So a
tuple is never taken for a list, nor ``True`` for ``1``. Two kinds are written as the Python values
that they equal: ``torch.Size`` as a tuple, numpy scalars as Python scalars.

torch and triton are recognised by shape and never imported. Trees are not made values again: what
is looked up is compared by its text or digest.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import types
from collections.abc import Callable
from typing import Any

Tree = Any
"""A value that ``json`` reads and writes."""


def encode(value: object, binding: bool = True) -> Tree:
    """``value`` as a tree.

    Args:
        binding: what functions bind counts too, besides their code. ``False`` is for values of a
            config: there a ``functools.partial`` is what it calls with what it gives. Elsewhere it
            has no text, so that who asks looks at the code in it.

    Raises:
        TypeError: a value that has no exact and stable text; says which.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}  # type: ignore[arg-type]
    if isinstance(value, enum.Enum):
        # A Flag's combination has no name of its own, its value always does.
        return {
            "enum": _name_of(kind),
            "value" if isinstance(value, enum.Flag) else "name": encode(value.value)
            if isinstance(value, enum.Flag)
            else value.name,
        }
    inner = functools.partial(encode, binding=binding)
    if kind is list:
        return [inner(item) for item in value]  # type: ignore[attr-defined]
    if isinstance(value, tuple):
        return _encode_tuple(value, inner)
    if kind is dict:
        pairs = [[inner(name), inner(item)] for name, item in value.items()]  # type: ignore[attr-defined]
        return {"dict": sorted(pairs, key=text)}
    if kind in (set, frozenset):
        return {kind.__name__: sorted((inner(item) for item in value), key=text)}  # type: ignore[attr-defined]
    if kind is bytes:
        return {"bytes": value.hex()}  # type: ignore[attr-defined]
    if kind is complex:
        return {"complex": repr(value)}
    if is_triton_config(value):
        return _encode_triton_config(value, inner)
    if isinstance(value, type):
        return {"class": _name_of(value)}
    if dataclasses.is_dataclass(value) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        fields = {f.name: inner(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"dataclass": _name_of(kind), "fields": fields}
    if kind is range:
        return {"range": _range(value)}  # type: ignore[arg-type]
    if kind.__module__ == "torch" and kind.__name__ in _OF_TORCH:
        return {kind.__name__: str(value)}
    if kind.__module__ == "triton.language.core" and kind.__name__ in _OF_TRITON:
        return {"dtype": f"triton.{value}"}
    if (
        kind.__module__ == "numpy"
        and hasattr(value, "item")
        and getattr(value, "shape", None) == ()
    ):
        return inner(value.item())
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return _encode_function(value, binding)
    if is_triton_kernel(value):
        return {"kernel": _encode_function(value.fn, binding)}  # type: ignore[attr-defined]
    if kind is functools.partial and not binding:
        given = inner(value.keywords)  # type: ignore[attr-defined]
        return {"partial": [inner(value.func), *map(inner, value.args)], "keywords": given}  # type: ignore[attr-defined]
    raise TypeError(f"{value!r} of type {kind.__module__}.{kind.__qualname__} has no stable text")


def is_exact(value: object, binding: bool = True) -> bool:
    """True if ``value`` has a tree, which no other value has; ``binding`` as of :func:`encode`."""
    try:
        encode(value, binding)
    except TypeError:
        return False
    return True


def loads(content: str | bytes) -> Tree:
    """The tree in a text of JSON, whose numbers are numbers: no NaN, and nothing infinite.

    Raises:
        ValueError: it is none; one that is nested too deeply among them.
    """
    try:
        return json.loads(content, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except MemoryError as error:
        raise ValueError("it does not fit into the memory") from error


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError(f"it has {written} in it, which is no number")
    return value


def text(tree: Tree) -> str:
    """The one text of ``tree``: compact JSON, ASCII, in the order that the tree has."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


def digest(*trees: Tree) -> str:
    """Hash of trees, 32 hexadecimal characters.

    The order of an object's names does not count, nor the module of a class or function: renaming a
    file changes no digest.
    """
    canonical = json.dumps(
        _without_modules(trees), separators=(",", ":"), sort_keys=True, allow_nan=False
    )
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def is_triton_config(value: object) -> bool:
    """True if ``value`` has the shape of a ``triton.Config``."""
    return (
        not isinstance(value, type)
        and isinstance(getattr(value, "kwargs", None), dict)
        and hasattr(value, "num_warps")
        and hasattr(value, "num_stages")
    )


def is_triton_kernel(value: object) -> bool:
    """True for what ``triton.jit`` makes of a function."""
    is_of_triton = type(value).__module__.startswith("triton.")
    return is_of_triton and isinstance(getattr(value, "fn", None), types.FunctionType)


_OF_TORCH = frozenset({"dtype", "device", "layout", "memory_format"})
_OF_TRITON = frozenset({"dtype", "pointer_type", "block_type"})


def _range(value: range) -> list[int]:
    """Start, stop and step; of equal ranges the same."""
    if len(value) < 2:
        return [value[0], value[0] + 1, 1] if value else [0, 0, 1]
    return [value.start, value[-1] + value.step, value.step]


def _encode_tuple(value: tuple[Any, ...], inner: Callable[[object], Tree]) -> Tree:
    items = [inner(item) for item in value]
    kind = type(value)
    if hasattr(kind, "_fields"):
        return {"namedtuple": _name_of(kind), "items": items}
    if kind is tuple or (kind.__module__, kind.__name__) == ("torch", "Size"):
        return {"tuple": items}
    raise TypeError(f"{value!r} of type {kind.__module__}.{kind.__qualname__} has no stable text")


def _encode_triton_config(value: Any, inner: Callable[[object], Tree]) -> Tree:
    """Meta-parameters, then options. ``None`` options are left out: newer Triton versions add
    some."""
    options = {name: option for name, option in sorted(vars(value).items()) if option is not None}
    meta = {str(name): inner(item) for name, item in options.pop("kwargs").items()}
    return {"triton.Config": meta} | {name: inner(option) for name, option in options.items()}


def _encode_function(value: Any, binding: bool) -> Tree:
    """Its name; one that was made inside another function, also a digest of code and closure."""
    tree = {"function": _name_of(value)}
    code = getattr(value, "__code__", None)
    if code is not None and "<" in value.__qualname__:
        closure = (value.__closure__ or ()) if binding else ()
        cells = [encode(cell.cell_contents) for cell in closure]
        tree["code"] = digest(code.co_code.hex(), _constants(code), list(code.co_names), cells)
    return tree


def _constants(code: types.CodeType) -> Tree:
    """Constants of a code object and those inside it; a set's ``repr`` differs by process."""
    return [
        [each.co_code.hex(), _constants(each), list(each.co_names)]
        if isinstance(each, types.CodeType)
        else sorted(map(repr, each))
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
    ]


def _name_of(item: Any) -> str:
    return f"{item.__module__}:{item.__qualname__}"


_NAMED = frozenset({"enum", "namedtuple", "class", "dataclass", "function"})


def _without_modules(tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return [_without_modules(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        name: item.rpartition(":")[2]
        if name in _NAMED and isinstance(item, str)
        else _without_modules(item)
        for name, item in tree.items()
    }
