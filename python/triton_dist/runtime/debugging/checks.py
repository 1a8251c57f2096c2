"""Checks of the interpreter, turned on and off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import interpreter as upstream

from triton_dist.runtime import interpreter
from triton_dist.runtime.debugging import asking, bounds, printing, standing, stops, uninitialised
from triton_dist.runtime.debugging.accesses import Observer, Undo, replace, undo_all, watch
from triton_dist.runtime.debugging.faults import KernelAssertion
from triton_dist.runtime.debugging.site import site
from triton_dist.runtime.debugging.waiting import Waiting


def install(checks: Iterable[str]) -> Undo:
    """Turn ``checks`` of kernels on, names of :data:`modes.CHECKS` and of modes that work here,
    until undone.

    The interpreter's mends must be applied.
    """
    undos = [
        replace(upstream.InterpreterBuilder, "create_assert", _with_site),
        printing.tell_ranks(upstream),
    ]
    observers: list[Observer] = []
    if "bounds" in checks:
        observers.append(bounds.Bounds())
        undos.append(bounds.track(upstream))
    if "init" in checks:
        observers.append(uninitialised.Uninitialised())
        undos.append(uninitialised.poison())
    if "waits" in checks or "where" in checks:
        waiting = Waiting(judges="waits" in checks, tells="where" in checks)
        observers.append(waiting)
        standing.start()
        undos += [standing.stop, waiting.start()]
        undos.append(replace(interpreter, "_run_grid", _noted))
    if "where" in checks:
        asking.start()
        undos.append(asking.stop)
    if "attach" in checks:
        stops.start()
        undos.append(stops.end)
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


def _noted(original: Any) -> Callable[..., None]:
    def run_grid(executor: Any, *rest: Any) -> None:
        grid = executor.grid if isinstance(executor.grid, tuple) else ()
        standing.note_launch(executor.fn.__name__, grid)
        original(executor, *rest)

    return run_grid
