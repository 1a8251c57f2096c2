"""The source of a function and of everything that it reaches: digests of code, texts of constants.

A tuning record holds as long as the code that was timed: the function, its helpers, the Triton
kernels that it launches with their callees, and the constants that they read and bind (which of
them count, :mod:`~triton_dist._tuning.constants` says). Reached means named in the source; what
comes in as an argument is not followed, but for the methods and attributes of a method's own class.
Library code (standard library, installed packages other than the function's own) is not followed
either: its versions are in the fingerprint.

A comment, a docstring, formatting, or another place in the file or in the file system changes
nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from triton_dist._tuning import definitions, libraries, normalise
from triton_dist._tuning.constants import Constants
from triton_dist._tuning.snapshot import Snapshot
from triton_dist._tuning.values import Origin, codec, original
from triton_dist._tuning.walk import Walk


class Source(NamedTuple):
    """Code and constants of functions. Names are those of the code."""

    digests: dict[str, str]
    """A digest of each function and class that is reached."""
    literal: dict[str, str]
    bound: dict[str, str]
    uncounted: dict[str, str]
    """Constants that do not count, each with the reason."""


def source_of(
    roots: Iterable[Callable[..., Any]],
    ignore: Iterable[str] = (),
    snapshot: Snapshot | None = None,
    classes: Iterable[type] = (),
) -> Source:
    """Code and constants that ``roots`` reach.

    Args:
        ignore: names of constants that do not count.
        snapshot: what the roots held when they were given, of what changes as a program runs.
        classes: of values that the roots are called with.
    """
    roots = list(roots)
    library = libraries.Libraries(original(root).__module__ for root in roots)
    walk = Walk(library, Constants(ignore), snapshot or Snapshot(()))
    for root in roots:
        walk.root(root)
    for each in classes:
        walk.reference(each)
    digests = {
        name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in walk.texts.items()
    }
    constants = walk.constants
    return Source(digests, constants.literal, constants.bound, constants.uncounted)


def origin_of(function: Callable[..., Any], tunables: Iterable[str]) -> Origin:
    """The function as records name it: name, module, signature, number among those of one name."""
    origin = Origin.of(function, tunables)
    code = getattr(original(function), "__code__", None)
    if code is None:
        return origin
    ordinal = definitions.ordinal(code)
    if ordinal is None:  # no source: what it does tells it apart
        return origin.of_several(f"code {codec.digest(normalise.bytecode(code))[:8]}")
    return origin.of_several(f"definition {ordinal + 1}") if ordinal else origin
