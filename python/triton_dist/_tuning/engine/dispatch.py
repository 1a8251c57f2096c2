"""Define the object that ``@autotune`` returns: it looks up the config and calls the function.

``__call__`` is the hot path. It calls ``key_fn`` and does one dictionary look-up. It reads no
environment variable, takes no lock, writes no log and sends no message to other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from triton_dist._tuning.engine.choice import Choice, Choices
from triton_dist._tuning.engine.components import (
    Call,
    Components,
    Hooks,
    ProcessFunctions,
    TunedFunction,
)
from triton_dist._tuning.engine.decorated import (
    Decorated,
    P,
    R_co,
    WarnOnce,
    key_of,
    reporting_errors,
    signature_error,
)
from triton_dist._tuning.engine.tuner import resolve
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.protocols import RankGroup
from triton_dist._tuning.values import (
    Config,
    ConfigSpace,
    Fingerprint,
    FunctionIdentity,
    Sizes,
    TuningRecord,
)
from triton_dist._tuning.values.config import with_fixed_arguments
from triton_dist._warn import deferred_warnings
from triton_dist.errors import CaptureInProgress, InvalidArgument, NoValidConfig, TritonDistError

if TYPE_CHECKING:
    from typing_extensions import Self

Q = ParamSpec("Q")
T = TypeVar("T")


class BoundTuner(Protocol[P, R_co]):
    """A tuned method of an object, as type checkers see it."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, autotune: bool, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, *args: Any, autotune_verbose: bool, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, *args: Any, autotune_pg: Any, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, *args: Any, autotune_allow_arg_overwrite: bool, **kwargs: Any) -> R_co: ...

    @property
    def __self__(self) -> object: ...

    @property
    def __func__(self) -> AutoTuner[..., R_co]: ...


