"""The object that ``@contextual_autotune`` makes of a function.

The hot path is ``__call__`` of a settled function: it makes itself known to the thread and calls.
No environment, log, lock or message to other ranks; kernels in it run Triton's own path.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from threading import get_ident
from typing import Any

from triton_dist._tuning.engine.contextual.context import ContextualParts, triton_key
from triton_dist._tuning.engine.contextual.interception import (
    NOT_KNOWN,
    Call,
    Defaults,
    Interception,
    Watch,
)
from triton_dist._tuning.engine.contextual.launch import Launch
from triton_dist._tuning.engine.contextual.session import Contexts, Session
from triton_dist._tuning.engine.decorated import Decorated, reporting_errors
from triton_dist._tuning.protocols import RandomState, RankGroup
from triton_dist._warn import called_by_users, held_warnings
from triton_dist.errors import TritonDistError

_all: weakref.WeakSet[ContextualAutoTuner] = weakref.WeakSet()


def _release_all() -> None:
    """In the child of a fork: the thread that holds a lock there may be one of the parent."""
    for tuner in list(_all):
        tuner._tuning = threading.Lock()


os.register_at_fork(after_in_child=_release_all)

_UNSETTLED = object()


class ContextualAutoTuner(Decorated):
    """A function whose inner ``triton.autotune`` kernels are tuned by calling it again and again.

    Attributes:
        fn: the function itself; kernels in it then tune as Triton does.
        tuning_calls: how often this process called the function besides once for each call.
    """

    _kind = "contextually autotuned"

    def __init__(
        self,
        fn: Callable[..., Any],
        compose: Callable[[], ContextualParts],
        interception: Interception,
        default_group: Any,
        ranks: Callable[[], RankGroup],
        is_off: Callable[[], bool],
        torch_state: Callable[[Any], RandomState],
    ) -> None:
        """
        Args:
            default_group: has the group of all ranks in ``WORLD``; in another one all is chosen
                again.
            is_off: nothing is tuned now, and defaults are used.
            torch_state: states of torch's generators, with those among some arguments.
        """
        super().__init__(fn)
        self.tuning_calls = 0
        self._compose, self._interception, self._ranks = compose, interception, ranks
        self._default_group, self._is_off_now = default_group, is_off
        self._torch_state, self._draws = torch_state, False
        self._contexts: Contexts = {}
        self._chosen_in: object = None
        """The world that ``_contexts`` are of."""
        self._settled_in: object = _UNSETTLED
        """The world in which the last call left nothing to be tuned."""
        # Not re-entrant: what a call tunes may begin on a thread of autograd and end on its own.
        self._tuning = threading.Lock()
        _all.add(self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; tunes what its kernels meet for the first time."""
        if self._settled_in is not self._default_group.WORLD or self._interception.sessions:
            return self._call_unsettled(args, kwargs)
        return self._watched(args, kwargs)

    def _watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The settled function; notices kernels and keys that are new."""
        interception, watch = self._interception, (self, get_ident())
        before = self._torch_state((args, kwargs)) if self._draws else None
        interception.watch(watch)
        try:
            result = self.fn(*args, **kwargs)
        except BaseException as error:
            if interception.late:
                self._abandon(watch, error)
            raise
        finally:
            interception.unwatch(watch)
        return self._continue(watch, args, kwargs, result, before) if interception.late else result

    def choices(self) -> dict[str, Any]:
        """The ``triton.Config`` of each kernel and key that this function has met."""
        contexts = self._contexts.values()
        return {context.name: context.winner for context in contexts if context.winner is not None}

    def clear(self) -> None:
        """Forget what this process chose. Records on disk stay, and are looked up again."""
        for context in self._contexts.values():
            context.unbind()
        self._contexts.clear()
        self._settled_in = _UNSETTLED

    def _call_unsettled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that has to tune, or that may be part of one that does."""
        if self._interception.is_traced((args, kwargs)):
            return self.fn(*args, **kwargs)
        outer = self._interception.current_call()
        own = None if outer is None else outer.enclosing(self)
        if own is not None and own.session is not None:  # the function calls itself: one tuning
            return self._run(Call(self, outer, own.session), args, kwargs)
        if self._settled_in is not self._default_group.WORLD:
            if self._is_off():
                with self._untuned() as session:
                    return self._run(Call(self, outer, session), args, kwargs)
            with self._tuning:
                if (
                    self._settled_in is not self._default_group.WORLD
                ):  # else another thread was faster
                    return self._tune(outer, args, kwargs)
        return self._run(Call(self, outer, None), args, kwargs)

    def _untuned(self) -> Defaults:
        with suppress(TritonDistError):  # ranks that wait for this one in vain learn why
            self._ranks().note(self._name, "called it with TRITON_DIST_AUTOTUNE=0")
        return Defaults(self._interception)

    @held_warnings()
    def _tune(self, outer: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._session((args, kwargs)) as session:
            call = Call(self, outer, session)
            result = session.run(lambda: self._run(call, args, kwargs))
        self._settle(session)
        return result

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function, as ``call`` of this thread."""
        interception = self._interception
        interception.enter(call)
        try:
            if call.session is not None:
                return self.fn(*args, **kwargs)
            return self._watched(args, kwargs)
        finally:
            interception.leave(call)

    def _session(self, values: Any = ()) -> Session:
        world = self._default_group.WORLD
        if world is not self._chosen_in:  # those ranks agreed on it, and may be gone
            self.clear()
            self._chosen_in = world
        with reporting_errors(self._name, self._ranks):
            parts = self._compose()
        random_state = parts.random_state(values)
        return Session(self._name, self._contexts, parts, self._interception, random_state)

    def _is_off(self) -> bool:
        # An invalid environment variable may be set on this rank only.
        with reporting_errors(self._name, self._ranks):
            return self._is_off_now()

    def _settle(self, session: Session | Defaults) -> None:
        self.tuning_calls += session.calls - 1
        settled = all(context.winner is not None for context in self._contexts.values())
        self._settled_in = self._chosen_in if settled else _UNSETTLED
        self._draws = self._draws or session.has_drawn()

    def begin_session(self) -> Session | Defaults:
        """The settled function launches a kernel, or a key, that is new: tune from here on."""
        self._tuning.acquire()  # released when the tuning that begins here ends
        try:
            session = self._untuned() if self._is_off() else self._session()
            return session.__enter__()
        except BaseException:
            self._tuning.release()
            raise

    def launch_known(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch the config that this function has chosen, if it has."""
        context = self._contexts.get((tuner, triton_key(tuner, args, kwargs)))
        if context is None or context.winner is None:
            return NOT_KNOWN
        return Launch(tuner, args, kwargs, ExitStack()).known(context.winner)

    @held_warnings()
    def _continue(
        self,
        watch: Watch,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        before: RandomState | None,
    ) -> Any:
        """Go on with the tuning, if any, that began in the call which gave ``result``.

        Args:
            before: states of torch's generators before that call, of a function that uses them.
        """
        session: Session | Defaults | None = self._interception.late.pop(watch, None)
        if session is None:  # another thread's
            return result
        try:
            with ExitStack() as scope:
                scope.push(session)  # it was entered when it began
                session.random_state = before or session.random_state
                if not session.end_call():
                    call = Call(self, self._interception.current_call(), session)
                    result = session.run(lambda: self._run(call, args, kwargs))
            self._settle(session)
            return result
        finally:
            self._tuning.release()

    def _abandon(self, watch: Watch, error: BaseException) -> None:
        session = self._interception.late.pop(watch, None)
        if session is None:
            return
        try:
            if isinstance(error, Exception):
                session.fail_call(error)
        finally:
            session.__exit__(type(error), error)
            self._tuning.release()


called_by_users([ContextualAutoTuner.__call__])
