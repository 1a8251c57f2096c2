"""The source that a function depends on: digests of statements, and texts of constants.

A tuning record is valid for the code that was timed: the function, its helpers, the Triton kernels
that it launches, and the constants that they read. :mod:`.modules` parses files into statements,
:mod:`.slices` finds the statements that count, and :mod:`.runtime_values` reads values and
constants.

Comments, docstrings, formatting, and the position in the file or in the file system do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from triton_dist._tuning.source import libraries
from triton_dist._tuning.source.modules import digest, file_at
from triton_dist._tuning.source.runtime_values import Snapshot, function_in, globals_of
from triton_dist._tuning.source.slices import Slice, Source
from triton_dist._tuning.values import Origin, codec, original


def source_of(roots: Iterable[Callable[..., Any]]) -> Source:
    """Return the slice of ``roots``."""
    return sources_of(roots, ())[0]


def sources_of(
    roots: Iterable[Callable[..., Any]],
    validators: Iterable[Callable[..., Any]],
    ignore: Iterable[str] = (),
    snapshot: Snapshot | None = None,
    classes: Iterable[type] = (),
) -> tuple[Source, Source]:
    """Return the slice of ``roots``, and what the slice of ``validators`` contains in addition.

    Args:
        ignore: names of constants that do not count.
        snapshot: values at decoration that change as the program runs.
        classes: classes of values that the roots are called with.
    """
    parts, sources = [list(roots), list(validators)], list[Source]()
    inner = [original(each) for part in parts for each in part]
    library = libraries.Libraries(each.__module__ for each in inner)
    home = globals_of(inner[0]) if inner else {}
    found = Slice(library, snapshot or Snapshot(()), ignore, home)
    for part in parts:
        found.source = Source({}, {}, {}, {})  # without what was found before
        for each in part:
            found.follow_root(each)
        if not sources:
            found.follow(list(classes))
        sources.append(found.source)
    return sources[0], sources[1]


def origin_of(function: Callable[..., Any], tunables: Iterable[str]) -> Origin:
    """Return the identity of a function in records.

    It consists of name, module and signature. Functions of a file that are equal in these are
    numbered.
    """
    origin, inner = Origin.of(function, tunables), function_in(original(function))
    if inner is None:
        return origin
    file = file_at(inner.__code__.co_filename, inner.__globals__)
    if not file.has(inner.__code__):  # without source, the bytecode identifies it
        return origin.with_distinction(f"code {digest(codec.encode_code(inner.__code__))[:8]}")
    ordinal = file.ordinal(inner.__code__)
    return origin.with_distinction(f"definition {ordinal + 1}") if ordinal else origin
