"""Input of a tuning: the function with its hooks, settings, and parts that do the work."""

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
    """The user's additions to the trial of a config; each takes the arguments of the call."""

    prepare: Callable[..., object] | None = None
    """``prepare(*args, **kwargs, **config)`` compiles and checks resources; launches nothing."""
    recover: Callable[..., object] | None = None
    """``recover(*args, **kwargs)``, on all ranks, after a failure that may have launched."""
    reset: Callable[..., object] | None = None
    """``reset(*args, **kwargs)`` before each run, for functions with side effects; not timed."""
    check: Callable[[Any, Any], object] | None = None
    """``check(output, reference)``: ``False`` or an exception rejects the config."""
    agree: Callable[..., object] | None = None
    """``agree(*args, **kwargs)``: what must be the same on all ranks, besides the key."""
    restore: tuple[str, ...] = ()
    """Names of arguments that the function changes: restored before each run; not timed."""
    input_variants: Callable[..., Iterable[Mapping[str, Any]]] | None = None
    """``input_variants(*args, **kwargs)``: by name, other values of arguments that are as
    likely."""


class DefaultGroup(Protocol):
    """Holder of the group of all ranks."""

    WORLD: Any
    """``None`` while there is none."""


class NoGroup:
    """There never is one: this rank is alone."""

    WORLD = None


@dataclass(frozen=True)
class Surroundings:
    """The process around a call, as far as it is needed before anything is composed."""

    ranks: Callable[[Any], RankGroup]
    """Those that tune together in a call with this ``autotune_pg``; the same object each time."""
    default_group: DefaultGroup = NoGroup
    is_traced: Callable[[Iterable[Any]], bool] = lambda values: False
    """True if a call with these arguments computes nothing: a tracer or fake tensors look at it."""
    is_off: Callable[[], bool] = lambda: False
    """True if nothing is tuned and defaults are used."""
    most_hits: Callable[[], int] = lambda: 4096
    """Exact keys that a function keeps at hand."""
    is_compiled: Callable[[], bool] = lambda: False
    """True if ``torch.compile`` looks at the caller: it compiles anew what counts its calls."""
    untraced: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    """Wraps what no compiler of Python, such as ``torch.compile``, is to trace."""

    def is_destroyed(self, process_group: Any) -> bool:
        """True if the ranks of this ``autotune_pg``, which had some, are gone."""
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
    """Sizes in its keys."""
    fallback_kind: Callable[[Config], object] = lambda config: False
    """True, or a name, for configs that are nowhere far from the best, such as a library's. Those
    of one name are alike."""


@dataclass(frozen=True)
class Settings:
    """Plain values: what the decorator says, and the environment at the time of a first call."""

    policy: Policy
    always_tune: bool
    frozen: bool
    """Tuning is forbidden."""
    strict: bool
    """Differences at patch level make a record invalid."""
    verbose: bool
    seconds: float
    """Longest time that a step of a candidate may take, on the host and on the device."""
    compile_seconds: float
    """The same for compiling one."""
    grace: float
    """Time from the report that this rank is stuck to the end of its process."""
    warm_start_ms: float = 0.0
    """Device time of the first call of a key that has neighbours; 0: it is tuned as any other."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Parts that are composed for one tuning, of either tuner."""

    settings: Settings
    device: Device
    ranks: RankGroup
    hardware: str
    """Hardware and size of the group; part of the key."""
    store: Store
    """Looked up on every rank, written by the leader."""
    journal: Callable[[Key], Journal]
    quiet: Callable[[], AbstractContextManager[object]]
    """Entered around candidates: waits in kernels are bounded."""
    settling: Callable[[], AbstractContextManager[Callable[[], None]]]
    """Within, what it gives is called after each run, untimed: raises if a wait gave up."""
    tuning_lock: Callable[[], AbstractContextManager[object]]
    """Entered where the threads of a rank tune one after another. Re-entrant, also from threads
    that the one inside waits for: a tuned function may call a tuned function."""
    compiler: Callable[[], Compiler] | None
    """``None`` where nothing is compiled."""
    random_state: Callable[[Any], RandomState]
    """Takes the arguments of a call, which may hold generators."""


@dataclass(frozen=True, kw_only=True)
class Parts(Common):
    """Parts that are composed for one first call of a key."""

    memory: Store
    """Written by the ranks that are not the leader."""
    search: Callable[[Candidates, Policy, Config | None], Search]
    """Takes the candidates, and the winner of an earlier tuning if there was one."""
    brief: Callable[[Sequence[Config], Policy, float], Search]
    """Takes few candidates, and the milliseconds that it may spend."""
    fingerprint: Fingerprinter
    """All that this rank's records depend on."""
    log: Callable[[Key], Log]


@dataclass(frozen=True)
class Call:
    """Arguments of a first call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: object
    """The result of ``key_fn``."""
    number: int = 0
    """Number of this call of the function, since all ranks met in one."""
    traced: bool = False
    """It computes nothing, so nothing can be measured with it."""
    sizes: tuple[int, ...] = ()
    """Exact ones, whose ranges are in the key."""
    runs: bool = False
    """The function is called with the choice at once."""
    unusable: str = ""
    """Failure of the recorded winner in this call, so that no record is used; else empty."""
    agreed: tuple[object, ...] = ()
    """Keys that the same ranks agreed on before: calls with one of them send no message."""
