"""Provide what both tuners share: components, locks and fingerprints."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from triton_dist import knobs
from triton_dist._tuning.engine.components import CommonComponents, Settings
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.protocols import Device, RankGroup, Store
from triton_dist._tuning.source import SourceDependencies
from triton_dist._tuning.store import (
    FileJournal,
    FileStore,
    LayeredStore,
    PackStore,
    ReadOnlyStore,
    configured_remote,
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
from triton_dist.runtime.waits import bounded_waits, deferred_checks

_autotuning_blocks: set[object] = set()
"""One object for each ``autotuning`` block that is active in this process."""


@contextmanager
def autotuning() -> Iterator[None]:
    """Context manager in which calls may tune although the environment forbids it.

    Inside it, ``TRITON_DIST_AUTOTUNE`` and ``TRITON_DIST_AUTOTUNE_FROZEN`` have no effect. The
    keyword ``autotune=False`` of a call keeps its effect. The context manager applies to all
    threads of the process, because autograd runs backward passes on other threads. All ranks that
    tune together must be inside. Configs that were chosen inside are also used afterwards.
    """
    block = object()
    _autotuning_blocks.add(block)
    try:
        yield
    finally:
        _autotuning_blocks.discard(block)


def is_off() -> bool:
    """Return whether tuning and look-ups are disabled, so that default configs are used."""
    return not (_autotuning_blocks or knobs.autotune.get())


def is_predict_only() -> bool:
    """Return whether predictions replace measurements (``TRITON_DIST_AUTOTUNE=prior``)."""
    return not _autotuning_blocks and knobs.autotune.get() == "prior"


# A trial may wait for a backward pass on another thread. If the other thread tunes a function, it
# must pause the time limit (the watch) of the trial.
watchdog.enclosing_watches = InheritedValue("triton_dist.watches")
_tuning_locks: weakref.WeakKeyDictionary[Any, TuningLock] = weakref.WeakKeyDictionary()


def hardware_of(device: Device, ranks: RankGroup) -> str:
    """Return the part of a key that names the hardware."""
    group = [f"{name} {value}" for name, value in sorted(ranks.facts().items())]
    return ", ".join([device.name, device.facts().get("gpu", "no gpu"), *group])


# After a fork, a lock may be held by a thread that exists only in the parent.
os.register_at_fork(after_in_child=_tuning_locks.clear)


file_store = functools.cache(FileStore)
read_only_store = functools.cache(ReadOnlyStore)
pack_store = functools.cache(PackStore)


def common_components(
    policy: Policy, ranks: RankGroup, verbose: bool, *stores: Store
) -> CommonComponents:
    """Return the components that both tuners use, from the current environment variables.

    Args:
        verbose: print tunings to standard error.
        stores: further stores. The first is searched before the user's files and the read-only
            folders, the rest after them.
    """
    shipped.install()
    device: Device = current_device()
    seconds = knobs.autotune_timeout.get()
    files = file_store(knobs.cache_dir.get())
    folders = map(read_only_store, knobs.autotune_readonly_dirs.get())
    # All groups that consist of this rank alone share a lock, because they share the device.
    lock_key = ranks if ranks.size > 1 else TuningLock
    return CommonComponents(
        settings=Settings(
            policy=policy,
            always_tune=knobs.autotune_always_tune.get(),
            frozen=not _autotuning_blocks and knobs.autotune_frozen.get(),
            predict_only=is_predict_only(),
            strict_versions=knobs.autotune_version_check.get(),
            verbose=verbose or knobs.autotune_print.get(),
            step_seconds=seconds,
            compile_seconds=knobs.compile_timeout.get(),
            grace_seconds=knobs.autotune_grace.get(),
            warm_start_ms=knobs.autotune_warm_start_ms.get(),
        ),
        device=device,
        ranks=ranks,
        hardware=hardware_of(device, ranks),
        store=LayeredStore([*stores[:1], files, *folders, *stores[1:]]),
        journal=lambda key: FileJournal(files.path(key).with_suffix(".journal"), key.module),
        # Other ranks wait for ``seconds`` for this rank. A wait in a kernel must end earlier.
        trial_context=functools.partial(_bounded_trials, device, ranks, seconds / 2),
        deferred_checks=functools.partial(deferred_checks, device, seconds),
        tuning_lock=_tuning_locks.setdefault(lock_key, TuningLock()).hold,
        compiler=CompilePool if device.name == "cuda" else None,
        random_state=RandomState,
        remote=configured_remote() if ranks.is_leader else None,
    )


@contextmanager
def _bounded_trials(device: Device, ranks: RankGroup, seconds: float) -> Iterator[None]:
    """Context manager for trials: a wait in a kernel ends after ``seconds``."""
    if device.name == "cuda" and ranks_per_gpu() > 1 and ranks.is_leader:
        _warn_of_shared_gpus(ranks_per_gpu())
    with bounded_waits(seconds), marking.off():
        yield


@functools.cache
def _warn_of_shared_gpus(ranks: int) -> None:
    warn(
        f"{ranks} ranks share a GPU and run alternately on it. Tuning works, but the times do "
        "not predict the performance with one rank per GPU. Records are kept separately from "
        "records with one rank per GPU.",
        TuningWarning,
    )


def fingerprint_of(
    ranks: RankGroup,
    policy: Policy,
    function_source: SourceDependencies,
    hooks_source: SourceDependencies,
    space: str,
    version: str = "",
) -> Fingerprint:
    """Return everything that a new record depends on, besides its key.

    Args:
        function_source: statements and constants that the tuned function depends on.
        hooks_source: statements and constants that the hooks (such as ``prune_fn``) depend on.
            Hooks decide which configs can win and what is timed.
        space: digest of the config space and the hooks.
        version: the version that the author of the function declared.
    """
    return Fingerprint(
        hardware=current_device().facts(),
        software=software_versions(),
        topology=ranks.facts(),
        policy=policy.fingerprint_fields(),
        source=function_source.digests,
        space=space,
        version=version,
        literal=function_source.literal
        | _additional_constants(hooks_source.literal, function_source.literal),
        bound=function_source.bound
        | _additional_constants(hooks_source.bound, function_source.bound),
        uncounted=function_source.uncounted
        | _additional_constants(hooks_source.uncounted, function_source.uncounted),
    )


def _additional_constants(constants: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the ``constants`` of hooks that are not in ``known`` or have other values there, with
    "(pruning)" in the name."""
    return {
        f"{name} (pruning)": text for name, text in constants.items() if known.get(name) != text
    }


