"""What a tuning result is looked up by, and two words to make keys of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.show import show
from triton_dist.errors import InvalidArgument


@dataclass(frozen=True)
class Key:
    """Function, what its ``key_fn`` returned, and the hardware that tuned together.

    What else a result depends on (source, versions, config space) is in the
    :class:`~triton_dist._tuning.values.fingerprint.Fingerprint` inside the record, so that a
    mismatch can be explained.
    """

    function: str
    """``module.qualname``"""
    text: str
    """The result of ``key_fn``, as :func:`codec.text` writes it."""
    hardware: str

    @classmethod
    def of(cls, function: str, value: object, hardware: str) -> Key:
        """The key of a ``key_fn`` result.

        Raises:
            InvalidArgument: a value that has no exact text, such as a tensor.
        """
        try:
            return cls(function, codec.text(codec.encode(value)), hardware)
        except TypeError as error:
            raise InvalidArgument(
                function,
                "the result of key_fn",
                value,
                f"a hashable value of numbers, strings, enums, dtypes, tuples, frozen dataclasses "
                f"({error}); to_hashable(tensor) makes one from a tensor",
            ) from None

    @property
    def value(self) -> Any:
        """What ``key_fn`` returned. Raises ``ValueError`` if a class in it is not imported here."""
        return codec.decode(json.loads(self.text))

    @cached_property
    def digest(self) -> str:
        """Name of the record's file."""
        return codec.digest(self.function, self.text, self.hardware)

    @property
    def function_name(self) -> str:
        """The last part of the function's name; names the record's folder."""
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        return show(json.loads(self.text))


def to_hashable(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """``(shape, strides, dtype)`` of a tensor: the usual part of a key."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def bucket(n: int) -> int:
    """``n`` rounded up to the next power of two; 0 stays 0.

    In a ``key_fn`` for a size that varies from call to call (tokens in a batch), so that one tuning
    serves a whole range: ``bucket(M)`` is 4096 for M from 2049 to 4096.
    """
    if n < 0:
        raise InvalidArgument("bucket", "n", n, "a size, 0 or more")
    return 1 << (n - 1).bit_length() if n > 0 else 0
