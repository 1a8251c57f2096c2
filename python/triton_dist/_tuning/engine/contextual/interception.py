"""Sees the launches of ``triton.autotune`` kernels while a decorated function runs.

Two methods of Triton's ``Autotuner`` are replaced, each only while some call needs it (and ``run``
of subclasses that have their own, see ``launch``):

* ``run``, in a call that tunes: every launch comes here.
* ``prune_configs``, in a call that does not: Triton's own ``run`` comes here for a key that the
  kernel has no config for, and only then. So kernels whose config is known run Triton's own path,
  and a new shape is tuned on all ranks together all the same. Who else asks gets the configs.

Replacing is of the process; whose launch it is, the running thread tells (and the threads on which
autograd works for it). A launch of any other thread goes straight on to Triton.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Protocol

from triton.runtime.autotuner import Autotuner, Config

from triton_dist._tuning.engine.contextual.launch import Launch, Leads, OwnRuns, Run, leads
from triton_dist._tuning.protocols import RandomState

_TRITONS_RUN = Autotuner.run.__code__


class Session(Protocol):
    """A tuning that goes on while a function runs."""

    def launch(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the place of ``tuner.run(*args, **kwargs)``."""


class Watcher(Protocol):
    """A decorated function that is settled: nothing in it is left to be tuned, so far."""

    def begin_session(self) -> Session:
        """It has launched a kernel that no config is known for."""

    def launch_known(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the place of ``tuner.run`` if its config is known, else give ``NOT_KNOWN``."""


class ThreadValue(Protocol):
    """A value of the running thread that threads which work for it see too."""

    def get(self) -> Any: ...
    def put(self, value: object) -> None: ...


class Call:
    """One running call of a decorated function that may tune."""

    def __init__(self, owner: object, outer: Call | None, session: Session | None) -> None:
        self.owner, self.outer, self.session = owner, outer, session

    def enclosing(self, owner: object) -> Call | None:
        """The call of ``owner`` that this one is part of, or is."""
        call: Call | None = self
        while call is not None and call.owner is not owner:
            call = call.outer
        return call


NOT_KNOWN = object()

Watch = tuple[Watcher, int]
"""One running call of a settled function, and the thread that it is on."""


class Interception:
    """There is one in a process.

    Attributes:
        sessions: one entry for each tuning that is running on any thread.
        late: sessions that began in the middle of a call of a settled function.
        is_traced: whether what is called with these values would compute nothing, as on fake and
            meta tensors.
    """

    def __init__(
        self,
        current: ThreadValue,
        in_backward: Callable[[], bool],
        is_traced: Callable[[Iterable[Any]], bool],
    ) -> None:
        self._current, self._in_backward, self.is_traced = current, in_backward, is_traced
        self._own_runs = OwnRuns(self._own_run_replacement)
        self._run, self._prune = Autotuner.run, Autotuner.prune_configs
        self._seen_run, self._seen_prune = self._run_replacement(), self._prune_replacement()
        self._lock = threading.Lock()
        self.sessions: list[Session] = []
        self.late: dict[Watch, Any] = {}
        self._watches: list[Watch] = []

    def current_call(self) -> Call | None:
        call: Call | None = self._current.get()
        return call

    def enter(self, call: Call) -> None:
        self._current.put(call)

    def leave(self, call: Call) -> None:
        self._current.put(call.outer)

    def begin(self, session: Session) -> None:
        with self._lock:
            if not self.sessions:
                self._run, Autotuner.run = Autotuner.run, self._seen_run
            if not self._watches:
                self._prune = Autotuner.prune_configs
                if not self.sessions:
                    self._own_runs.find()
            self._own_runs.replace()
            self.sessions.append(session)

    def end(self, session: Session) -> None:
        with self._lock:
            self.sessions.remove(session)
            if not self.sessions:
                Autotuner.run = self._run
                self._own_runs.restore()
                self._own_runs.find()  # the function may have imported some
                if self._watches:
                    self._own_runs.replace(only_pruning=True)

    def watch(self, watch: Watch) -> None:
        """Begin a call of a settled function. Without a lock, which would cost more than all else
        of such a call."""
        self._watches.append(watch)
        Autotuner.prune_configs = self._seen_prune
        if self._own_runs.pruning:
            self._own_runs.replace(only_pruning=True)

    def unwatch(self, watch: Watch) -> None:
        self._watches.remove(watch)
        if not self._watches:
            Autotuner.prune_configs = self._prune
            if self._own_runs.pruning and not self.sessions:
                self._own_runs.restore(only_pruning=True)
            if self._watches:  # another thread came in between
                Autotuner.prune_configs = self._seen_prune
                self._own_runs.replace(only_pruning=True)

    def forget(self) -> None:
        """In the child of a fork: only what this thread is in goes on."""
        thread, call, own = threading.get_ident(), self.current_call(), []
        while call is not None:
            own.append(call.session)
            call = call.outer
        was_tuning, was_watching = bool(self.sessions), bool(self._watches)
        self._lock = threading.Lock()
        self.sessions = [session for session in self.sessions if session in own]
        self._watches = [watch for watch in self._watches if watch[1] == thread]
        self.late = {watch: late for watch, late in self.late.items() if watch in self._watches}
        if was_tuning and not self.sessions:
            Autotuner.run = self._run
        if was_watching and not self._watches:
            Autotuner.prune_configs = self._prune

    def prune(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The configs that the kernel's own pruning leaves for this launch."""
        before = getattr(tuner, "nargs", None)
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        prune = type(tuner).prune_configs  # a subclass may have its own
        try:
            return list((self._prune if prune is self._seen_prune else prune)(tuner, kwargs))
        finally:
            tuner.nargs = before

    def _run_replacement(self) -> Callable[..., Any]:
        def run(tuner: Any, /, *args: Any, **kwargs: Any) -> Any:
            call = self.current_call()
            session = None if call is None else call.session
            if session is None or not self._counts(tuner, args, kwargs):
                return self._run(tuner, *args, **kwargs)
            return session.launch(tuner, args, kwargs)

        return run

    def _counts(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if it is a launch, of a kernel that has something to be tuned."""
        if kwargs.get("warmup") or len(tuner.configs) < 2:
            return False
        return not self.is_traced((args, kwargs))

    def _own_run_replacement(self, kind: type[Autotuner], own: Run) -> Run:
        leading = leads(kind)

        def run(tuner: Any, /, *args: Any, **kwargs: Any) -> Any:
            call = self.current_call()
            session = None if call is None else call.session
            watch = self._own_watch() if session is None else None
            if (session is None and watch is None) or not self._counts(tuner, args, kwargs):
                return own(tuner, *args, **kwargs)
            if leading is not Leads.TO_PRUNING:
                if leading is Leads.ELSEWHERE:
                    self._own_runs.warn(tuner)
                return own(tuner, *args, **kwargs)
            if session is not None:
                return session.launch(tuner, args, kwargs)
            assert watch is not None
            if watch not in self.late:
                result = watch[0].launch_known(tuner, args, kwargs)
                if result is not NOT_KNOWN:
                    return result
            return self._late_session(watch).launch(tuner, args, kwargs)

        return run

    def _late_session(self, watch: Watch) -> Session:
        session: Session | None = self.late.get(watch)
        if session is None:
            session = self.late[watch] = watch[0].begin_session()
        return session

    def _prune_replacement(self) -> Callable[..., Any]:
        def prune_configs(tuner: Any, kwargs: dict[str, Any]) -> list[Any]:
            # Autotuner.warmup comes here too, and passes no ``warmup``.
            watch = None if kwargs.get("warmup", True) else self._own_watch()
            of_triton = sys._getframe(1).f_code is _TRITONS_RUN
            if watch is None or not of_triton:
                return list(self._prune(tuner, kwargs))
            nargs = tuner.nargs
            args = tuple(nargs.values())
            if self.is_traced((args, kwargs)):
                return list(self._prune(tuner, kwargs))
            session = self._late_session(watch)
            tuner.nargs = nargs  # it may have waited for another thread's tuning of this kernel
            _Detour(tuner, lambda: session.launch(tuner, args, kwargs)).begin()
            return [_TO_BE_CHOSEN]

        return prune_configs

    def _own_watch(self) -> Watch | None:
        """The innermost settled call that this thread is in, or works for.

        torch does not tell whose backward pass a thread of autograd does; a process that has
        several at once, each in a settled function that meets a new key, is not told apart.
        """
        watches, thread = list(self._watches), threading.get_ident()
        own = [watch for watch in watches if watch[1] == thread]
        if not own and self._in_backward():
            own = watches
        return own[-1] if own else None


class _ToBeChosen(Config):
    def __str__(self) -> str:
        return "chosen by contextual_autotune"


_TO_BE_CHOSEN = _ToBeChosen({})


class _Detour:
    """Leads the running ``Autotuner.run`` of Triton, which has found no config for its key, to
    ``launch`` instead of to its own tuning and launch.

    There is no way to return from inside it with a result but through the attributes that it is
    about to use: until it comes to launch, the kernel, the hook, the timing, and the caches in
    memory (a library's may be on disk) and on disk of this one ``Autotuner`` are replaced.
    """

    def __init__(self, tuner: Any, launch: Callable[[], Any]) -> None:
        self._tuner, self._launch = tuner, launch
        self._fn, self._pre_hook = tuner.fn, tuner.pre_hook
        self._cache, self._cache_results = tuner.cache, tuner.cache_results

    def begin(self) -> None:
        tuner = self._tuner
        tuner.fn, tuner.pre_hook = self, _do_nothing
        tuner.cache, tuner.cache_results = {}, False
        tuner._bench = _measure_nothing

    def run(self, /, *_: Any, **__: Any) -> Any:
        tuner = self._tuner
        tuner.fn, tuner.pre_hook = self._fn, self._pre_hook
        tuner.cache, tuner.cache_results = self._cache, self._cache_results
        del tuner._bench
        try:
            return self._launch()
        except BaseException:
            tuner.nargs = None  # Triton's run, which this leaves, does so at its end alone
            raise


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _measure_nothing(*_: Any, **__: Any) -> list[float]:
    return [0.0, 0.0, 0.0]


class Defaults:
    """In place of a session. Nothing is looked up, measured or kept."""

    calls = 1
    random_state: RandomState | None = None

    def __init__(self, interception: Interception) -> None:
        self._interception = interception

    def __enter__(self) -> Defaults:
        self._interception.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._interception.end(self)

    def launch(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Launch(tuner, args, kwargs, ExitStack()).known(tuner.configs[0])

    def run(self, call: Callable[[], Any]) -> Any:
        return call()

    def has_drawn(self) -> bool:
        return False

    def end_call(self) -> bool:
        return True

    def fail_call(self, error: Exception) -> None:
        pass
