"""Define the inputs of a tuning: function, hooks, settings, call and components.

*Components* are the implementations that the engine uses: device, ranks, store, search and so on.
The engine imports none of them. ``_tuning/compose.py`` selects them.
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
from triton_dist._tuning.values import (
    Candidates,
    Config,
    ConfigSpace,
    FunctionIdentity,
    Key,
    Policy,
    Sizes,
)
from triton_dist.errors import InvalidArgument


@dataclass(frozen=True)
class Hooks:
    """The user's functions and options for trials. A trial runs one config to measure it."""

    prepare: Callable[..., object] | None = None
    """``prepare(*args, **kwargs, **config)`` compiles a config and checks its resources without
    a launch."""
    recover: Callable[..., object] | None = None
    """``recover(*args, **kwargs)`` resets the state of each rank after a launch failed."""
    reset: Callable[..., object] | None = None
    """``reset(*args, **kwargs)`` undoes side effects of the function before each run, untimed."""
    check: Callable[[Any, Any], object] | None = None
    """``check(output, reference)`` returns ``False`` or raises to reject the config."""
    agree: Callable[..., object] | None = None
    """``agree(*args, **kwargs)`` returns values of the call that must be equal on all ranks, in
    addition to the key."""
    restored_arguments: tuple[str, ...] = ()
    """Names of arguments that the function changes. They are restored before each run, untimed."""
    input_variants: Callable[..., Iterable[Mapping[str, Any]]] | None = None
    """``input_variants(*args, **kwargs)`` returns mappings from argument names to other, equally
    likely values. A sample is then the mean time of the call and of one call per mapping."""
    worst_input: bool = False
    """If true, a sample is the longest time among these calls instead of the mean."""


class NoWorld:
    """Replacement for ``torch.distributed.GroupMember`` if this rank tunes alone."""

    WORLD = None


@dataclass(frozen=True)
class ProcessFunctions:
    """Functions that return the state of this process. Calls use them even if they do not tune."""

    ranks: Callable[[Any], RankGroup]
    """Returns the ranks that tune together. The argument is the process group that the call passes
    as ``autotune_pg``. Equal process groups lead to the same object."""
    default_group: Any = NoWorld
    """Class or object whose ``WORLD`` is the group of all ranks; ``None`` before its creation."""
    is_traced: Callable[[Iterable[Any]], bool] = lambda values: False
    """Returns ``True`` if a call computes nothing: torch traces it, or its tensors are fake."""
    is_off: Callable[[], bool] = lambda: False
    """Returns ``True`` if tuning is off and default configs are used."""
    max_cached_keys: Callable[[], int] = lambda: 4096
    """Returns the maximum number of exact keys that a tuned function caches. An exact key has the
    sizes of the call itself. The key of a record has them rounded up to the ends of ranges."""
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
    identity: FunctionIdentity
    space: ConfigSpace
    prune_fn: Callable[..., object] | None
    hooks: Hooks
    sizes: Sizes | None = None
    """Which parts of a key are sizes, and how they are rounded up. ``None``: there are no sizes."""
    fallback_fn: Callable[[Config], object] = lambda config: False
    """Returns ``True``, or a name, for a config that is never much slower than the best, such as a
    library's algorithm. If candidates are chosen from neighbouring sizes, one config per name is
    added to them."""
    prior_fn: Callable[..., Any] | None = None
    """``prior_fn(config, *args, **kwargs)`` returns the predicted milliseconds of a config."""


