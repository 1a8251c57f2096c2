"""Define the key that identifies a tuning result, and two functions for use in a ``key_fn``."""

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


class FunctionIdentity(NamedTuple):
    """Names that identify the tuned function."""

    function: str
    """Qualified name without the module, so renaming a file changes no key."""
    module: str = ""
    """Importable name of the module that defines the function, or path of the script."""
    signature: str = ""
    """Names of all parameters and of the tuned parameters. Distinguishes functions of equal name in
    one module."""

    @classmethod
    def of(cls, function: Callable[..., Any], tunables: Iterable[str]) -> FunctionIdentity:
        """Return the identity of ``function``, whose parameters ``tunables`` are tuned."""
        try:
            parameters = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # builtins have no signature
            parameters = []
        signature = f"({', '.join(parameters)}) tunes {', '.join(sorted(tunables))}"
        return cls(qualified_name(function), _module_name(original(function).__module__), signature)

    def with_suffix_in_signature(self, suffix: str) -> FunctionIdentity:
        """Return this identity with ``suffix`` appended to the signature, to make it unique."""
        return self._replace(signature=f"{self.signature}, {suffix}")


def original(function: Any) -> Any:
    """Return the function inside decorators and ``functools.partial``, or the callable object."""
    inner = inspect.unwrap(function)
    return original(inner.func) if isinstance(inner, functools.partial) else inner


def qualified_name(function: Any) -> str:
    """Return the name of the function inside decorators and partials, without its module.

    For a callable object, return the name of its class.
    """
    named = original(function)
    name: str = getattr(named, "__qualname__", type(named).__qualname__)
    return name


@dataclass(frozen=True, eq=False)
class Key:
    """Function, result of its ``key_fn``, and hardware of the group of ranks.

    Other dependencies of a result (source, versions, config space) are in the record's
    :class:`~triton_dist._tuning.values.fingerprint.Fingerprint`, so that a mismatch can be
    explained. Equality of keys ignores ``module``, ``signature`` and the modules of classes in
    ``text``: a record stays valid when a source file is renamed, because the fingerprint includes
    the code. ``module`` and ``signature`` decide which record a new record replaces. Two functions
    of equal name thus keep separate records.
    """

    function: str
    text: str
    """Result of ``key_fn`` as JSON (:func:`codec.to_json`)."""
    hardware: str
    """Device type, GPU model, and size and placement of the group."""
    module: str = ""
    signature: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def of(cls, identity: FunctionIdentity | str, value: object, hardware: str) -> Key:
        """Return the key for ``value``, a result of ``key_fn``.

        Raises:
            InvalidArgument: ``value`` contains a value without an exact text, such as a tensor.
        """
        function, module, signature = (
            FunctionIdentity(identity) if isinstance(identity, str) else identity
        )
        try:
            return cls(function, codec.to_json(codec.encode(value)), hardware, module, signature)
        except TypeError as error:
            raise InvalidArgument(
                function,
                "the result of key_fn",
                value,
                f"a hashable value of numbers, strings, enums, dtypes, tuples, frozen dataclasses "
                f"({error}); to_hashable(tensor) returns such a value for a tensor",
            ) from error

    def with_signature_of(self, fingerprint: Fingerprint) -> Key:
        """Return this key with the bound values and settings of ``fingerprint`` in its signature.

        Closures of one factory function with different bound values then have separate records.
        Runs with different environment settings have separate records too.
        """
        signature = self.signature
        if fingerprint.bound:
            bound = ", ".join(f"{n}={text}" for n, text in sorted(fingerprint.bound.items()))
            signature += f"; binds {bound}"
        if fingerprint.settings:
            # A path may change at each start, and each start would then leave a record file.
            settings = re.sub(r"=[^,]*/[^,]*", "=(a path)", fingerprint.settings)
            signature += f"; under {settings}"
        return replace(self, signature=signature)

    @cached_property
    def digest(self) -> str:
        """Digest that is equal for equal keys. The name of the record's file begins with it."""
        return codec.digest(self.function, json.loads(self.text), self.hardware)

    @property
    def full_name(self) -> str:
        """Module and function, for messages."""
        return f"{self.module}.{self.function}" if self.module else self.function

    @property
    def schema_1_digest(self) -> str:
        """File name of a record in the first format (schema 1)."""
        return codec.digest(self.full_name, self.text, self.hardware)

    @property
    def function_name(self) -> str:
        """Last part of the qualified name, which is the name of the record's folder."""
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        """Return the result of ``key_fn`` as Python source, then :attr:`passed_values`."""
        tree, passed = json.loads(self.text), self.passed_values
        return show(tree) if passed is None else f"{show(tree['tuple'][0])} {passed[0]}"

    @property
    def passed_values(self) -> tuple[str, str] | None:
        """``with {...}`` and a digest of the values of tuned parameters that the caller passed;
        ``None`` if the caller passed none."""
        match json.loads(self.text):
            case {"tuple": [_, str(shown), str(digest)]} if shown.startswith("with {"):
                return shown, digest
        return None


def _module_name(name: str) -> str:
    """Return ``name``; for ``__main__``, the importable name or the path of the script."""
    if name != "__main__":
        return name
    program = sys.modules["__main__"]
    spec, file = getattr(program, "__spec__", None), getattr(program, "__file__", None)
    return spec.name if spec is not None else os.path.abspath(file) if file else name


def to_hashable(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], Any] | None:
    """Return ``(shape, strides, dtype)`` of a tensor, for the result of a ``key_fn``.

    Args:
        tensor: a tensor. For ``None``, such as an optional tensor that is absent, the result is
            ``None``.

    Raises:
        InvalidArgument: ``tensor`` is neither a tensor nor ``None``.
    """
    if tensor is None:
        return None
    try:
        return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
    except (AttributeError, TypeError) as error:
        raise InvalidArgument("to_hashable", "tensor", tensor, "a tensor, or None") from error


def bucket(n: int, half_steps_from: int | None = None) -> int:
    """Round ``n`` up to a power of two; 0 stays 0.

    Use it in a ``key_fn`` for a size that varies between calls, such as the number of tokens. One
    tuning then serves a range: ``bucket(M)`` is 4096 for M from 2049 to 4096.

    Args:
        n: the size, an int, 0 or more.
        half_steps_from: for ``n`` above this number, also round to 3/4 of a power of two: to 3072
            for ``n`` from 2049 to 3072. This leads to more tunings. Use it if the config for 4096
            is slow for 2100.

    Returns:
        The largest size in the range of ``n``.

    Raises:
        InvalidArgument: ``n`` is negative or not an int.
    """
    try:
        rounded = 1 << (n - 1).bit_length() if n != 0 else 0
    except (AttributeError, TypeError):
        number: Any = n
        if isinstance(number, numbers.Integral):  # a numpy integer has no bit_length
            return bucket(int(number), half_steps_from)
        rounded = None
    if rounded is None or n < 0:
        raise InvalidArgument("bucket", "n", n, "an int, 0 or more")
    half_step = rounded // 4 * 3
    fits_half_step = half_steps_from is not None and half_steps_from < n <= half_step
    return half_step if fits_half_step else rounded
