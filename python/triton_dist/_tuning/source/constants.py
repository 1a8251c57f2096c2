"""Texts of constants, and the mark for computed values that count as constants."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.show import show
from triton_dist.errors import InvalidArgument

T = TypeVar("T")

_LONGEST = 100


def constant(value: T) -> T:
    """``value``, marked as one that counts in tuning records although it is computed at run time.

    ``MODE = constant(os.environ["MODE"])`` in a module: a change of the variable tunes again. All
    ranks must have the same.

    Raises:
        InvalidArgument: a value without a text that is the same at every start, such as a tensor.
    """
    try:
        if not _holds_code(value):  # code counts by its source
            text_of(value)
    except TypeError as error:
        expected = "numbers, texts, dtypes, and tuples, lists, sets, dicts of these"
        raise InvalidArgument("constant", "value", value, expected) from error
    return value


constant.marks_a_constant = True  # type: ignore[attr-defined]


def text_of(value: Any) -> str:
    """Return the text of data as it would be typed; of a long text its beginning and a digest.

    Raises:
        TypeError: ``value`` holds code, or has no stable text.
    """
    if type(value).__module__ == "torch" and type(value).__name__ == "device":
        return f"device {value.type}"  # the index differs by rank
    if _holds_code(value):
        raise TypeError(f"{value!r} holds code")
    text = show(codec.encode(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({codec.digest(text)[:8]})"


def _holds_code(value: Any) -> Any:
    params = getattr(type(value), "__dataclass_params__", None)
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(map(_holds_code, value))
    if isinstance(value, dict):
        return any(map(_holds_code, value.values()))
    if params is not None:  # a dataclass that may change has no text, and may hold itself
        held = (getattr(value, each.name, None) for each in dataclasses.fields(value))
        return params.frozen and any(map(_holds_code, held))
    return callable(value) or has_own(value, "fn")


def has_own(value: object, name: str) -> bool:
    """Return whether ``value`` or its class has an attribute that no ``__getattr__`` makes up."""
    return name in getattr(value, "__dict__", ()) or hasattr(type(value), name)