@dataclass(frozen=True)
class Settings:
    """Settings from the decorator, and from the environment at the first call of a key."""

    policy: Policy
    always_tune: bool
    """Tune although there is a record (``TRITON_DIST_AUTOTUNE_ALWAYS_TUNE``)."""
    frozen: bool
    """Tuning is forbidden (``TRITON_DIST_AUTOTUNE_FROZEN``)."""
    predict_only: bool
    """Predictions replace measurements (``TRITON_DIST_AUTOTUNE=prior``)."""
    strict_versions: bool
    """A record is invalid if a software version differs, even if only the patch level differs."""
    verbose: bool
    step_seconds: float
    """Time limit in seconds for one step of a trial, on the host and on the device."""
    compile_seconds: float
    grace_seconds: float
    """Seconds from the message that this rank hangs in a candidate to the end of its process."""
    warm_start_ms: float = 0.0
    """Device time in ms to tune a key of which neighbouring sizes are tuned. 0: tune such a key
    like any other key."""


@dataclass(frozen=True, kw_only=True)
class CommonComponents:
    """The components that ``tune.autotune`` and ``contextual_autotune`` both use for one tuning."""

    settings: Settings
    device: Device
    ranks: RankGroup
    hardware: str
    """The part of a key that has the GPU model and the size and placement of the group."""
    store: Store
    """Records in memory, on disk and in packs. All ranks read; only the leader (rank 0) writes."""
    journal: Callable[[Key], Journal]
    trial_context: Callable[[], AbstractContextManager[object]]
    """Context manager around all trials of a tuning. It sets a time limit for waits in kernels."""
    deferred_checks: Callable[[], AbstractContextManager[Callable[[], None]]]
    """Context manager that yields a function. The tuner calls the function after each run, untimed.
    The function raises if a wait in a kernel reached its time limit during the run."""
    tuning_lock: Callable[[], AbstractContextManager[object]]
    """Re-entrant context manager that lets one thread of a rank tune, and threads for which it
    waits."""
    compiler: Callable[[], Compiler] | None
    """Returns a compiler that compiles candidates in other processes before their trials. ``None``:
    each trial compiles its config."""
    random_state: Callable[[Any], RandomState]
    """Returns the state of all random generators, including generators in a call's arguments."""
    remote: RemoteStore | None = None
    """Records that machines share. ``None`` on all ranks except the leader."""


@dataclass(frozen=True, kw_only=True)
class Components(CommonComponents):
    """The components for the first call of a key of ``tune.autotune``."""

    memory_store: Store
    """Records in the memory of this process. Ranks other than the leader write only here."""
    search: Callable[[Candidates, Policy, Config | None, Mapping[Config, float]], Search]
    """Returns the search for the candidates. The last two arguments are the winner of an earlier
    tuning, or ``None``, and the predicted milliseconds of the candidates; empty if unknown."""
    check_search: Callable[[], object] = lambda: None
    """Raises on every rank if the search, which the leader runs, needs a missing package."""
    warm_start_search: Callable[[Sequence[Config], Policy, float], Search]
    """Returns the search for a few candidates that were chosen from neighbouring sizes. The last
    argument is the device time to spend, in ms."""
    fingerprint: Fingerprinter
    """Returns the fingerprint of a function: what its records depend on, besides the key."""
    log: Callable[[Key], Log]


@dataclass(frozen=True)
class Call:
    """A call of the tuned function whose key has no config in this process yet."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: object
    """The result of ``key_fn``, with sizes rounded up to the ends of their ranges."""
    number: int = 0
    """Number of calls of the function, up to and including this call, since the ranks last tuned or
    looked up a record together. It identifies the call in error messages of other ranks."""
    is_traced: bool = False
    """Nothing can be measured: torch traces the call, or its tensors are fake."""
    sizes: tuple[int, ...] = ()
    """Exact sizes of the call. ``key`` has the ends of their ranges."""
    will_call_function: bool = False
    """The function runs with the chosen config next; ``False`` for ``tune`` and ``best_config``."""
    winner_failure: str = ""
    """Why the winner of the record failed in this call. If not empty, no record is used."""
    agreed_keys: tuple[object, ...] = ()
    """Keys that the ranks tuned or looked up together. Calls with these keys send no message."""
    must_measure: bool = False
    """The caller is ``tune``, whose result a prediction cannot replace."""
