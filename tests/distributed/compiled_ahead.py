"""Kernels of a rank function, compiled before it makes its calls.

A rank would compile what it meets, one kernel after the other, and its peers the same ones beside
it: most of the time that a test on GPUs takes. So the function is rehearsed: its calls launch
nothing, and note what they would compile. Then all processors compile, each kernel once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from triton_dist.errors import CandidateFailed, CompileTimeout
from triton_dist.runtime.compiling import CompilePool
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for

T = TypeVar("T")

_noted: list[list[str]] = []  # of the rehearsal that goes on, if one does
_pools: list[CompilePool] = []


def compiled_ahead(fn: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of ranks whose calls ask ``is_rehearsal`` and, in one, ``note``. On CPU
    ranks nothing is compiled, and nothing rehearsed."""

    @functools.wraps(fn)
    def run(*args: Any) -> T:
        if current_device().name == "cuda":
            pool = CompilePool()
            _pools.append(pool)
            _noted.append([])
            with suppress(Exception):  # what it makes of results that are missing
                fn(*args)
            _pools.pop()
            _compile(pool, _noted.pop())
        return fn(*args)

    return run


def is_rehearsal() -> bool:
    return bool(_pools)


def note(prepare: Callable[[], object]) -> None:
    """Note what ``prepare``, which compiles the kernels of a call, would compile."""
    _noted[-1].extend(_pools[-1].collect(prepare))


def compile_together(prepares: Iterable[Callable[[], object]]) -> None:
    """Compile what these would compile, each kernel once, on all processors. Collective."""
    pool = CompilePool()
    _compile(pool, [digest for prepare in prepares for digest in pool.collect(prepare)])


def _compile(pool: CompilePool, missing: list[str]) -> None:
    ranks = group_for()
    holders: dict[str, list[int]] = {}
    for rank, digests in enumerate(
        ranks.all_gather("kernels to compile", list(dict.fromkeys(missing)))
    ):
        for digest in digests:
            holders.setdefault(digest, []).append(rank)
    mine = [
        digest
        for number, (digest, known_to) in enumerate(holders.items())
        if known_to[number % len(known_to)] == ranks.rank
    ]
    pool.begin(mine, num_sharing_ranks=ranks.size)
    for digest in mine:
        with suppress(CandidateFailed, CompileTimeout):  # its call will say so
            pool.wait(digest)
    pool.close()
    ranks.all_gather("kernels are compiled", None, 300.0)
