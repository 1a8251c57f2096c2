"""Checks of the interpreter, turned on and off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import interpreter as upstream

from triton_dist.runtime.debugging import bounds, uninitialised
from triton_dist.runtime.debugging.accesses import Observer, Undo, replace, undo_all, watch
from triton_dist.runtime.debugging.faults import KernelAssertion
from triton_dist.runtime.debugging.site import site
from triton_dist.runtime.debugging.waiting import Waiting


def install(checks: Iterable[str]) -> Undo:
    """Turn ``checks`` of kernels on, names of :data:`modes.CHECKS`, until undone.

    The interpreter's mends must be applied.
    """
    undos = [replace(upstream.InterpreterBuilder, "create_assert", _with_site)]
    observers: list[Observer] = []
    if "bounds" in checks:
        observers.append(bounds.Bounds())
        undos.append(bounds.track(upstream))
    if "init" in checks:
        observers.append(uninitialised.Uninitialised())
        undos.append(uninitialised.poison())
    if "waits" in checks:
        waiting = Waiting()
        observers.append(waiting)
        undos.append(waiting.start())
    if "race" in checks:
        from triton_dist.runtime.debugging.races import Races

        races = Races()
        observers.append(races)
        undos.append(races.track())
    if observers:
        undos.append(watch(upstream, observers))
    return undo_all(undos)


@contextmanager
def checking(*checks: str) -> Iterator[None]:
    """Within: these checks are on."""
    undo = install(checks)
    try:
        yield
    finally:
        undo()


def _with_site(original: Any) -> Callable[..., None]:
    def create_assert(self: Any, condition: Any, message: Any) -> None:
        try:
            original(self, condition, message)
        except AssertionError as failed:
            raise KernelAssertion(f"{site()}: {failed}") from None

    return create_assert
