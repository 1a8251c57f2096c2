"""Encode Python values as JSON trees, for keys and configs that are compared or hashed.

Unequal values have unequal trees, and a value has the same tree in each process. ``None``,
``bool``, ``int``, ``str``, finite ``float`` and ``list`` are encoded as JSON values. A value of
another type is encoded as an object whose first name is the type: ``{"tuple": [1, 2]}``,
``{"dtype": "torch.float16"}``. Thus tuples differ from lists, and ``True`` from ``1``. A
``torch.Size`` is encoded as a tuple, and a numpy scalar as a Python scalar.

Values of torch and Triton are recognised by their attributes, so neither package is imported. There
is no decoder, because lookups compare texts or digests.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

Tree = Any
"""A value that ``json`` can read and write."""


def encode(value: object, with_bound_values: bool = True) -> Tree:
    """Return ``value`` as a tree.

    Args:
        with_bound_values: for a function with a closure, include the values in its cells in
            addition to its code; raise for a ``functools.partial``. With ``False``, ignore the
            cells, and encode a partial as its function and arguments.

    Raises:
        TypeError: ``value`` contains a value of another type, for which no tree is defined.
    """
    cls = type(value)
    if value is None or cls in (bool, int, str):
        return value
    if cls is float:
        return value if math.isfinite(value) else {"float": repr(value)}  # type: ignore[arg-type]
    if isinstance(value, enum.Enum):
        # A combination of flags has no name, but always has a value.
        return {
            "enum": _qualified_name(cls),
            "value" if isinstance(value, enum.Flag) else "name": encode(value.value)
            if isinstance(value, enum.Flag)
            else value.name,
        }
    encode_item = functools.partial(encode, with_bound_values=with_bound_values)
    if cls is list:
        return [encode_item(item) for item in value]  # type: ignore[attr-defined]
    if isinstance(value, tuple):
        return _encode_tuple(value, encode_item)
    if cls is dict:
        pairs = [[encode_item(name), encode_item(item)] for name, item in value.items()]  # type: ignore[attr-defined]
        return {"dict": sorted(pairs, key=to_json)}
    if cls in (set, frozenset):
        return {cls.__name__: sorted((encode_item(item) for item in value), key=to_json)}  # type: ignore[attr-defined]
    if cls is bytes:
        return {"bytes": value.hex()}  # type: ignore[attr-defined]
    if cls is complex:
        return {"complex": repr(value)}
    if is_triton_config(value):
        return _encode_triton_config(value, encode_item)
    if isinstance(value, type):
        return {"class": _qualified_name(value)}
    if dataclasses.is_dataclass(value) and cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        fields = {f.name: encode_item(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"dataclass": _qualified_name(cls), "fields": fields}
    if cls is range:
        return {"range": _range(value)}  # type: ignore[arg-type]
    if cls.__module__ == "torch" and cls.__name__ in _TORCH_TYPES:
        return {cls.__name__: str(value)}
    if cls.__module__ == "triton.language.core" and cls.__name__ in _TRITON_TYPES:
        return {"dtype": f"triton.{value}"}
    if cls.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", None) == ():
        return encode_item(value.item())
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return _encode_function(value, with_bound_values)
    if is_triton_kernel(value):
        return {"kernel": _encode_function(value.fn, with_bound_values)}  # type: ignore[attr-defined]
    if cls is functools.partial and not with_bound_values:
        keywords = encode_item(value.keywords)  # type: ignore[attr-defined]
        arguments = [encode_item(value.func), *map(encode_item, value.args)]  # type: ignore[attr-defined]
        return {"partial": arguments, "keywords": keywords}
    raise TypeError(f"{value!r} of type {cls.__module__}.{cls.__qualname__} has no stable text")


def is_encodable(value: object, with_bound_values: bool = True) -> bool:
    """Return whether :func:`encode` accepts ``value``."""
    try:
        encode(value, with_bound_values)
    except TypeError:
        return False
    return True


def loads(content: str | bytes) -> Tree:
    """Parse JSON; reject NaN and infinite numbers.

    Raises:
        ValueError: ``content`` is not valid, is nested too deeply, or does not fit into memory.
    """
    try:
        return json.loads(content, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except MemoryError as error:
        raise ValueError("it does not fit into memory") from error


def _finite(number_text: str) -> float:
    value = float(number_text)
    if not math.isfinite(value):
        raise ValueError(f"it contains {number_text}, which is not a finite number")
    return value


def to_json(tree: Tree) -> str:
    """Return ``tree`` as compact ASCII JSON, with the names of objects in their present order."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


