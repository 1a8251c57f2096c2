"""Parts of a tuner for one process: ranks that are threads, a device whose clock the test sets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from triton_dist._tuning.engine.components import Components, Hooks, ProcessFunctions, Settings
from triton_dist._tuning.engine.dispatch import AutoTuner
from triton_dist._tuning.search import Exhaustive, ShortRace
from triton_dist._tuning.store import FileJournal, FileLog, LayeredStore, MemoryStore
from triton_dist._tuning.values import ConfigSpace, Fingerprint, Policy, Sizes
from triton_dist.runtime.random import RandomState
from triton_dist.runtime.ranks import StoreRanks

SECONDS = 5.0
NOWHERE = Path("/dev/null/nowhere")
"""A folder that cannot be made."""


class FakeDevice:
    """Work takes as long as it says: ``advance`` moves the clock that timers read."""

    name = "fake"

    def __init__(self) -> None:
        self.now = 0.0
        self.capturing = False
        self.flushes = 0
        self.captures = 0
        self.synchronize_error: Exception | None = None

    def advance(self, milliseconds: float) -> None:
        self.now += milliseconds

    def synchronize(self, seconds: float | None = None) -> None:
        assert seconds is not None, "the tuner never waits without a limit"
        error, self.synchronize_error = self.synchronize_error, None
        if error is not None:
            raise error

    def timer(self) -> FakeTimer:
        return FakeTimer(self)

    def capture(self, call: Callable[[], Any], seconds: float) -> Callable[[], Any]:
        call()
        call()
        self.captures += 1
        return call

    def delay_stream(self, queueing: float = 0.0) -> None:
        self.advance(0.25)  # outside of what is timed, or the sample shows it

    def flush_cache(self) -> None:
        self.flushes += 1

    def facts(self) -> Mapping[str, str]:
        return {"gpu": "fake"}

    def shared_memory_bytes(self) -> int:
        return 1 << 16

    def is_capturing(self) -> bool:
        return self.capturing


class FakeTimer:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def start(self) -> None:
        self._begin = self._device.now

    def stop(self) -> None:
        self._end = self._device.now

    def milliseconds(self) -> float:
        return self._end - self._begin


class ThreadRank(StoreRanks):
    """One rank of a group whose ranks are threads.

    ``phases`` lists its messages; ``limits`` has the time limits of those in ``all_gather``.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float) -> None:
        super().__init__(store, rank, size)
        self.seconds = seconds
        self.phases: list[str] = []
        self.limits: dict[str, float | None] = {}

    def facts(self) -> Mapping[str, str]:
        return {"world_size": str(self.size)}

    def agreement_seconds(self) -> float:
        return self.seconds

    def first_all_gather(self, phase: str, value: Any, seconds: float | None = None) -> list[Any]:
        self.phases.append(phase)
        return super().first_all_gather(phase, value, seconds)

    def all_gather(self, phase: str, value: Any, seconds: float | None = None) -> list[Any]:
        self.phases.append(phase)
        self.limits[phase] = seconds
        return super().all_gather(phase, value, seconds)

    def broadcast(self, phase: str, value: Any, seconds: float | None = None) -> Any:
        self.phases.append(phase)
        return super().broadcast(phase, value, seconds)


def thread_ranks(size: int, seconds: float = SECONDS) -> list[ThreadRank]:
    store = dist.HashStore()
    return [ThreadRank(store, rank, size, seconds) for rank in range(size)]


