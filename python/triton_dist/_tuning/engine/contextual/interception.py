"""Intercept the launches of ``triton.autotune`` kernels while a decorated function runs.

Two methods of Triton's ``Autotuner`` are replaced while a decorated function runs. If subclasses
override ``run``, their ``run`` is replaced too (see ``launch``).

* ``run``, during a call that tunes: the replacement receives every launch.
* ``prune_configs``, during a call of a *settled* function, whose known kernels all have a config.
  Triton's ``run`` calls ``prune_configs`` only for a key without a config. So kernels with a config
  run Triton's own path, and a new key is nevertheless detected and tuned on all ranks together. If
  other code calls ``prune_configs``, it gets the configs as usual.

The replaced methods are used by all threads of the process. A launch belongs to the decorated
function that runs on the launching thread. A launch on an autograd thread belongs to the decorated
function that runs the backward pass. Other launches are passed to Triton unchanged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Protocol

from triton.runtime.autotuner import Autotuner, Config

from triton_dist._tuning.engine.contextual.launch import (
    Launch,
    OverriddenRuns,
    Run,
    RunTarget,
    run_target,
)
from triton_dist._tuning.protocols import RandomState, ThreadValue

_TRITON_RUN_CODE = Autotuner.run.__code__


class Session(Protocol):
    """A tuning that runs while a function runs."""

    def launch(self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch a kernel instead of ``autotuner.run(*args, **kwargs)``."""