def digest(*trees: Tree) -> str:
    """Return a hash of ``trees``, 32 hexadecimal characters.

    The order of names in an object is ignored. So are the modules of classes and functions, so
    renaming a file changes no digest.
    """
    canonical = json.dumps(
        _without_modules(trees), separators=(",", ":"), sort_keys=True, allow_nan=False
    )
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def is_triton_config(value: object) -> bool:
    """Return whether ``value`` has the attributes of a ``triton.Config``."""
    return (
        not isinstance(value, type)
        and isinstance(getattr(value, "kwargs", None), dict)
        and hasattr(value, "num_warps")
        and hasattr(value, "num_stages")
    )


def is_triton_kernel(value: object) -> bool:
    """Return whether ``value`` is a result of ``triton.jit``."""
    is_from_triton = type(value).__module__.startswith("triton.")
    return is_from_triton and isinstance(getattr(value, "fn", None), types.FunctionType)


_TORCH_TYPES = frozenset({"dtype", "device", "layout", "memory_format"})
_TRITON_TYPES = frozenset({"dtype", "pointer_type", "block_type"})


def _range(value: range) -> list[int]:
    """Return start, stop and step, normalised so that equal ranges have equal results."""
    if len(value) < 2:
        return [value[0], value[0] + 1, 1] if value else [0, 0, 1]
    return [value.start, value[-1] + value.step, value.step]


def _encode_tuple(value: tuple[Any, ...], encode_item: Callable[[object], Tree]) -> Tree:
    items = [encode_item(item) for item in value]
    cls = type(value)
    if hasattr(cls, "_fields"):
        return {"namedtuple": _qualified_name(cls), "items": items}
    if cls is tuple or (cls.__module__, cls.__name__) == ("torch", "Size"):
        return {"tuple": items}
    raise TypeError(f"{value!r} of type {cls.__module__}.{cls.__qualname__} has no stable text")


def _encode_triton_config(value: Any, encode_item: Callable[[object], Tree]) -> Tree:
    """Encode the meta-parameters of a ``triton.Config``, then its options.

    Options that are ``None`` are left out, because newer Triton versions add such options.
    """
    options = {name: option for name, option in sorted(vars(value).items()) if option is not None}
    meta = {str(name): encode_item(item) for name, item in options.pop("kwargs").items()}
    return {"triton.Config": meta} | {name: encode_item(option) for name, option in options.items()}


def _encode_function(value: Any, with_bound_values: bool) -> Tree:
    """Encode a function by its name. For a lambda or an inner function, add a digest of its code,
    and of its closure cells if ``with_bound_values``."""
    tree = {"function": _qualified_name(value)}
    code = getattr(value, "__code__", None)
    if code is not None and "<" in value.__qualname__:
        closure = (value.__closure__ or ()) if with_bound_values else ()
        tree["code"] = digest(*encode_code(code), [encode(cell.cell_contents) for cell in closure])
    return tree


def nested_code(code: types.CodeType, name: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """Yield ``code`` and all code objects nested in it, each with its dotted name."""
    yield name, code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from nested_code(each, f"{name}.{each.co_name}")


def encode_code(code: types.CodeType) -> list[Tree]:
    """Encode the instructions, constants and names of ``code``.

    Processes with one version of Python return equal trees. Sets are sorted, because the ``repr``
    of a set differs between processes.
    """
    constants = [
        encode_code(each)
        if isinstance(each, types.CodeType)
        else sorted(map(repr, each))
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
    ]
    return [code.co_code.hex(), constants, list(code.co_names)]


def _qualified_name(item: Any) -> str:
    return f"{item.__module__}:{item.__qualname__}"


_TYPES_WITH_MODULE = frozenset({"enum", "namedtuple", "class", "dataclass", "function"})


def _without_modules(tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return [_without_modules(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        name: item.rpartition(":")[2]
        if name in _TYPES_WITH_MODULE and isinstance(item, str)
        else _without_modules(item)
        for name, item in tree.items()
    }