Holders: TypeAlias = "Mapping[TuningLock, tuple[int, AbstractContextManager[object]]]"
_lock_holders = InheritedValue("triton_dist.tuning")
"""For each tuning lock that this thread may enter: the id of the holding thread, and an inner lock
for threads for which the holding thread waits. A thread of autograd inherits the value."""


class TuningLock:
    """A re-entrant lock that lets one thread tune at a time.

    A tuned function may call a tuned function, also in a backward pass. On GPUs, the backward pass
    runs on a thread of autograd, and the caller waits in ``backward``. If the thread that holds the
    lock waits for another thread, that thread may therefore enter too.

    Limit: torch has one autograd thread per GPU. If this thread waits for the lock in the backward
    pass of another caller, it cannot run the backward pass of the holder.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Context manager that holds the lock, as described for the class."""
        this_thread = threading.get_ident()
        holders: Holders = _lock_holders.get() or {}
        holder_id, lock = holders.get(self, (None, self._lock))
        # This thread already holds the lock.
        if holder_id == this_thread:
            yield
            return
        # Threads for which this thread waits will take the new inner lock, one after another.
        with lock:
            before = _lock_holders.put({**holders, self: (this_thread, threading.RLock())})
            try:
                yield
            finally:
                _lock_holders.put(before)
