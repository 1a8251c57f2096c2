"""Find the source code that a function depends on: digests of statements, and texts of constants.

A tuning record is valid for the code that was timed: the function, its helpers, the Triton kernels
that it launches, and the constants that they read. :mod:`.modules` parses files into statements,
:mod:`.slices` finds the statements that a function depends on, and :mod:`.runtime_values` reads
values and constants.

Comments, docstrings and formatting have no effect on the result. Neither have the position in a
file and the location of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from triton_dist._tuning.source import libraries
from triton_dist._tuning.source.modules import digest, parsed_file
from triton_dist._tuning.source.runtime_values import Snapshot, function_in, globals_of
from triton_dist._tuning.source.slices import Slice, SourceDependencies
from triton_dist._tuning.values import FunctionIdentity, codec, original


def source_of(roots: Iterable[Callable[..., Any]]) -> SourceDependencies:
    """Return the statements and constants that the functions ``roots`` depend on."""
    return sources_of(roots, ())[0]


def sources_of(
    roots: Iterable[Callable[..., Any]],
    hooks: Iterable[Callable[..., Any]],
    ignore: Iterable[str] = (),
    snapshot: Snapshot | None = None,
    classes: Iterable[type] = (),
) -> tuple[SourceDependencies, SourceDependencies]:
    """Return the statements and constants that ``roots`` depend on, and those on which only
    ``hooks`` depend.

    Args:
        ignore: names of constants to leave out.
        snapshot: texts that changeable values had at decoration.
        classes: classes of values that the roots are called with.
    """
    groups, sources = [list(roots), list(hooks)], list[SourceDependencies]()
    inner = [original(each) for group in groups for each in group]
    library = libraries.Libraries(each.__module__ for each in inner)
    home_globals = globals_of(inner[0]) if inner else {}
    source_slice = Slice(library, snapshot or Snapshot(()), ignore, home_globals)
    for group in groups:
        # Receives what was not found before.
        source_slice.source = SourceDependencies({}, {}, {}, {})
        for each in group:
            source_slice.follow_root(each)
        if not sources:
            source_slice.follow(list(classes))
        sources.append(source_slice.source)
    return sources[0], sources[1]


def identity_of(function: Callable[..., Any], tunables: Iterable[str]) -> FunctionIdentity:
    """Return the identity of a function in records.

    It consists of name, module and signature. If several functions of a file are equal in these,
    the second and later functions also have a number.
    """
    identity, inner = FunctionIdentity.of(function, tunables), function_in(original(function))
    if inner is None:
        return identity
    file = parsed_file(inner.__code__.co_filename, inner.__globals__)
    if not file.compiles_to(inner.__code__):  # without source, the bytecode identifies the function
        return identity.with_suffix_in_signature(
            f"code {digest(codec.encode_code(inner.__code__))[:8]}"
        )
    num_earlier = file.num_earlier_definitions(inner.__code__)
    return (
        identity.with_suffix_in_signature(f"definition {num_earlier + 1}")
        if num_earlier
        else identity
    )
