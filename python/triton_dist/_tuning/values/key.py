"""The key by which a tuning result is looked up, and two functions to make keys."""

from __future__ import annotations

import functools
import inspect
import json
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.fingerprint import Fingerprint
from triton_dist._tuning.values.show import show
from triton_dist.errors import InvalidArgument


class Origin(NamedTuple):
    """The function that a key is of."""

    function: str
    """Its qualified name, without the module: renaming a file changes no key."""
    module: str = ""
    """Place of its definition: a module's importable name, a script's path."""
    signature: str = ""
    """Its parameters and what is tuned: tells functions of one name in one module apart."""

    @classmethod
    def of(cls, function: Callable[..., Any], tunables: Iterable[str]) -> Origin:
        """The origin of ``function``, some of whose arguments, ``tunables``, are chosen."""
        try:
            parameters = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # a builtin does not tell
            parameters = []
        signature = f"({', '.join(parameters)}) tunes {', '.join(sorted(tunables))}"
        module = _module_name(original(function).__module__)
        return cls(qualified_name(function), module, signature)

    def of_several(self, which: str) -> Origin:
        """The origin of one of several functions of this name; ``which`` tells them apart."""
        return self._replace(signature=f"{self.signature}, {which}")


def original(function: Any) -> Any:
    """The function inside wrappers and partials, or the object that is called like one."""
    inner = inspect.unwrap(function)
    return original(inner.func) if isinstance(inner, functools.partial) else inner


def qualified_name(function: Any) -> str:
    """Name of the function inside, without its module; of an object, its class's."""
    named = original(function)
    name: str = getattr(named, "__qualname__", type(named).__qualname__)
    return name


@dataclass(frozen=True, eq=False)
class Key:
    """Function, what its ``key_fn`` returned, and the hardware that tuned together.

    What else a result depends on (source, versions, config space) is in the
    :class:`~triton_dist._tuning.values.fingerprint.Fingerprint` inside the record, so that a
    mismatch can be explained. So is the function's code: a record that was made when its file had
    another name answers the key as well. ``module`` and ``signature``, and the modules of classes
    in ``text``, are therefore not compared. The former only say which record a new one replaces, so
    that two functions of one name keep theirs.
    """

    function: str
    """Qualified name, without the module."""
    text: str
    """The result of ``key_fn``, as :func:`codec.text` writes it."""
    hardware: str
    module: str = ""
    signature: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def of(cls, origin: Origin | str, value: object, hardware: str) -> Key:
        """The key of a ``key_fn`` result.

        Raises:
            InvalidArgument: a value that has no exact text, such as a tensor.
        """
        function, module, signature = Origin(origin) if isinstance(origin, str) else origin
        try:
            return cls(function, codec.text(codec.encode(value)), hardware, module, signature)
        except TypeError as error:
            raise InvalidArgument(
                function,
                "the result of key_fn",
                value,
                f"a hashable value of numbers, strings, enums, dtypes, tuples, frozen dataclasses "
                f"({error}); to_hashable(tensor) makes one from a tensor",
            ) from error

    def under(self, found: Fingerprint) -> Key:
        """This key where a tuning depends on ``found``: functions of one factory, which bind other
        values, keep a record each, and so do runs under other settings."""
        about = self.signature
        if found.bound:
            about += "; binds " + ", ".join(
                f"{n}={text}" for n, text in sorted(found.bound.items())
            )
        if found.settings:
            # A path may be another one at each start, and would leave a file each time.
            about += "; under " + re.sub(r"=[^,]*/[^,]*", "=(a path)", found.settings)
        return replace(self, signature=about)

    @cached_property
    def digest(self) -> str:
        """The same for equal keys; begins the name of the record's file."""
        return codec.digest(self.function, json.loads(self.text), self.hardware)

    @property
    def full_name(self) -> str:
        """Module and function, for people."""
        return f"{self.module}.{self.function}" if self.module else self.function

    @property
    def in_schema_1(self) -> Key:
        """The key that records of schema 1 have, whose function was ``module.qualname``."""
        return Key(self.full_name, self.text, self.hardware)

    @property
    def schema_1_digest(self) -> str:
        """The name of such a record's file."""
        return codec.digest(self.full_name, self.text, self.hardware)

    @property
    def function_name(self) -> str:
        """The last part of the function's name; names the record's folder."""
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        """As it would be typed; after it, the names that the caller gave a value for."""
        tree, given = json.loads(self.text), self.given
        return show(tree) if given is None else f"{show(tree['tuple'][0])} {given[0]}"

    @property
    def given(self) -> tuple[str, str] | None:
        """For a call that gave a value for tunable names: ``with {...}``, and the digest of these
        values as a config."""
        match json.loads(self.text):
            case {"tuple": [_, str(given), str(digest)]} if given.startswith("with {"):
                return given, digest
        return None


def _module_name(name: str) -> str:
    """``name``, but of a program that runs as ``__main__`` the name or path that it has on disk."""
    if name != "__main__":
        return name
    program = sys.modules["__main__"]
    spec, file = getattr(program, "__spec__", None), getattr(program, "__file__", None)
    return spec.name if spec is not None else os.path.abspath(file) if file else name


def to_hashable(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], Any] | None:
    """``(shape, strides, dtype)`` of a tensor: the usual part of a key; ``None`` for ``None``, an
    optional tensor that is not there.

    Raises:
        InvalidArgument: it is something else.
    """
    if tensor is None:
        return None
    try:
        return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
    except (AttributeError, TypeError) as error:
        raise InvalidArgument("to_hashable", "tensor", tensor, "a tensor, or None") from error


def bucket(n: int, half_steps_from: int | None = None) -> int:
    """``n`` rounded up to the next power of two; 0 stays 0.

    In a ``key_fn`` for a size that varies from call to call (tokens in a batch), so that one tuning
    serves a whole range: ``bucket(M)`` is 4096 for M from 2049 to 4096.

    Args:
        half_steps_from: for sizes above this one, 3/4 of a power of two has a bucket too: 3072 for
            2049 to 3072. Where a tuning for 4096 serves 2100 badly, at the price of more tunings.

    Raises:
        InvalidArgument: ``n`` is negative, or no int.
    """
    try:
        rounded = 1 << (n - 1).bit_length() if n != 0 else 0
    except (AttributeError, TypeError):
        number: Any = n
        if isinstance(number, numbers.Integral):  # of numpy, without bit_length
            return bucket(int(number), half_steps_from)
        rounded = None
    if rounded is None or n < 0:
        raise InvalidArgument("bucket", "n", n, "an int, 0 or more")
    half_step = rounded // 4 * 3
    fits_half_step = half_steps_from is not None and half_steps_from < n <= half_step
    return half_step if fits_half_step else rounded
