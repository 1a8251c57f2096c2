"""What a rank of a chaos scenario has at hand: a tuned function with scripted times, and ways to
go wrong at a chosen moment."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from triton_dist._tuning.engine.channel import Channel, Step
from triton_dist._tuning.engine.trial import TrialRunner
from triton_dist._tuning.store import FileJournal, journal
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.tune import AutoTuner, autotune

SPACE = [{"n": 3}, {"n": 1}, {"n": 2}]
FOREVER = 3600.0
MILLISECONDS = "CHAOS_MILLISECONDS"


@dataclass(frozen=True)
class Me:
    """This rank."""

    rank: int
    size: int
    folder: Path
    """Shared by the ranks of a scenario, and by its starts."""


class ScriptedTimer:
    """Shows what a table says that the run before took: results do not depend on this machine.

    The run says it through the environment: a value that the tuned function's own classes or
    globals hold is a part of its source, and changing it makes a record stale.
    """

    jitter = 0.0
    """Largest relative deviation of a sample."""
    taken = 0
    """Samples in the current request. A sample deviates by its config and its place among them, so
    a request that is repeated by another process is answered alike."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        said = os.environ[MILLISECONDS]
        ScriptedTimer.taken += 1
        deviation = random.Random(f"{said} {ScriptedTimer.taken}").uniform(-1, 1)
        self._milliseconds = float(said) * (1 + ScriptedTimer.jitter * deviation)

    def milliseconds(self) -> float:
        return self._milliseconds


def tuner(
    run: Callable[[int], object] = lambda n: None,
    space: Any = SPACE,
    name: str = "op",
    key_fn: Callable[..., Any] = lambda x: x,
    **options: Any,
) -> AutoTuner:
    """A tuned ``op``, which calls ``run(n)`` in each run of the config ``{"n": n}``.

    ``run`` must be the same code on all ranks, or they disagree: it asks :func:`is_victim`.
    """

    def op(x: Any, n: int) -> int:
        os.environ[MILLISECONDS] = str(n)
        run(n)
        return n

    op.__qualname__ = name
    # Three requests, one a config: what the journal is counted by.
    options.setdefault("search", "exhaustive")
    return autotune(space, key_fn, **options)(op)


def chosen(run: Callable[[int], object] = lambda n: None, key: Any = 7, **options: Any) -> int:
    """Tune ``op`` on this rank and call it; the n that was chosen."""
    result: int = tuner(run, **options)(key)
    return result


def is_victim() -> bool:
    """Something happens to this rank, and it happens in this start."""
    return is_armed() and dist.get_rank() == int(os.environ["CHAOS_VICTIM"])


def is_armed() -> bool:
    return os.environ["CHAOS_ARMED"] == "1"


def hang() -> None:
    time.sleep(FOREVER)


def fail(message: str = "bad PTX") -> None:
    raise RuntimeError(message)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(phase: str, act: Callable[[], None]) -> None:
    """The victim does ``act`` when it comes to a message whose phase begins with ``phase``."""
    say = Channel._exchange

    def watched(self: Channel, there: Step, message: Callable[[], Any]) -> Any:
        if there.phase.startswith(phase):
            act()
        return say(self, there, message)

    if is_victim():
        Channel._exchange = watched  # type: ignore[method-assign]


def note_attempts(notes: Path) -> None:
    """A line in ``notes`` for each request that is not answered from the journal."""
    attempt = TrialRunner.run_trial

    def noted(self: TrialRunner, request: Any, label: str) -> Any:
        with open(notes, "a") as file:
            file.write(f"{request}\n")
        ScriptedTimer.taken = 0
        return attempt(self, request, label)

    TrialRunner.run_trial = noted  # type: ignore[method-assign]


class Moments:
    """Counts the moments at which a process may be killed, and kills it at one of them."""

    def __init__(self, fatal: int | None) -> None:
        self.count, self._fatal = 0, fatal
        self._around(Channel, "_exchange")
        self._around(TrialRunner, "run_trial")
        self._around(FileJournal, "append", "finish", "remove")
        self._around(os, "replace")
        self._torn_lines()

    def pass_by(self) -> None:
        if self.count == self._fatal:
            die()
        self.count += 1

    def _around(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._guarded(getattr(owner, name)))

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.pass_by()
            result = function(*args, **kwargs)
            self.pass_by()
            return result

        return guarded

    def _torn_lines(self) -> None:
        """Killed in the middle of a line of the journal."""
        write = journal._write

        def torn(file: int, line: Any) -> None:
            if self.count == self._fatal:
                os.write(file, b"\n" + json.dumps(line).encode()[:25])
            self.pass_by()
            write(file, line)

        journal._write = torn


def in_rank(scenario: Callable[[Me], Any], folder: str) -> None:
    """Run ``scenario`` and write down how it ended on this rank; what it raised goes on."""
    warnings.simplefilter("default")  # a warning is part of what is expected
    CpuDevice.timer = lambda self: ScriptedTimer()  # type: ignore[method-assign,assignment]
    me = Me(dist.get_rank(), dist.get_world_size(), Path(folder))
    note_attempts(me.folder / f"{me.rank}.attempts")
    ending: dict[str, Any] = {}
    dist.barrier()
    begin = time.time()
    try:
        ending["chosen"] = scenario(me)
    except BaseException as error:
        ending["error"], ending["message"] = type(error).__name__, str(error)
        raise
    finally:
        ending["seconds"] = time.time() - begin
        (me.folder / f"{me.rank}.json").write_text(json.dumps(ending))
