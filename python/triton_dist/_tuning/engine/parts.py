"""Inputs of a tuning: the tuned function, its hooks, the settings, the call, and the parts.

Parts are the implementations that the engine uses: device, ranks, store, search and so on. The
engine imports none of them; ``_tuning/compose.py`` selects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.protocols import (
    Compiler,
    Device,
    Fingerprinter,
    Journal,
    Log,
    RandomState,
    RankGroup,
    RemoteStore,
    Search,
    Store,
)
from triton_dist._tuning.values import Candidates, Config, ConfigSpace, Key, Origin, Policy, Sizes
from triton_dist.errors import InvalidArgument


@dataclass(frozen=True)
class Hooks:
    """The user's functions and options for the trial of a config."""

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
    """``agree(*args, **kwargs)`` returns values that must be equal on all ranks, in addition
    to the key."""
    restored_arguments: tuple[str, ...] = ()
    """Names of arguments that the function changes. They are restored before each run, untimed."""
    input_variants: Callable[..., Iterable[Mapping[str, Any]]] | None = None
    """``input_variants(*args, **kwargs)`` returns mappings from argument names to other values
    that are equally likely. A sample is the mean time of the call and of one call per mapping."""
    worst_input: bool = False
    """Whether a sample is instead the longest time among the calls of ``input_variants``."""


class NoWorld:
    """Replacement for ``torch.distributed.GroupMember`` if this rank tunes alone."""

    WORLD = None


@dataclass(frozen=True)
class ProcessFunctions:
    """Functions that query this process. Every call uses them, also if it does not tune."""

    ranks: Callable[[Any], RankGroup]
    """Returns the ranks that tune together, for the process group that the call passes as
    ``autotune_pg``. For equal process groups it returns the same object."""
    default_group: Any = NoWorld
    """Class or object whose ``WORLD`` is the group of all ranks; ``None`` before its creation."""
    is_traced: Callable[[Iterable[Any]], bool] = lambda values: False
    """Returns ``True`` if a call with these arguments computes nothing: it is traced, or has
    fake tensors."""
    is_off: Callable[[], bool] = lambda: False
    """Returns ``True`` if tuning is off and default configs are used."""
    max_cached_keys: Callable[[], int] = lambda: 4096
    """Returns the maximum number of exact keys that a tuned function caches. An exact key contains
    the sizes of a call; a tuning key contains each size rounded to the end of a range."""
    is_compiled: Callable[[], bool] = lambda: False
    """Returns ``True`` while ``torch.compile`` traces the caller. Calls are then not counted,
    because a changing counter would cause recompilation."""
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
class TunedFunction:
    """The function that is tuned."""

    function: Callable[..., Any]
    name: str
    """``module.qualname``"""
    origin: Origin
    space: ConfigSpace
    prune_fn: Callable[..., object] | None
    hooks: Hooks
    sizes: Sizes | None = None
    """Which parts of a key are sizes, and how they are rounded to ranges; ``None``: no sizes."""
    fallback_fn: Callable[[Config], object] = lambda config: False
    """Returns ``True``, or a name, for a config that is never much slower than the best, such as a
    library's algorithm. One config per name also races in each warm start."""


@dataclass(frozen=True)
class Settings:
    """Plain settings from the decorator and from the environment at the first call."""

    policy: Policy
    always_tune: bool
    frozen: bool
    """Tuning is forbidden (``TRITON_DIST_AUTOTUNE_FROZEN``)."""
    strict: bool
    """A record is invalid if a software version differs, even only in its patch level."""
    verbose: bool
    seconds: float
    """Time limit in seconds for one step of a candidate, on the host and on the device."""
    compile_seconds: float
    """Time limit in seconds for a step that compiles a candidate."""
    grace: float
    """Seconds between the report that this rank hangs in a candidate and the termination of its
    process."""
    warm_start_ms: float = 0.0
    """Device time, in ms, to tune a key that differs only in sizes from already tuned keys. 0: tune
    such keys like any other."""


@dataclass(frozen=True, kw_only=True)
class CommonParts:
    """The parts that ``tune.autotune`` and ``contextual_autotune`` both use for one tuning."""

    settings: Settings
    device: Device
    ranks: RankGroup
    hardware: str
    """The part of the record's key that names the GPU model and the group."""
    store: Store
    """Records in memory, on disk and in packs. Every rank reads them; only the leader writes."""
    journal: Callable[[Key], Journal]
    trial_context: Callable[[], AbstractContextManager[object]]
    """Context manager around all trials of a tuning: sets a time limit for waits in kernels."""
    deferred_checks: Callable[[], AbstractContextManager[Callable[[], None]]]
    """Context manager that yields a check. The tuner calls the check after each run, untimed. It
    raises if a wait in a kernel reached its time limit during the run."""
    tuning_lock: Callable[[], AbstractContextManager[object]]
    """Context manager that lets one thread of a rank tune at a time. It is re-entrant,
    because a tuned function may call a tuned function. If the thread that holds the lock waits for
    another thread, that thread may enter too."""
    compiler: Callable[[], Compiler] | None
    """Returns a pool that compiles candidates ahead. ``None``: each trial compiles its config."""
    random_state: Callable[[Any], RandomState]
    """Returns the state of all random generators. Takes the arguments of a call, because they may
    contain generators."""
    remote: RemoteStore | None = None
    """Records that machines share. Only the leader has it."""


@dataclass(frozen=True, kw_only=True)
class Parts(CommonParts):
    """The parts for one call with a key that has no config yet."""

    memory_store: Store
    """Records in this process. All ranks except the leader write new records to it, not to disk."""
    search: Callable[[Candidates, Policy, Config | None], Search]
    """Takes the candidates and the winner of an earlier tuning, if there is one."""
    check_search: Callable[[], object] = lambda: None
    """Raises if the search needs a missing package. Every rank calls it before a tuning: all ranks
    then raise the same error, although only the leader searches."""
    warm_start_search: Callable[[Sequence[Config], Policy, float], Search]
    """Takes the few candidates of a warm start and the device time to spend, in ms."""
    fingerprint: Fingerprinter
    """Returns the fingerprint of a function: everything that its records depend on."""
    log: Callable[[Key], Log]


@dataclass(frozen=True)
class Call:
    """A call with a key that has no config yet."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: object
    """The result of ``key_fn``."""
    number: int = 0
    """Position of this call among the calls of the function since all ranks last tuned or looked up
    a record together, from 1. It identifies the call in error messages of other ranks."""
    traced: bool = False
    """The call is traced and computes nothing, so nothing can be measured."""
    sizes: tuple[int, ...] = ()
    """Exact sizes of the call. ``key`` has the ends of their ranges."""
    will_run: bool = False
    """The caller runs the function with the chosen config immediately. ``tune`` and ``best_config``
    do not run it."""
    winner_failure: str = ""
    """Why the winner of the record failed in this call. If set, no record is used."""
    agreed_keys: tuple[object, ...] = ()
    """Keys that these ranks have already tuned or looked up together. A call with such a key sends
    no message."""
