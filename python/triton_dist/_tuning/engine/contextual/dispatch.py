"""Define the object that ``@contextual_autotune`` returns for a function.

A function is *settled* when all kernels that it has launched have a config. A call of a settled
function is the hot path: it registers the call, and the kernels run Triton's own path. It reads no
environment variable, takes no lock, writes no log and sends no message to other ranks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from triton_dist._tuning.engine.contextual.interception import (
    NO_CONFIG,
    Interception,
    RunningCall,
    SettledCall,
    UntunedSession,
)
from triton_dist._tuning.engine.contextual.kernel_tuning import ContextualComponents, triton_key
from triton_dist._tuning.engine.contextual.launch import Launch
from triton_dist._tuning.engine.contextual.session import KernelTunings, Session
from triton_dist._tuning.engine.decorated import Decorated, P, R_co, reporting_errors
from triton_dist._tuning.protocols import RandomState, RankGroup
from triton_dist._warn import deferred_warnings, register_entry_points
from triton_dist.errors import TritonDistError

if TYPE_CHECKING:
    from typing_extensions import Self

_instances: weakref.WeakSet[ContextualAutoTuner[..., Any]] = weakref.WeakSet()


def _replace_locks() -> None:
    """Replace all locks in a forked child, because a thread of the parent may hold them."""
    for tuner in list(_instances):
        tuner._tuning_lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_locks)

_UNSETTLED = object()
"""Differs from every process group, and from ``None``, which stands for no group."""

Q = ParamSpec("Q")
T = TypeVar("T")


class ContextualAutoTuner(Decorated[P, R_co]):
    """A function whose ``triton.autotune`` kernels are tuned by calling the function repeatedly.

    Attributes:
        fn: the original function. If it is called directly, Triton tunes its kernels.
        num_tuning_calls: calls that tunings in this process made in addition to the user's calls.
    """

    fn: Callable[P, R_co]
    _description = "contextually autotuned"

    def __init__(
        self,
        fn: Callable[P, R_co],
        create_components: Callable[[], ContextualComponents],
        interception: Interception,
        default_group: Any,
        ranks: Callable[[], RankGroup],
        is_off: Callable[[], bool],
        create_random_state: Callable[[Any], RandomState],
    ) -> None:
        super().__init__(fn)
        self.num_tuning_calls = 0
        self._create_components, self._interception, self._ranks = (
            create_components,
            interception,
            ranks,
        )
        self._default_group, self._is_off_now = default_group, is_off
        self._create_random_state, self._uses_random_numbers = create_random_state, False
        self._tunings: KernelTunings = {}
        self._chosen_for_world: object = None
        """The group of all ranks (the world) for which the configs of ``_tunings`` were chosen."""
        self._settled_for_world: object = _UNSETTLED
        """The world for which the function is settled."""
        # Not re-entrant, because a tuning may begin on a thread of autograd and end on the caller's
        # thread.
        self._tuning_lock = threading.Lock()
        _instances.add(self)

    if TYPE_CHECKING:
        # Type checkers bind this object inside a staticmethod, and do not bind it inside a
        # classmethod. These overloads correct both.
        @overload
        def __get__(
            self: ContextualAutoTuner[Concatenate[type[T], Q], R_co], instance: None, owner: type[T]
        ) -> ContextualAutoTuner[..., R_co]: ...
        @overload
        def __get__(self, instance: None, owner: type | None = None) -> Self: ...
        @overload
        def __get__(
            self: ContextualAutoTuner[Concatenate[T, Q], R_co],
            instance: T,
            owner: type | None = None,
        ) -> Callable[Q, R_co]: ...
        @overload
        def __get__(
            self: ContextualAutoTuner[Concatenate[type[T], Q], R_co], instance: T, owner: type[T]
        ) -> ContextualAutoTuner[Q, R_co]: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None) -> Self: ...
        def __get__(self: Any, instance: object, owner: type | None = None) -> Any: ...

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function, and tune its kernels when they are launched with a new key.

        Raises:
            RankDisagreement: ranks launch different kernels, keys or configs.
            TuningTimeout: a rank did not take part in the tuning.
            TuningFrozen: there is no record, and some rank has ``TRITON_DIST_AUTOTUNE_FROZEN`` set.
            NoValidConfig: every config of some kernel failed.
        """
        if self._settled_for_world is not self._default_group.WORLD or self._interception.sessions:
            return self._call_unsettled(args, kwargs)  # type: ignore[no-any-return]
        return self._call_settled(args, kwargs)  # type: ignore[no-any-return]

    def _call_settled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        interception, settled_call = self._interception, (self, get_ident())
        state_before = (
            self._create_random_state((args, kwargs)) if self._uses_random_numbers else None
        )
        interception.enter_settled(settled_call)
        try:
            result = self.fn(*args, **kwargs)
        except BaseException as error:
            if interception.settled_call_sessions:
                self._abort_session(settled_call, error)
            raise
        finally:
            interception.leave_settled(settled_call)
        if interception.settled_call_sessions:
            return self._finish_session(settled_call, args, kwargs, result, state_before)
        return result

    def choices(self) -> dict[str, Any]:
        """Return the ``triton.Config`` of each kernel and key that this function has launched."""
        tunings = self._tunings.values()
        return {tuning.name: tuning.winner for tuning in tunings if tuning.winner is not None}

    def clear(self) -> None:
        """Drop the choices of this process. Records on disk remain and are looked up again."""
        for tuning in self._tunings.values():
            tuning.remove_from_triton_cache()
        self._tunings.clear()
        self._settled_for_world = _UNSETTLED

    def _call_unsettled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that must tune, or that may be made inside a call that tunes."""
        if self._interception.is_traced((args, kwargs)):
            return self.fn(*args, **kwargs)
        outer = self._interception.current_call()
        own_outer_call = None if outer is None else outer.enclosing(self)
        # A recursive call belongs to the tuning of the enclosing call.
        if own_outer_call is not None and own_outer_call.session is not None:
            return self._run(RunningCall(self, outer, own_outer_call.session), args, kwargs)
        if self._settled_for_world is not self._default_group.WORLD:
            if self._is_off():
                with self._untuned() as session:
                    return self._run(RunningCall(self, outer, session), args, kwargs)
            with self._tuning_lock:
                # Another thread may have tuned the function while this thread waited.
                if self._settled_for_world is not self._default_group.WORLD:
                    return self._tune(outer, args, kwargs)
        return self._run(RunningCall(self, outer, None), args, kwargs)

    def _untuned(self) -> UntunedSession:
        with suppress(TritonDistError):  # ranks that wait for this rank show the note
            self._ranks().note(self._name, "called it with TRITON_DIST_AUTOTUNE=0 or prior")
        return UntunedSession(self._interception)

    @deferred_warnings()
    def _tune(
        self, outer: RunningCall | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._session((args, kwargs)) as session:
            call = RunningCall(self, outer, session)
            result = session.run(lambda: self._run(call, args, kwargs))
        self._update_settled(session)
        return result

    def _run(self, call: RunningCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        interception = self._interception
        interception.enter(call)
        try:
            if call.session is not None:
                return self.fn(*args, **kwargs)
            return self._call_settled(args, kwargs)
        finally:
            interception.leave(call)

    def _session(self, values: Any = ()) -> Session:
        world = self._default_group.WORLD
        # Configs are chosen by all ranks of a world together, so a new world has none.
        if world is not self._chosen_for_world:
            self.clear()
            self._chosen_for_world = world
        with reporting_errors(self._name, self._ranks):
            components = self._create_components()
        random_state = components.random_state(values)
        return Session(self._name, self._tunings, components, self._interception, random_state)

    def _is_off(self) -> bool:
        # An invalid environment variable may be set on this rank only.
        with reporting_errors(self._name, self._ranks):
            return self._is_off_now()

    def _update_settled(self, session: Session | UntunedSession) -> None:
        self.num_tuning_calls += session.num_calls - 1
        settled = all(tuning.winner is not None for tuning in self._tunings.values())
        self._settled_for_world = self._chosen_for_world if settled else _UNSETTLED
        state = session.random_state
        self._uses_random_numbers = self._uses_random_numbers or (
            state is not None and state.has_changed()
        )

    def begin_session(self) -> Session | UntunedSession:
        """Start to tune in the middle of a settled function's call, at a new kernel or key."""
        self._tuning_lock.acquire()  # released by ``_finish_session`` or ``_abort_session``
        try:
            session = self._untuned() if self._is_off() else self._session()
            return session.__enter__()
        except BaseException:
            self._tuning_lock.release()
            raise

    def launch_if_tuned(self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch the config that this function has chosen, or return ``NO_CONFIG``."""
        tuning = self._tunings.get((autotuner, triton_key(autotuner, args, kwargs)))
        if tuning is None or tuning.winner is None:
            return NO_CONFIG
        return Launch(autotuner, args, kwargs, ExitStack()).run_in_production(tuning.winner)

    @deferred_warnings()
    def _finish_session(
        self,
        settled_call: SettledCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        state_before: RandomState | None,
    ) -> Any:
        """Finish the tuning, if any, that began inside the call that returned ``result``.

        ``state_before`` is the state of the random generators before that call.
        """
        session: Session | UntunedSession | None = self._interception.settled_call_sessions.pop(
            settled_call, None
        )
        if session is None:  # the session belongs to another thread
            return result
        try:
            with ExitStack() as scope:
                scope.push(session)  # entered by ``begin_session``
                session.random_state = state_before or session.random_state
                if not session.end_call():
                    call = RunningCall(self, self._interception.current_call(), session)
                    result = session.run(lambda: self._run(call, args, kwargs))
            self._update_settled(session)
            return result
        finally:
            self._tuning_lock.release()

    def _abort_session(self, settled_call: SettledCall, error: BaseException) -> None:
        """End the tuning, if any, that began inside the call that raised ``error``."""
        session = self._interception.settled_call_sessions.pop(settled_call, None)
        if session is None:
            return
        try:
            if isinstance(error, Exception):
                session.fail_call(error)
        finally:
            session.__exit__(type(error), error)
            self._tuning_lock.release()


register_entry_points([ContextualAutoTuner.__call__])