class SettledFunction(Protocol):
    """A settled decorated function: all kernels that it has launched have a config."""

    def begin_session(self) -> Session:
        """Start to tune, because the function launched a kernel without a config."""

    def launch_if_tuned(self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch a kernel if its config is known, else return ``NO_CONFIG``."""


class RunningCall:
    """Running call of a decorated function that is not settled. ``outer`` is the enclosing call."""

    def __init__(self, owner: object, outer: RunningCall | None, session: Session | None) -> None:
        self.owner, self.outer, self.session = owner, outer, session

    def enclosing(self, owner: object) -> RunningCall | None:
        """Return the innermost call of ``owner``, from this call outwards, or ``None``."""
        call: RunningCall | None = self
        while call is not None and call.owner is not owner:
            call = call.outer
        return call


NO_CONFIG = object()

SettledCall = tuple[SettledFunction, int]
"""A running call of a settled function, and its thread."""


class Interception:
    """The interception of launches in this process. There is one instance.

    Attributes:
        sessions: the running tunings, on all threads.
        settled_call_sessions: maps each call of a settled function to the tuning that began in it.
        is_traced: returns whether a call with these values computes nothing, such as with fake or
            meta tensors.
    """

    def __init__(
        self,
        current: ThreadValue,
        in_backward: Callable[[], bool],
        is_traced: Callable[[Iterable[Any]], bool],
    ) -> None:
        self._current, self._in_backward, self.is_traced = current, in_backward, is_traced
        self._overridden_runs = OverriddenRuns(self._replacement_of_overridden_run)
        self._run, self._prune = Autotuner.run, Autotuner.prune_configs
        self._intercepting_run = self._run_replacement()
        self._intercepting_prune = self._prune_replacement()
        self._lock = threading.Lock()
        self.sessions: list[Session] = []
        self.settled_call_sessions: dict[SettledCall, Any] = {}
        self._settled_calls: list[SettledCall] = []

    def current_call(self) -> RunningCall | None:
        call: RunningCall | None = self._current.get()
        return call

    def enter(self, call: RunningCall) -> None:
        self._current.put(call)

    def leave(self, call: RunningCall) -> None:
        self._current.put(call.outer)

    def begin(self, session: Session) -> None:
        with self._lock:
            # Other code may have replaced these methods since the last tuning, so save them now.
            if not self.sessions:
                self._run, Autotuner.run = Autotuner.run, self._intercepting_run
            if not self._settled_calls:
                self._prune = Autotuner.prune_configs
                if not self.sessions:
                    self._overridden_runs.find()
            self._overridden_runs.replace()
            self.sessions.append(session)

    def end(self, session: Session) -> None:
        with self._lock:
            self.sessions.remove(session)
            if not self.sessions:
                Autotuner.run = self._run
                self._overridden_runs.restore()
                self._overridden_runs.find()  # the function may have imported new classes
                if self._settled_calls:
                    self._overridden_runs.replace(only_prune_callers=True)

    def enter_settled(self, settled_call: SettledCall) -> None:
        """Begin a call of a settled function. Take no lock, to keep such calls fast."""
        self._settled_calls.append(settled_call)
        Autotuner.prune_configs = self._intercepting_prune
        if self._overridden_runs.prune_callers:
            self._overridden_runs.replace(only_prune_callers=True)

    def leave_settled(self, settled_call: SettledCall) -> None:
        self._settled_calls.remove(settled_call)
        if not self._settled_calls:
            Autotuner.prune_configs = self._prune
            if self._overridden_runs.prune_callers and not self.sessions:
                self._overridden_runs.restore(only_prune_callers=True)
            if self._settled_calls:  # another thread began a call meanwhile
                Autotuner.prune_configs = self._intercepting_prune
                self._overridden_runs.replace(only_prune_callers=True)

    def reset_after_fork(self) -> None:
        """In a forked child, keep only the calls of this thread."""
        thread, call, kept = threading.get_ident(), self.current_call(), []
        while call is not None:
            kept.append(call.session)
            call = call.outer
        was_tuning, had_settled_calls = bool(self.sessions), bool(self._settled_calls)
        self._lock = threading.Lock()
        self.sessions = [session for session in self.sessions if session in kept]
        self._settled_calls = [
            settled_call for settled_call in self._settled_calls if settled_call[1] == thread
        ]
        self.settled_call_sessions = {
            settled_call: session
            for settled_call, session in self.settled_call_sessions.items()
            if settled_call in self._settled_calls
        }
        if was_tuning and not self.sessions:
            Autotuner.run = self._run
        if had_settled_calls and not self._settled_calls:
            Autotuner.prune_configs = self._prune

    def kept_configs(
        self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Return the configs that the kernel's own pruning keeps for this launch."""
        before = getattr(autotuner, "nargs", None)
        autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
        prune = type(autotuner).prune_configs  # a subclass may override it
        try:
            prune = self._prune if prune is self._intercepting_prune else prune
            return list(prune(autotuner, kwargs))
        finally:
            autotuner.nargs = before

    def _run_replacement(self) -> Callable[..., Any]:
        def run(autotuner: Any, /, *args: Any, **kwargs: Any) -> Any:
            call = self.current_call()
            session = None if call is None else call.session
            if session is None or not self._is_tunable(autotuner, args, kwargs):
                return self._run(autotuner, *args, **kwargs)
            return session.launch(autotuner, args, kwargs)

        return run

    def _is_tunable(self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this is a launch of a kernel with several configs, and not traced."""
        if kwargs.get("warmup") or len(autotuner.configs) < 2:
            return False
        return not self.is_traced((args, kwargs))

    def _replacement_of_overridden_run(
        self, autotuner_class: type[Autotuner], original: Run
    ) -> Run:
        target = run_target(autotuner_class)

        def run(autotuner: Any, /, *args: Any, **kwargs: Any) -> Any:
            call = self.current_call()
            session = None if call is None else call.session
            settled_call = self._current_settled_call() if session is None else None
            if (session is None and settled_call is None) or not self._is_tunable(
                autotuner, args, kwargs
            ):
                return original(autotuner, *args, **kwargs)
            if target is not RunTarget.PRUNE_CONFIGS:
                if target is RunTarget.NEITHER:
                    self._overridden_runs.warn(autotuner)
                return original(autotuner, *args, **kwargs)
            if session is not None:
                return session.launch(autotuner, args, kwargs)
            assert settled_call is not None
            if settled_call not in self.settled_call_sessions:
                result = settled_call[0].launch_if_tuned(autotuner, args, kwargs)
                if result is not NO_CONFIG:
                    return result
            return self._session_of(settled_call).launch(autotuner, args, kwargs)

        return run

    def _session_of(self, settled_call: SettledCall) -> Session:
        session: Session | None = self.settled_call_sessions.get(settled_call)
        if session is None:
            session = self.settled_call_sessions[settled_call] = settled_call[0].begin_session()
        return session

    def _prune_replacement(self) -> Callable[..., Any]:
        def prune_configs(autotuner: Any, kwargs: dict[str, Any]) -> list[Any]:
            # Autotuner.warmup calls this too, and does not pass ``warmup``.
            settled_call = None if kwargs.get("warmup", True) else self._current_settled_call()
            # Only a call by Triton's own ``run`` is redirected. Other callers get the configs.
            is_called_by_run = sys._getframe(1).f_code is _TRITON_RUN_CODE
            if settled_call is None or not is_called_by_run:
                return list(self._prune(autotuner, kwargs))
            nargs = autotuner.nargs
            args = tuple(nargs.values())
            if self.is_traced((args, kwargs)):
                return list(self._prune(autotuner, kwargs))
            session = self._session_of(settled_call)
            autotuner.nargs = nargs  # another thread may have tuned this kernel meanwhile
            _RunRedirection(autotuner, lambda: session.launch(autotuner, args, kwargs)).begin()
            # Triton's ``run`` takes this single config as the winner and launches it. The
            # redirection replaces this launch.
            return [_TO_BE_CHOSEN]

        return prune_configs

    def _current_settled_call(self) -> SettledCall | None:
        """Return the innermost call of a settled function on this thread. If there is none on an
        autograd thread, return the latest call of a settled function on any thread.

        Concurrent backward passes of several settled functions cannot be distinguished.
        """
        calls, thread = list(self._settled_calls), threading.get_ident()
        candidates = [settled_call for settled_call in calls if settled_call[1] == thread]
        if not candidates and self._in_backward():
            candidates = calls
        return candidates[-1] if candidates else None


class _ToBeChosen(Config):
    def __str__(self) -> str:
        return "chosen by contextual_autotune"


_TO_BE_CHOSEN = _ToBeChosen({})


class _RunRedirection:
    """Redirection of a running ``Autotuner.run``, which has no config for its key, to ``launch``.

    Triton's ``run`` has no hook that could return another result, but it uses attributes of the
    ``Autotuner``. Until ``run`` launches the kernel, this object replaces these attributes: the
    kernel, the pre-hook, the timing, and the caches in memory and on disk.
    """

    def __init__(self, autotuner: Any, launch: Callable[[], Any]) -> None:
        self._autotuner, self._launch = autotuner, launch
        self._fn, self._pre_hook = autotuner.fn, autotuner.pre_hook
        self._cache, self._cache_results = autotuner.cache, autotuner.cache_results

    def begin(self) -> None:
        autotuner = self._autotuner
        autotuner.fn, autotuner.pre_hook = self, lambda *_, **__: None
        autotuner.cache, autotuner.cache_results = {}, False
        autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]

    def run(self, /, *_: Any, **__: Any) -> Any:
        autotuner = self._autotuner
        autotuner.fn, autotuner.pre_hook = self._fn, self._pre_hook
        autotuner.cache, autotuner.cache_results = self._cache, self._cache_results
        del autotuner._bench
        try:
            return self._launch()
        except BaseException:
            autotuner.nargs = None  # Triton's run resets it only if it returns
            raise


class UntunedSession:
    """Replacement of a session if tuning is off: each kernel uses its first config."""

    num_calls = 1
    random_state: RandomState | None = None

    def __init__(self, interception: Interception) -> None:
        self._interception = interception

    def __enter__(self) -> UntunedSession:
        self._interception.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._interception.end(self)

    def launch(self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Launch(autotuner, args, kwargs, ExitStack()).run_in_production(autotuner.configs[0])

    def run(self, call: Callable[[], Any]) -> Any:
        return call()

    def end_call(self) -> bool:
        return True

    def fail_call(self, error: Exception) -> None:
        pass
