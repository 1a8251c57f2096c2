"""Parts that tunings of both decorators share in a process."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from triton_dist import knobs
from triton_dist._tuning.engine.parts import Common, Settings
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.protocols import Device, RankGroup, Store
from triton_dist._tuning.source import Source
from triton_dist._tuning.store import (
    FileJournal,
    FileStore,
    LayeredStore,
    PackStore,
    ReadOnlyStore,
)
from triton_dist._tuning.values import Fingerprint, Policy
from triton_dist._warn import warn
from triton_dist.errors import TuningWarning
from triton_dist.runtime import marking
from triton_dist.runtime.compiling import CompilePool, shipped
from triton_dist.runtime.device import current_device
from triton_dist.runtime.inherited import InheritedValue
from triton_dist.runtime.random import RandomState
from triton_dist.runtime.sharing import ranks_per_gpu
from triton_dist.runtime.triton_compat import software_versions
from triton_dist.runtime.waits import bounded_waits, settling

_regions: set[object] = set()
"""One for each ``autotuning`` region that this process is in."""


@contextmanager
def autotuning() -> Iterator[None]:
    """Region in which calls may tune although the environment forbids it: neither
    ``TRITON_DIST_AUTOTUNE=0`` nor ``TRITON_DIST_AUTOTUNE_FROZEN=1`` counts there.

    It is of the process, in all its threads, as the variables are: a backward pass runs in others.
    Ranks that tune together must all be in one. ``autotune=False`` of a call holds there too. What
    was chosen stays chosen: calls of the same keys use it afterwards.
    """
    region = object()
    _regions.add(region)
    try:
        yield
    finally:
        _regions.discard(region)


def is_off() -> bool:
    """True where nothing is tuned or looked up, and defaults are used."""
    return not (_regions or knobs.autotune.get())


# A trial that waits for its backward pass is paused by what tunes there.
watchdog.around = InheritedValue("triton_dist.watches")
_gates: weakref.WeakKeyDictionary[Any, TuningLock] = weakref.WeakKeyDictionary()
"""By ranks, as long as these live."""


def hardware_of(device: Device, ranks: RankGroup) -> str:
    """The part of the hardware that results of other hardware are kept beside, not replaced by."""
    group = [f"{name} {value}" for name, value in sorted(ranks.facts().items())]
    return ", ".join([device.name, device.facts().get("gpu", "no gpu"), *group])


# A thread of the parent may hold one, and there is none in the child of a fork to release it.
os.register_at_fork(after_in_child=_gates.clear)


@functools.cache
def file_store(root: Path) -> FileStore:
    return FileStore(root)


@functools.cache
def read_only_store(root: Path) -> ReadOnlyStore:
    return ReadOnlyStore(root)


@functools.cache
def pack_store(root: Path) -> PackStore:
    return PackStore(root)


def common_parts(policy: Policy, ranks: RankGroup, verbose: bool, *stores: Store) -> Common:
    """Parts that both tuners have, as the environment is now.

    Args:
        stores: looked up besides the user's own files and the read-only folders: the first before
            them, the others after them.
    """
    shipped.install()
    device: Device = current_device()
    seconds = knobs.autotune_timeout.get()
    files = file_store(knobs.cache_dir.get())
    folders = map(read_only_store, knobs.autotune_readonly_dirs.get())
    return Common(
        settings=Settings(
            policy=policy,
            always_tune=knobs.autotune_always_tune.get(),
            frozen=not _regions and knobs.autotune_frozen.get(),
            strict=knobs.autotune_version_check.get(),
            verbose=verbose or knobs.autotune_print.get(),
            seconds=seconds,
            compile_seconds=knobs.compile_timeout.get(),
            grace=knobs.autotune_grace.get(),
            warm_start_ms=knobs.autotune_warm_start_ms.get(),
        ),
        device=device,
        ranks=ranks,
        hardware=hardware_of(device, ranks),
        store=LayeredStore([*stores[:1], files, *folders, *stores[1:]]),
        journal=lambda key: FileJournal(files.path(key).with_suffix(".journal"), key.module),
        # Ranks wait for one another for so long: a wait in a kernel must end before.
        quiet=functools.partial(_trials, device, ranks, seconds / 2),
        settling=functools.partial(settling, device, seconds),
        # Ranks that are alone share one: they share a device too.
        tuning_lock=_gates.setdefault(ranks if ranks.size > 1 else TuningLock, TuningLock()).turn,
        compiler=CompilePool if device.name == "cuda" else None,
        random_state=RandomState,
    )


@contextmanager
def _trials(device: Device, ranks: RankGroup, seconds: float) -> Iterator[None]:
    """Within, candidates are tried, and a wait in a kernel ends after ``seconds``."""
    if device.name == "cuda" and ranks_per_gpu() > 1 and ranks.is_leader:
        _warn_of_shared_gpus(ranks_per_gpu())
    with bounded_waits(seconds), marking.off():
        yield


@functools.cache
def _warn_of_shared_gpus(ranks: int) -> None:
    """Once in a process."""
    warn(
        f"{ranks} ranks share a GPU and take turns on it: what is tuned now works, but times mean "
        "little. Its records are kept apart from those of one rank per GPU.",
        TuningWarning,
    )


def fingerprint_of(
    ranks: RankGroup,
    policy: Policy,
    source: Source,
    validators: Source,
    space: str,
    version: str = "",
) -> Fingerprint:
    """All that a record made now depends on.

    Args:
        judges: of the functions that decide which configs can win, and what is timed.
        space: digest of the config space and of these functions.
    """
    return Fingerprint(
        hardware=current_device().facts(),
        software=software_versions(),
        topology=ranks.facts(),
        policy=policy.facts(),
        source=source.digests,
        space=space,
        version=version,
        literal=source.literal | _validating(validators.literal, source.literal),
        bound=source.bound | _validating(validators.bound, source.bound),
        uncounted=source.uncounted | _validating(validators.uncounted, source.uncounted),
    )


def _validating(constants: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Constants of judges, besides those that are ``known`` of the function that is tuned; under
    names apart from these."""
    return {
        f"{name} (pruning)": text for name, text in constants.items() if known.get(name) != text
    }


Waiters: TypeAlias = "Mapping[TuningLock, tuple[int, AbstractContextManager[object]]]"
_turns = InheritedValue("triton_dist.tuning")
"""``Waiters`` of the running thread, and of the one whose backward pass it works on: by gate, who
is inside, and a lock for those that this one waits for."""


class TuningLock:
    """A lock that lets one thread tune at a time, and whoever that thread waits for.

    Re-entrant: a tuned function may call a tuned function. On GPUs it may do so on a thread of
    autograd, while its own thread waits in ``backward``. What it does not know: torch has one such
    thread for each GPU, so a backward pass of another thread, which waits for its turn there, keeps
    one that the thread inside waits for from running.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within, no other thread tunes, but those that this one waits for, one after another."""
        this = threading.get_ident()
        turns: Waiters = _turns.get() or {}
        inside, lock = turns.get(self, (None, self._lock))
        if inside == this:
            yield
            return
        with lock:
            before = _turns.put({**turns, self: (this, threading.RLock())})
            try:
                yield
            finally:
                _turns.put(before)
