"""Turn the checks of interpreted kernels on and off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import interpreter as upstream

from triton_dist.debugging import debugger, memory_checks, printing, rank_status
from triton_dist.debugging.accesses import Observer, Undo, patch, undo_all, watch
from triton_dist.debugging.deadlock_check import DeadlockCheck
from triton_dist.debugging.faults import KernelAssertion
from triton_dist.debugging.kernel_location import current_location
from triton_dist.debugging.races import RaceCheck
from triton_dist.runtime import interpreter


def install(checks: Iterable[str]) -> Undo:
    """Turn on ``checks`` and return a function that turns them off.

    ``runtime.interpreter.install`` must have been called before.

    Args:
        checks: names in ``modes.CHECKS``, or the interactive modes ``"attach"`` and ``"where"``.
    """
    undos = [
        patch(upstream.InterpreterBuilder, "create_assert", _raise_with_location),
        printing.prefix_output(upstream),
    ]
    observers: list[Observer] = []
    if "bounds" in checks:
        observers.append(memory_checks.BoundsCheck())
        undos.append(memory_checks.track_origins(upstream))
    if "init" in checks:
        observers.append(memory_checks.UninitialisedCheck())
        undos.append(memory_checks.poison_empty())
    if "waits" in checks or "where" in checks:
        deadlocks = DeadlockCheck(raises="waits" in checks, publishes="where" in checks)
        observers.append(deadlocks)
        rank_status.start()
        undos += [rank_status.stop, deadlocks.start()]
        undos.append(patch(interpreter, "_run_grid", _record_launch))
    if "where" in checks:
        rank_status.install_signal_handler()
        undos.append(rank_status.remove_signal_handler)
    if "attach" in checks:
        debugger.start()
        undos.append(debugger.end)
    if "race" in checks:
        races = RaceCheck()
        observers.append(races)
        undos.append(races.track())
    if observers:
        undos.append(watch(upstream, observers))
    return undo_all(undos)


@contextmanager
def checking(*checks: str) -> Iterator[None]:
    undo = install(checks)
    try:
        yield
    finally:
        undo()


def _raise_with_location(original: Any, self: Any, condition: Any, message: Any) -> None:
    try:
        original(self, condition, message)
    except AssertionError as failed:
        raise KernelAssertion(f"{current_location()}: {failed}") from failed


def _record_launch(original: Any, executor: Any, *rest: Any) -> None:
    grid = executor.grid if isinstance(executor.grid, tuple) else ()
    rank_status.note_launch(executor.fn.__name__, grid)
    original(executor, *rest)
