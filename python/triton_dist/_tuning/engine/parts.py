"""Inputs of a tuning: the function, its hooks, the settings, and the parts from ``compose``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from triton_dist._tuning.protocols import (
    Compiler,
    Device,
    Fingerprinter,
    Journal,
    Log,
    RandomState,
    RankGroup,
    Search,
    Store,
)
from triton_dist._tuning.values import Candidates, Config, ConfigSpace, Key, Origin, Policy, Sizes
from triton_dist.errors import InvalidArgument


@dataclass(frozen=True)
class Hooks:
    """The user's functions for the trial of a config. Each receives the arguments of the call."""

    prepare: Callable[..., object] | None = None
    """``prepare(*args, **kwargs, **config)`` compiles a config and checks its resources without
    a launch."""
    recover: Callable[..., object] | None = None
    """``recover(*args, **kwargs)`` resets the state on all ranks after a failed launch."""
    reset: Callable[..., object] | None = None
    """``reset(*args, **kwargs)`` runs before each run, untimed, for functions with side effects."""
    check: Callable[[Any, Any], object] | None = None
    """``check(output, reference)`` returns ``False`` or raises to reject the config."""
    agree: Callable[..., object] | None = None
    """``agree(*args, **kwargs)`` returns values that must be equal on all ranks, besides the
    key."""
    restore: tuple[str, ...] = ()
    """Names of arguments that the function changes. They are restored before each run, untimed."""
    input_variants: Callable[..., Iterable[Mapping[str, Any]]] | None = None
    """``input_variants(*args, **kwargs)`` returns other, equally likely values of arguments by
    name."""


class DefaultGroup(Protocol):
    """Provides the group of all ranks."""

    WORLD: Any
    """The group, or ``None`` before it is created."""


class NoGroup:
    """A group that is never created: this rank tunes alone."""

    WORLD = None


@dataclass(frozen=True)
class ProcessFunctions:
    """The functions of the process that a call needs before its parts are composed."""

    ranks: Callable[[Any], RankGroup]
    """Returns the ranks that tune together for an ``autotune_pg``. Equal groups return the same
    object."""
    default_group: DefaultGroup = NoGroup
    is_traced: Callable[[Iterable[Any]], bool] = lambda values: False
    """Returns ``True`` if a call with these arguments computes nothing: it is traced, or has
    fake tensors."""
    is_off: Callable[[], bool] = lambda: False
    """Returns ``True`` if tuning is off and default configs are used."""
    most_hits: Callable[[], int] = lambda: 4096
    """Returns the maximum number of exact keys that a function caches."""
    is_compiled: Callable[[], bool] = lambda: False
    """Returns ``True`` while ``torch.compile`` traces the caller. A counter of calls would then
    cause recompilation."""
    untraced: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    """Wraps a function that tracers such as ``torch.compile`` must not trace."""

    def is_destroyed(self, process_group: Any) -> bool:
        """Return whether the process group was destroyed."""
        try:
            self.ranks(process_group)
        except InvalidArgument:
            return True
        return False


@dataclass(frozen=True)
class Subject:
    """The function that is tuned."""

    function: Callable[..., Any]
    name: str
    """``module.qualname``"""
    origin: Origin
    space: ConfigSpace
    prune_fn: Callable[..., object] | None
    hooks: Hooks
    sizes: Sizes | None = None
    """The sizes in its keys."""
    fallback_kind: Callable[[Config], object] = lambda config: False
    """Returns ``True``, or a name, for configs that are nowhere much slower than the best. An
    example is the algorithm of a library. Configs with equal names are of one kind."""


@dataclass(frozen=True)
class Settings:
    """Plain settings from the decorator and from the environment at the first call."""

    policy: Policy
    always_tune: bool
    frozen: bool
    """Tuning is forbidden."""
    strict: bool
    """A difference in the patch level of a version invalidates a record."""
    verbose: bool
    seconds: float
    """Time limit for one step of a candidate, on the host and on the device."""
    compile_seconds: float
    """Time limit for a step that compiles a candidate."""
    grace: float
    """Seconds from the report that this rank is stuck to the end of its process."""
    warm_start_ms: float = 0.0
    """Device time, in ms, to tune a key that has neighbours. 0: ignore the neighbours."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """The parts that both tuners use for one tuning."""

    settings: Settings
    device: Device
    ranks: RankGroup
    hardware: str
    """Hardware and size of the group, as a part of the key."""
    store: Store
    """Every rank reads it; the leader writes it."""
    journal: Callable[[Key], Journal]
    quiet: Callable[[], AbstractContextManager[object]]
    """Context manager around trials: bounds the waits in kernels."""
    deferred_checks: Callable[[], AbstractContextManager[Callable[[], None]]]
    """Context manager that returns a function to call after each run, untimed. It raises if a
    wait gave up."""
    tuning_lock: Callable[[], AbstractContextManager[object]]
    """Context manager that lets one thread of a rank tune at a time. It is re-entrant, because a
    tuned function may call a tuned function. Threads that the holder waits for may enter too."""
    compiler: Callable[[], Compiler] | None
    """``None`` if nothing is compiled."""
    random_state: Callable[[Any], RandomState]
    """Takes the arguments of a call, which may contain generators."""


@dataclass(frozen=True, kw_only=True)
class Parts(Common):
    """The parts for one first call of a key."""

    memory: Store
    """Written by all ranks except the leader."""
    search: Callable[[Candidates, Policy, Config | None], Search]
    """Takes the candidates and the winner of an earlier tuning, if there is one."""
    check_search: Callable[[], object] = lambda: None
    """Every rank calls it before a tuning. Raises if the search needs a missing package, so all
    ranks raise the same error although only the leader searches."""
    brief: Callable[[Sequence[Config], Policy, float], Search]
    """Takes the few candidates of a warm start and the device time to spend, in ms."""
    fingerprint: Fingerprinter
    """Returns everything that records of this rank depend on."""
    log: Callable[[Key], Log]


@dataclass(frozen=True)
class Call:
    """One first call of a key."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: object
    """The result of ``key_fn``."""
    number: int = 0
    """Number of this call of the function since the last call that all ranks made together."""
    traced: bool = False
    """The call computes nothing, so nothing can be measured."""
    sizes: tuple[int, ...] = ()
    """Exact sizes. The key has their ranges."""
    runs: bool = False
    """The function is called with the choice immediately."""
    unusable: str = ""
    """Failure of the recorded winner in this call. No record is then used."""
    agreed_keys: tuple[object, ...] = ()
    """Keys that these ranks agreed on before. Calls with one of them send no message."""