def in_threads(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each body returned, or the exception that it raised."""
    results: list[Any] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a rank hangs"
    return results


@dataclass
class Rank:
    """One rank with a tuned function ``run(x, **config)`` on a device of its own.

    ``cost(rank, config)`` gives the milliseconds of a run, or raises.
    """

    ranks: Any
    space: Any
    cost: Callable[[int, dict[str, Any]], float]
    prune_fn: Callable[..., object] | None = None
    key_fn: Callable[..., Any] = lambda x, **_: x
    hooks: Hooks = field(default_factory=Hooks)
    disk: Any = field(default_factory=MemoryStore)
    policy: Policy = field(default_factory=lambda: Policy(warmup=1, repeat=3))
    fingerprint: Fingerprint | None = None
    always_tune: bool = False
    frozen: bool = False
    predict_only: bool = False
    strict: bool = False
    verbose: bool = False
    name: str = "run"
    device: FakeDevice = field(default_factory=FakeDevice)
    folder: Path = NOWHERE
    """Of the journals and logs."""
    compiler: Any = None
    remote: Any = None
    """The remote store, on the leader."""
    search: Any = Exhaustive
    check_search: Callable[[], Any] = lambda: None
    sizes: Sizes | None = None
    fallback_fn: Callable[[Any], object] = lambda config: False
    prior_fn: Callable[..., float] | None = None
    warm_start_ms: float = 30.0
    max_cached_keys: int = 4096
    deferred_checks: Callable[[], Any] = lambda: contextlib.nullcontext(lambda: None)
    calls: list[dict[str, Any]] = field(default_factory=list)
    x: Any = None
    """Of the call that runs, or ran last."""

    def __post_init__(self) -> None:
        def run(x: Any, **config: Any) -> Any:
            self.x = x
            self.calls.append(config)
            self.device.advance(self.cost(self.ranks.rank, config))
            return x, config

        run.__module__, run.__qualname__ = "ops", self.name
        memory = MemoryStore()
        self.tuned = AutoTuner(
            run,
            self.space if isinstance(self.space, ConfigSpace) else ConfigSpace(self.space),
            self.key_fn,
            self.prune_fn,
            self.hooks,
            lambda group, verbose: self.components(memory),
            memory.clear,
            ProcessFunctions(
                lambda group: self.ranks, max_cached_keys=lambda: self.max_cached_keys
            ),
            sizes=self.sizes,
            fallback_fn=self.fallback_fn,
            prior_fn=self.prior_fn,
        )

    def components(self, memory: MemoryStore) -> Components:
        return Components(
            settings=Settings(
                policy=self.policy,
                always_tune=self.always_tune,
                frozen=self.frozen,
                predict_only=self.predict_only,
                strict_versions=self.strict,
                verbose=self.verbose,
                step_seconds=SECONDS,
                compile_seconds=SECONDS,
                grace_seconds=SECONDS,
                warm_start_ms=self.warm_start_ms,
            ),
            device=self.device,
            ranks=self.ranks,
            store=LayeredStore([memory, self.disk]),
            memory_store=memory,
            search=lambda *about: self.search(*about if about[-1] else about[:-1]),
            check_search=self.check_search,
            warm_start_search=ShortRace,
            fingerprint=lambda function, space: self.fingerprint or fingerprint(),
            hardware="fake",
            trial_context=contextlib.nullcontext,
            deferred_checks=self.deferred_checks,
            tuning_lock=lambda: self.tuning_lock,
            journal=lambda key: FileJournal(self.folder / f"{key.digest}.journal"),
            log=lambda key: FileLog(self.folder / f"{key.digest}.json", self.ranks.rank),
            compiler=None if self.compiler is None else lambda: self.compiler,
            random_state=RandomState,
            remote=self.remote,
        )

    @property
    def tuning_lock(self) -> Any:
        return self.__dict__.setdefault("_gate", threading.RLock())


def fingerprint(**changes: Any) -> Fingerprint:
    facts: dict[str, Any] = {
        "hardware": {"gpu": "fake", "driver": "550.54"},
        "software": {"torch": "2.9.1+cpu", "triton": "3.6.0"},
        "topology": {"world_size": "1"},
        "policy": {"timing": "events"},
        "source": {"run": "1234"},
        "space": "abcd",
    }
    return Fingerprint(**(facts | changes))


def together(ranks: Sequence[Rank], x: Any = 1, **call: Any) -> list[Any]:
    """Every rank calls its tuned function; results or exceptions, by rank."""
    return in_threads([lambda rank=rank: rank.tuned(x, **call) for rank in ranks])
