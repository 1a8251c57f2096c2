"""The values that a function's code reads and binds, apart from the code itself.

Three kinds, told apart because ranks and starts differ in some of them and mean the same function:

- *literal*: a global whose value stands in the source. All ranks have the same source.
- *bound*: what a function was given when it was made: closure cells, defaults, arguments of a
  partial, state of a callable object. It counts as far as all ranks hold the same.
- *uncounted*: computed at run time, told to be ignored, or without a text to compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
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


class Constants:
    """Values that one function depends on, apart from code. Names are unique in it.

    Args:
        ignore: names that do not count, such as ``"RANK"`` or ``"op.RANK"``.
    """

    def __init__(self, ignore: Iterable[str] = ()) -> None:
        self.literal: dict[str, str] = {}
        self.bound: dict[str, str] = {}
        self.uncounted: dict[str, str] = {}
        self._ignore = frozenset(ignore)
        self._holders: dict[str, int] = {}

    def ignores(self, name: str) -> bool:
        """True if ``name`` is not to count; it is noted then."""
        ignored = name in self._ignore or name.rpartition(".")[2] in self._ignore
        if ignored:
            self.uncounted[name] = "ignored"
        return ignored

    def name(self, name: str, holder: object) -> str:
        """``name``, told apart from that of another ``holder``, such as a module."""
        unique, number = name, 1
        while self._holders.setdefault(unique, id(holder)) != id(holder):
            number += 1
            unique = f"{name}#{number}"
        return unique


def text_of(value: Any) -> str:
    """The text of a value that is all data, as it would be typed; of a long one its beginning.

    Raises:
        TypeError: it is not, or has no stable text.
    """
    if type(value).__module__ == "torch" and type(value).__name__ == "device":
        return f"device {value.type}"  # which one differs by rank
    if _holds_code(value):
        raise TypeError(f"{value!r} holds code")
    text = show(codec.encode(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({codec.digest(text)[:8]})"


def _holds_code(value: Any) -> Any:
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(map(_holds_code, value))
    if isinstance(value, dict):
        return any(map(_holds_code, value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls: Any = type(value)
        held = (getattr(value, each.name, None) for each in dataclasses.fields(value))
        # One that may change has no text, and may hold itself.
        return cls.__dataclass_params__.frozen and any(map(_holds_code, held))
    return callable(value) or has_own(value, "fn")


def has_own(value: object, name: str) -> bool:
    """True if ``value`` or its class has the attribute; one that ``__getattr__`` makes up is
    none."""
    held = getattr(value, "__dict__", ())
    return name in held or any(name in vars(cls) for cls in type(value).__mro__)