class AutoTuner(Decorated[P, R_co]):
    """A function whose tunable arguments are chosen by measuring, once per key.

    For type checkers, ``P`` are the parameters of a call and ``R_co`` is its result. Python allows
    no keyword between ``*args: P.args`` and ``**kwargs: P.kwargs``. A call with a keyword of the
    tuner, such as ``autotune_pg``, therefore matches an overload that does not check the other
    arguments.

    Attributes:
        fn: the function without tuning.
        config_space: the candidates, evaluated at first use.
        key_fn: the ``key_fn`` of the decorator. If ``sizes=`` names parameters of the function,
            their values are added to the result.
        prune_fn: the ``prune_fn`` of the decorator.
        sizes: the sizes in the function's keys; ``None`` if there are none.
        fallback_fn: the ``fallback_fn`` of the decorator, or a function that returns ``False``.
        prior_fn: the ``prior_fn`` of the decorator, or ``None``.
        num_tunings: number of tunings in this process. Records that were found do not count.
        overwritten_arguments: names of arguments that each call overwrites completely, such as an
            output buffer. No warning is given if trials change them.
        omitted_if_untuned: names of tunable arguments that are not passed if tuning is off. The
            function's own defaults then apply.
        key_parameter: name of the parameter that receives the key if the config is cached.
            The function can then skip the checks in ``key_fn``. Empty: no parameter.
    """

    fn: Callable[P, R_co]
    _description = "autotuned"

    def __init__(
        self,
        fn: Callable[..., R_co],
        config_space: ConfigSpace,
        key_fn: Callable[..., Any],
        prune_fn: Callable[..., object] | None,
        hooks: Hooks,
        components_for: Callable[[Any, bool], Components],
        forget_records: Callable[[], None],
        process: ProcessFunctions,
        identity_of: Callable[
            [Callable[..., Any], Iterable[str]], FunctionIdentity
        ] = FunctionIdentity.of,
        sizes: Sizes | None = None,
        fallback_fn: Callable[[Config], object] = lambda config: False,
        prior_fn: Callable[..., float] | None = None,
    ) -> None:
        super().__init__(fn)
        self.config_space = config_space
        self.key_fn, self.prune_fn = key_fn, prune_fn
        self.num_tunings = 0
        self.omitted_if_untuned: tuple[str, ...] = ()
        self.key_parameter = ""
        self.overwritten_arguments: tuple[str, ...] = ()
        self._process = process
        self._hooks, self._identity_of = hooks, identity_of
        self._components_for, self._forget_records = components_for, forget_records
        self.sizes, self.fallback_fn, self.prior_fn = sizes, fallback_fn, prior_fn
        self._untraced_slow_path = self._process.untraced(self._slow_path)
        self._default_group = self._process.default_group
        self._is_compiled = self._process.is_compiled
        self._reset_for_world()
        self._tunable_names: frozenset[str] = frozenset()  # empty until the space is evaluated
        cls = type(self)
        self._warnings = WarnOnce([cls.__call__, cls.tune, cls.best_config])

    if TYPE_CHECKING:
        # Type checkers bind a static method of this type, and do not bind a class method.
        @overload
        def __get__(
            self: AutoTuner[Concatenate[type[T], Q], R_co], instance: None, owner: type[T]
        ) -> AutoTuner[..., R_co]: ...
        @overload
        def __get__(self, instance: None, owner: type | None = None) -> Self: ...
        @overload
        def __get__(
            self: AutoTuner[Concatenate[type[T], Q], R_co], instance: T, owner: type[T]
        ) -> BoundTuner[Q, R_co]: ...
        @overload
        def __get__(
            self: AutoTuner[Concatenate[T, Q], R_co], instance: T, owner: type | None = None
        ) -> BoundTuner[Q, R_co]: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None) -> Self: ...
        def __get__(self: Any, instance: object, owner: type | None = None) -> Any: ...

    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, /, *args: Any, autotune: bool, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, /, *args: Any, autotune_verbose: bool, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, /, *args: Any, autotune_pg: Any, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(
        self, /, *args: Any, autotune_allow_arg_overwrite: bool, **kwargs: Any
    ) -> R_co: ...
    def __call__(  # type: ignore[misc]  # P may have names of keywords below
        self,
        /,
        *args: Any,
        autotune: bool = True,
        autotune_verbose: bool = False,
        autotune_pg: Any = None,
        autotune_allow_arg_overwrite: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call the function with the config of this key. The first call of a key tunes it.

        Args:
            autotune: with ``False``, use the first config, without tuning or records.
            autotune_verbose: print the tuning to standard error.
            autotune_pg: process group of the ranks that tune together; by default all ranks.
            autotune_allow_arg_overwrite: accept keywords that set tunable arguments.

        Raises:
            InvalidArgument: a keyword sets a tunable argument, or a keyword of the tuner has an
                invalid value.
            RankDisagreement: the ranks' calls differ, or the call of another rank is invalid.
            TuningTimeout: a rank did not take part in the tuning.
            TuningAborted: a config failed, and the state of some rank could not be reset after it.
            TuningFrozen: there is no record, and ``TRITON_DIST_AUTOTUNE_FROZEN`` is set on some
                rank.
            NoValidConfig: no config can be used.
        """
        if autotune and (not kwargs or self._tunable_names.isdisjoint(kwargs)):
            world = self._default_group.WORLD
            try:
                if world is not self._world:
                    self._reset_for_world()
                cached_arguments = (
                    self._cached_arguments
                    if autotune_pg is None
                    else self._cached_arguments_by_group.get(autotune_pg, {})
                )
                arguments = cached_arguments.get(self.key_fn(*args, **kwargs))
            except Exception:  # The slow path raises this again and reports it to every rank.
                arguments = None
            if arguments is not None:
                if world is not None and not self._is_compiled():
                    self._num_calls_since_agreement += (
                        1  # for messages of other ranks, see `_reset_for_world`
                    )
                return self.fn(*args, **kwargs, **arguments)
        options = (autotune, autotune_verbose, autotune_pg, autotune_allow_arg_overwrite)
        return self._untraced_slow_path(args, kwargs, *options)

    @overload
    def tune(self, /, *args: P.args, **kwargs: P.kwargs) -> TuningRecord: ...
    @overload
    def tune(self, /, *args: Any, autotune_verbose: bool, **kwargs: Any) -> TuningRecord: ...
    @overload
    def tune(self, /, *args: Any, autotune_pg: Any, **kwargs: Any) -> TuningRecord: ...
    @overload
    def tune(
        self, /, *args: Any, autotune_allow_arg_overwrite: bool, **kwargs: Any
    ) -> TuningRecord: ...
    def tune(  # type: ignore[misc]  # P may have names of keywords below
        self,
        /,
        *args: Any,
        autotune_verbose: bool = False,
        autotune_pg: Any = None,
        autotune_allow_arg_overwrite: bool = False,
        **kwargs: Any,
    ) -> TuningRecord:
        """Return the record for these arguments. Tune if there is no record.

        A predicted config (``TRITON_DIST_AUTOTUNE=prior``) is not a record, and is replaced. If a
        record exists, the function is not called, and tensors without values, such as on the meta
        device, are enough. For a method, pass the object: ``Layer.forward.tune(layer, x)``.
        ``layer.forward.tune`` does not receive ``layer``.

        The arguments and errors of a call apply, and in addition:

        Raises:
            CaptureInProgress: there is no record, and nothing can be measured, because the current
                stream is captured or the tensors have no values.
        """
        self._count_call()
        options = (autotune_pg, autotune_verbose, autotune_allow_arg_overwrite)
        record = self._choose(args, kwargs, *options, must_measure=True).record
        if record is None:
            why = "has no record of this key. Tuning is impossible while the call is traced"
            is_traced = self._process.is_traced((args, kwargs))
            raise CaptureInProgress(self._name, *([why] if is_traced else []))
        return record

    @overload
    def best_config(self, /, *args: P.args, **kwargs: P.kwargs) -> Config: ...
    @overload
    def best_config(self, /, *args: Any, autotune_verbose: bool, **kwargs: Any) -> Config: ...
    @overload
    def best_config(self, /, *args: Any, autotune_pg: Any, **kwargs: Any) -> Config: ...
    @overload
    def best_config(
        self, /, *args: Any, autotune_allow_arg_overwrite: bool, **kwargs: Any
    ) -> Config: ...
    def best_config(  # type: ignore[misc]  # P may have names of keywords below
        self,
        /,
        *args: Any,
        autotune_verbose: bool = False,
        autotune_pg: Any = None,
        autotune_allow_arg_overwrite: bool = False,
        **kwargs: Any,
    ) -> Config:
        """Return the config that a call with these arguments uses. Tune if the call would tune.

        Tunable arguments that the caller sets are left out of the config. The arguments and errors
        of a call apply.
        """
        self._count_call()
        untuned = self._config_if_off(kwargs, autotune_pg, autotune_allow_arg_overwrite)
        options = (autotune_pg, autotune_verbose, autotune_allow_arg_overwrite)
        return self._choose(args, kwargs, *options).config if untuned is None else untuned

    def fingerprint(self, space: ConfigSpace | None = None) -> Fingerprint:
        """Return what a record made now depends on, besides its key: hardware, versions, ranks,
        source code.

        ``space`` has the configs to choose from; by default the whole config space.
        """
        space = self.config_space if space is None else space
        return self._components_for(None, False).fingerprint(self.fn, space)

    def identity(self) -> FunctionIdentity:
        """Return the identity of this function in its records."""
        return self._identity_of(self.fn, self.config_space.names)

    def clear(self) -> None:
        """Drop the chosen configs of this process. Records on disk stay and are looked up again."""
        self._reset_for_world()
        self._forget_records()

    def _slow_path(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autotune: bool,
        verbose: bool,
        process_group: Any,
        allow_overwrite: bool,
    ) -> Any:
        """Make a call whose key is not cached, or whose options the hot path does not handle."""
        self._count_call()
        tuned = self._from_tuned_range(args, kwargs, process_group) if autotune else None
        if tuned is not None:
            return self.fn(*args, **kwargs, **tuned)
        untuned = self._config_if_off(kwargs, process_group, allow_overwrite, autotune)
        if untuned is not None:
            arguments = untuned.arguments()
            for name in self.omitted_if_untuned:
                arguments.pop(name, None)
        elif self._process.is_traced((args, kwargs)):
            self._tunables_set_by_caller(kwargs, allow_overwrite)
            arguments = self._warn_untuned("while it is traced").arguments()
        else:
            options = (process_group, verbose, allow_overwrite)
            choice = self._choose(args, kwargs, *options, will_call_function=True)
            arguments = choice.config.arguments()
            if choice.try_recorded_winner is not None:
                all_arguments = {**arguments, **kwargs}
                # The winner of a record may fail with this driver. All ranks then tune again.
                result, winner_failure = choice.try_recorded_winner(
                    lambda: self.fn(*args, **all_arguments)
                )
                if not winner_failure:
                    return result
                choice = self._choose(args, kwargs, *options, True, winner_failure)
                arguments = choice.config.arguments()
        return self.fn(*args, **{**arguments, **kwargs})

    def _reset_for_world(self) -> None:
        """Drop all choices: the group of all ranks was created or destroyed, and other groups end
        with it."""
        world = self._default_group.WORLD
        self._choices = Choices()
        self._cached_arguments, self._cached_arguments_by_group = (
            self._choices.cached_arguments,
            self._choices.cached_arguments_by_group,
        )
        self._published_absences: set[tuple[int, str]] = set()
        self._num_calls_since_agreement = 0
        """Calls since the ranks last tuned or looked up a record together. If a call raises before
        its first message, other ranks compare this number with theirs."""
        self._world = world

    def _from_tuned_range(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], process_group: Any
    ) -> dict[str, Any] | None:
        """Return the values of the tuned arguments if the sizes of a valid call are in a tuned
        range, else ``None``. Send no message to other ranks."""
        if self.sizes is None or not self._tunable_names.isdisjoint(kwargs):
            return None
        try:
            key = self.key_fn(*args, **kwargs)
            rounded_key = self.sizes.rounded_key(key)
            choice = self._choices.by_rounded_key.get((process_group, rounded_key))
        except Exception:  # _choose calls key_fn again and reports the exception to all ranks
            return None
        if choice is None:
            return None
        self._choices.unrepeated_keys.note_repeated_call(rounded_key)
        return self._cache_config(process_group, key, choice.for_sizes(self.sizes.values(key)))

    def _cache_config(self, process_group: Any, key: Any, choice: Choice) -> dict[str, Any]:
        """Cache the config of ``choice`` for calls with this exact key. Return its arguments."""
        arguments = choice.config.arguments()
        known_key = {self.key_parameter: key} if self.key_parameter else {}
        self._choices.cache_arguments(process_group, key, {**arguments, **known_key})
        return arguments

    @deferred_warnings()
    def _choose(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        process_group: Any,
        verbose: bool,
        allow_overwrite: bool,
        will_call_function: bool = False,
        winner_failure: str = "",
        must_measure: bool = False,
    ) -> Choice:
        """Return the choice for these arguments. Look up a record or tune if there is none.

        Args:
            will_call_function: the caller runs the function with the choice immediately.
            winner_failure: why the winner of the record failed in this call. If not empty, tune
                again.
            must_measure: a choice that was predicted without measuring does not suffice.
        """
        choices = self._choices

        def known_choice() -> Choice | None:
            found = None if winner_failure else choices.by_ranks_and_key.get((ranks, key))
            return None if found and must_measure and found.record is None else found

        with self._reporting(process_group):
            ranks = self._process.ranks(process_group)
            fixed = self._tunables_set_by_caller(kwargs, allow_overwrite)
            space = self.config_space.without(fixed) if fixed else self.config_space
            if fixed and not space.names:  # the caller sets all tunable arguments
                self._publish_absence(
                    process_group, f"called it with {fixed}, which leaves nothing to tune"
                )
                return Choice(space.default, None)
            error = signature_error(
                self.fn, self.config_space.names, args, {**self._default_config(), **kwargs}
            )
            if error:
                raise TypeError(f"{self._name}(): {error}{self._hint_for_method(args)}")
            exact_key = key_of(self._name, self.key_fn, args, kwargs, fixed)
            key = exact_key if self.sizes is None else self.sizes.rounded_key(exact_key)
            sizes = () if self.sizes is None else self.sizes.values(exact_key)
            choice = known_choice()
            if choice is not None:
                choice = choice.for_sizes(sizes)
                if not fixed:  # the exact key is not cached yet, or was evicted
                    choices.unrepeated_keys.note_repeated_call(key)
                    self._cache_config(process_group, exact_key, choice)
                return choice
            components = self._components_for(process_group, verbose)
            tuned_fn = TunedFunction(
                self.fn,
                self._name,
                self._identity_of(self.fn, space.names),
                space,
                self.prune_fn,
                self._hooks,
                self.sizes and self.sizes.with_fixed_arguments(fixed) if fixed else self.sizes,
                with_fixed_arguments(self.fallback_fn, fixed) if fixed else self.fallback_fn,
                self.prior_fn and with_fixed_arguments(self.prior_fn, fixed),
            )
        # If this call is made in a trial of another tuned function, the time of this tuning does
        # not count for the time limit of that trial.
        with watchdog.paused(), components.tuning_lock():
            # Another thread may have tuned the key while this thread waited for the lock.
            choice = known_choice()
            if choice is None:
                is_traced = self._process.is_traced((args, kwargs))
                agreed_keys = tuple(
                    key for group, key in choices.by_ranks_and_key if group == ranks
                )
                if not agreed_keys:  # only at the first key of a group, to keep other calls cheap
                    choices.drop_destroyed_groups(self._process.is_destroyed)
                call = Call(
                    args,
                    kwargs,
                    key,
                    self._num_calls_since_agreement,
                    is_traced,
                    sizes,
                    will_call_function,
                    winner_failure,
                    agreed_keys,
                    must_measure,
                )
                choice = self._resolve(tuned_fn, components, call)
                self._num_calls_since_agreement = 0
            if choice.is_reusable:
                replaced = choices.by_ranks_and_key.get((ranks, key))
                if replaced is not None and replaced.record is None:
                    for table in (
                        choices.cached_arguments,
                        choices.cached_arguments_by_group,
                        choices.by_rounded_key,
                    ):
                        table.clear()  # some entries belong to the prediction
                kept = choices.by_ranks_and_key[ranks, key] = replace(
                    choice, try_recorded_winner=None
                )
                if not fixed:
                    choices.max_cached_keys = self._process.max_cached_keys()
                    choices.by_rounded_key[process_group, key] = kept
                    if not (
                        will_call_function
                        and choice.was_tuned
                        and choices.unrepeated_keys.should_delay_caching(key)
                    ):
                        self._cache_config(process_group, exact_key, choice.for_sizes(sizes))
            advice = choices.unrepeated_keys.advice(
                self._name, self.sizes.rounding if self.sizes else ()
            )
            # ``deferred_warnings`` holds warnings back until the lock is released.
            if advice and components.ranks.is_leader:
                self._warnings.warn(advice, advice)
            return choice.for_sizes(sizes)

    def _resolve(self, tuned_fn: TunedFunction, components: Components, call: Call) -> Choice:
        choice = resolve(tuned_fn, components, call)
        self.num_tunings += choice.was_tuned
        if not choice.is_reusable and choice.record is None and components.ranks.is_leader:
            when = "while it is traced" if call.is_traced else "during CUDA-graph capture"
            self._warn_untuned(when, call.key)
        if choice.advice:
            self._warnings.warn(choice.advice, choice.advice)
        changed = [
            name for name in choice.changed_arguments if name not in self.overwritten_arguments
        ]
        if changed and self._hooks.reset is None and components.ranks.is_leader:
            names = ", ".join(map(repr, changed))
            self._warnings.warn(
                f"{self._name}: trials changed {names} in place. Each trial used the values that "
                f"the trial before left, and so does this call. Pass restore=({names},), or undo "
                "the changes in reset_fn.",
                ("changed", *changed),
            )
        return choice

    def _count_call(self) -> None:
        if self._default_group.WORLD is not self._world:
            self._reset_for_world()
        self._num_calls_since_agreement += 1

    def _reporting(self, process_group: Any) -> AbstractContextManager[None]:
        def ranks() -> RankGroup:
            try:
                return self._process.ranks(process_group)
            except TritonDistError:  # autotune_pg is invalid: report to the group of all ranks
                return self._process.ranks(None)

        return reporting_errors(self._name, ranks, self._num_calls_since_agreement)

    def _publish_absence(self, process_group: Any, why: str) -> None:
        """Publish, once per reason, why this rank may be missing when other ranks tune."""
        if (id(process_group), why) not in self._published_absences:
            self._published_absences.add((id(process_group), why))
            with suppress(TritonDistError):
                self._process.ranks(process_group).note(self._name, why)

    def _default_config(self) -> Config:
        if not self.config_space:
            raise NoValidConfig(self._name, "(any)", {})
        return self.config_space.default

    def _tunables_set_by_caller(self, kwargs: dict[str, Any], allowed: bool) -> Config:
        """Return the tunable arguments that the caller sets. Raise if that is not allowed."""
        self._tunable_names = self.config_space.names
        fixed = {name: value for name, value in kwargs.items() if name in self._tunable_names}
        if fixed and not allowed:
            name, value = next(iter(fixed.items()))
            wanted = "no value: the tuner chooses it, unless autotune_allow_arg_overwrite=True"
            raise InvalidArgument(self._name, f"keyword {name}", value, wanted)
        if fixed:
            given = ", ".join(f"{name}={value!r}" for name, value in fixed.items())
            rest = "the tuner's choice. The other tunable arguments are chosen for this value"
            self._warnings.warn(f"{self._name}: {given} overwrites {rest}")
        return Config(fixed)

    def _config_if_off(
        self, kwargs: dict[str, Any], group: Any, allow_overwrite: bool, autotune: bool = True
    ) -> Config | None:
        """If tuning is off, return the default config without the arguments that the caller sets,
        else ``None``."""
        with self._reporting(group):
            if autotune and not self._process.is_off():
                return None
            fixed, default = (
                self._tunables_set_by_caller(kwargs, allow_overwrite),
                self._default_config(),
            )
        variable = ", set by TRITON_DIST_AUTOTUNE" if autotune else ""
        self._publish_absence(group, f"called it with autotune=False{variable}")
        return Config({n: default[n] for n in default if n not in fixed}) if fixed else default

    def _warn_untuned(self, when: str, key: object = None) -> Config:
        """Warn that nothing can be tuned now, and return the default config."""
        what = self._name if key is None else f"{self._name}, key {key}"
        self._warnings.warn(
            f"{what}: not tuned yet, and tuning is impossible {when}. The first config is used. "
            "Call the function, or its tune(), once before.",
            (when, key),
        )
        return self._default_config()
