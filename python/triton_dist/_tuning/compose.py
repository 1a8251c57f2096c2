"""Build an :class:`AutoTuner` from its parts: device, ranks, stores, search and hooks.

The engine depends on protocols only. This module selects the implementations.
"""

from __future__ import annotations

import functools
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from triton_dist import knobs
from triton_dist._archive import pack_places, packs_in
from triton_dist._tuning.arguments import check_choice, check_tunable, names_of, rounding_functions
from triton_dist._tuning.engine.decorator import Decorator
from triton_dist._tuning.engine.dispatch import AutoTuner
from triton_dist._tuning.engine.parts import Hooks, NoWorld, Parts, ProcessFunctions
from triton_dist._tuning.protocols import RankGroup, Search
from triton_dist._tuning.search import Factory, ShortRace, check_search, search_for
from triton_dist._tuning.shared import common_parts, file_store, fingerprint_of, is_off, pack_store
from triton_dist._tuning.source import Snapshot, origin_of, source_of, sources_of
from triton_dist._tuning.store import FileLog, MemoryStore
from triton_dist._tuning.store.packs import records_of
from triton_dist._tuning.values import (
    Config,
    ConfigSpace,
    Fingerprint,
    Origin,
    Policy,
    Product,
    codec,
    qualified_name,
)
from triton_dist._tuning.values.policy import FULL_SEARCHES, MODEL_SEARCHES, TRIES_BY_EFFORT
from triton_dist._tuning.values.sizes import sized_key
from triton_dist.errors import InvalidArgument
from triton_dist.runtime.compiling import shipped
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import default_group, group_for
from triton_dist.runtime.sharing import ranks_per_gpu
from triton_dist.runtime.tracing import is_traced, untraced

_SCOPES = ("world", "rank")
_TIMINGS = ("events", "graph")
_SEARCHES = (*FULL_SEARCHES, *MODEL_SEARCHES, "auto")
K = TypeVar("K", bound=Callable[..., object])


def autotune(
    config_space: Product | Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]],
    key_fn: K,
    prune_fn: Callable[..., object] | None = None,
    *,
    scope: str = "world",
    prepare_fn: Callable[..., object] | None = None,
    recover_fn: Callable[..., object] | None = None,
    reset_fn: Callable[..., object] | None = None,
    check_fn: Callable[[Any, Any], object] | None = None,
    timing: str = "events",
    max_seconds: float | None = None,
    max_trials: int | None = None,
    search: str | Factory = "racing",
    effort: str = "normal",
    version: str | None = None,
    agree_fn: Callable[..., object] | None = None,
    restore: Sequence[str] = (),
    ignore: Sequence[str] = (),
    sizes: Sequence[str] | Mapping[str, Callable[[int], int]] = (),
    fallback_fn: Callable[[Config], object] | None = None,
    waves_fn: Callable[[Any, Config], float | None] | None = None,
    prior_fn: Callable[..., float] | None = None,
    input_variants_fn: Callable[..., Iterable[Mapping[str, Any]]] | None = None,
    worst_input: bool = False,
) -> Decorator[K]:
    """Return a decorator that chooses a function's tunable arguments by measuring, once per key.

    At the first call of a key, all ranks of the group measure the candidates together. The winner
    is the config whose slowest rank is fastest: the lowest median, and within 1 % of it the
    earliest config of the space. The winner is used from then on and recorded in
    ``~/.triton_dist/autotune/<function>/``. Later calls and later processes look it up.

    Args:
        config_space: dicts of keyword arguments of the function, or a callable that returns them,
            called at the first tuning. The first config is the default. Or a ``tune.Product``,
            which can have millions of configs because it does not list them.
        key_fn: called with the arguments of the function; returns a hashable key. Each key is tuned
            once.
        prune_fn: ``prune_fn(config, *args, **kwargs)`` returns a true value to keep the config.
            Only the leader's result is used.
        scope: ``"world"``: tune together with the ranks of ``autotune_pg``, by default all ranks.
            ``"rank"``: tune on this rank alone.
        prepare_fn: ``prepare_fn(*args, **kwargs, **config)`` compiles a config and checks its
            resources, without a launch. An exception on any rank drops the config before any rank
            launches it. On GPUs it also runs once per config at the start, with Triton's
            compilation disabled (``warmup`` returns ``None``, exceptions are ignored), to list the
            kernels that other processes compile while candidates are measured.
        recover_fn: ``recover_fn(*args, **kwargs)`` resets the state on all ranks after a failed
            config that some rank may have launched.
        reset_fn: ``reset_fn(*args, **kwargs)`` runs before each run of the tuning, untimed, and
            after the last run.
        check_fn: ``check_fn(output, reference)`` returns ``False`` or raises to reject a config.
            The reference is the output of the first config that ran.
        timing: ``"events"``: time each run with the device's timer. ``"graph"``: time replays of
            the run, captured in a CUDA graph, for functions that production code captures. CPU
            ranks have no graphs, so both are equal there.
        max_seconds: start no new config after this time. The first config is always measured.
        max_trials: maximum number of configs to try.
        search: ``"racing"``: sample in rounds and drop clear losers early. ``"exhaustive"``: take
            all samples of each config in turn. ``"surrogate"``, for spaces too large to try: a
            model of the measurements selects configs, and the fastest of them race. ``"optuna"``:
            Optuna's TPE sampler selects them; needs the extra ``optuna`` on all ranks. ``"auto"``:
            racing for few candidates, else surrogate. Or a callable that takes the values of each
            parameter by name and returns an object with ``ask`` and ``tell`` (``tune.Search``).
            ``"prior"``: race the ``max_trials`` configs (default: 8) that ``prior_fn`` predicts to
            be the fastest; without ``prior_fn``, the first configs of the space.
        effort: ``"quick"``, ``"normal"`` or ``"max"``: try 50, 200 or 1000 candidates of a space
            that is too large to try completely. ``"quick"`` limits every search to 50 candidates.
            ``max_trials`` overrides it.
        version: the author's version of the function. Records of other versions are not used.
            Shipped records are matched by the version instead of by the source code, and need one.
        agree_fn: ``agree_fn(*args, **kwargs)`` returns values that must be equal on all ranks in
            addition to the key, such as the exact size of a bucketed size. They are compared as
            text at the first call of a key. If they differ, all ranks raise instead of hanging.
        restore: names of arguments that the function changes (tensors, or tuples, lists and dicts
            of tensors). During tuning they are restored before each run, untimed, and before the
            call that follows. The copies need as much memory as the tensors.
        ignore: names of constants that records do not depend on, such as ``"RANK"``: globals,
            closure cells, arguments and attributes that the function, its hooks or their helpers
            read or bind.
        sizes: names of int arguments of the function, or of int fields of a named tuple that
            ``key_fn`` returns, with too many values to tune each, such as a number of tokens. One
            tuning serves a range of each size, rounded by ``fine_bucket``; a mapping sets another
            rounding by name. Arguments are added to the result of ``key_fn``, which may omit them.
            Keys that differ only in sizes warm-start each other: at the first call in a new range,
            the best configs of neighbouring ranges race for ``TRITON_DIST_AUTOTUNE_WARM_START_MS``
            milliseconds. If nothing can be measured, the neighbours' records decide.
        fallback_fn: ``fallback_fn(config)`` returns true for configs that are nowhere much slower
            than the best, such as a library's algorithm. One of them races at every size, and wins
            when the measurements do not decide. If it returns names, one config per name races,
            four at most.
        waves_fn: ``waves_fn(key, config)`` returns how often a call fills the device: its tiles
            divided by the tiles that run concurrently, not rounded; ``key`` is the result of
            ``key_fn``. The tuner assumes that equal wave counts, rounded up, take equal time, and
            uses this to select configs for a size from measurements of neighbouring sizes.
            ``None``: the time grows with the sizes. Requires ``sizes``.
        prior_fn: ``prior_fn(config, *args, **kwargs)`` returns the predicted milliseconds of a
            config, without measuring; ``inf`` or NaN if unknown. Configs with small predictions are
            tried first. Racing skips a config if the measured times of others show that its
            prediction is too large for a winner. With ``TRITON_DIST_AUTOTUNE=prior``, predictions
            replace measurements. Only the leader's result is used.
        input_variants_fn: ``input_variants_fn(*args, **kwargs)`` returns mappings from argument
            names to other, equally likely values, the same number on each rank. It is for functions
            whose time depends on the values in their tensors. Each sample is the mean over the call
            and one call per mapping. Excludes ``restore`` and ``reset_fn``, because nothing is
            restored between these calls.
        worst_input: each sample is the time of the slowest of these calls, not their mean.

    Call keywords of the decorated function: ``autotune=True``, ``autotune_verbose=False``,
    ``autotune_pg=None``, ``autotune_allow_arg_overwrite=False``. If the last one is ``True``, the
    caller may set a tunable argument by keyword. The remaining tunable arguments are tuned for this
    value, and each value has its own key.

    Raises:
        InvalidArgument: an argument has an unsupported value.
    """
    check_choice("scope", scope, _SCOPES)
    check_choice("timing", timing, _TIMINGS)
    if not callable(search):
        check_choice("search", search, _SEARCHES)
    check_choice("effort", effort, tuple(TRIES_BY_EFFORT))
    if max_seconds is not None and not _is_positive(max_seconds):
        raise InvalidArgument("autotune", "max_seconds", max_seconds, "a positive number, or None")
    if max_trials is not None and (type(max_trials) is not int or max_trials < 1):
        raise InvalidArgument("autotune", "max_trials", max_trials, "a positive integer, or None")
    if version is not None and not (isinstance(version, str) and version):
        raise InvalidArgument("autotune", "version", version, "a text that is not empty, or None")
    functions = {
        "key_fn": key_fn,
        "prune_fn": prune_fn,
        "prepare_fn": prepare_fn,
        "recover_fn": recover_fn,
        "agree_fn": agree_fn,
        "fallback_fn": fallback_fn,
        "waves_fn": waves_fn,
        "prior_fn": prior_fn,
        "input_variants_fn": input_variants_fn,
    }
    for name, function in {**functions, "reset_fn": reset_fn, "check_fn": check_fn}.items():
        if not callable(function) and (function is not None or name == "key_fn"):
            raise InvalidArgument("autotune", name, function, "a function")
    restore, ignore = names_of("restore", restore), names_of("ignore", ignore)
    if input_variants_fn is not None and (restore or reset_fn is not None):
        expected = "None, because restore and reset_fn restore what a run changes"
        raise InvalidArgument("autotune", "input_variants_fn", input_variants_fn, expected)
    rounding = rounding_functions(sizes)
    if waves_fn is not None and not rounding:
        raise InvalidArgument("autotune", "waves_fn", waves_fn, "None without sizes")
    if isinstance(config_space, Product) and sizes:
        wanted = "a list of configs, such as list(product): sizes= reads every config"
        raise InvalidArgument("autotune", "config_space", config_space, wanted)
    if isinstance(config_space, Product) and not config_space.is_listed and search in FULL_SEARCHES:
        wanted = f'"surrogate", "optuna" or "auto" for {len(config_space)} combinations'
        raise InvalidArgument("autotune", "search", search, wanted)
    if isinstance(config_space, Product) and not config_space.is_listed and prior_fn is not None:
        wanted = f"None: it would be called for {len(config_space)} combinations"
        raise InvalidArgument("autotune", "prior_fn", prior_fn, wanted)
    if not callable(config_space) and not isinstance(config_space, Product):
        try:
            configs = iter(config_space)
        except TypeError as error:
            expected = "dicts of keyword arguments, or a function that returns them"
            raise InvalidArgument("autotune", "config_space", config_space, expected) from error
        config_space = list(configs)  # an iterator can be read only once
    own_search = search if callable(search) else None
    named_search = search if isinstance(search, str) else f"own {qualified_name(search)}"
    policy = functools.partial(
        Policy.on,
        timing=timing,
        search=named_search,
        max_seconds=max_seconds,
        max_trials=max_trials,
        effort=effort,
    )
    space = config_space if isinstance(config_space, Product) else ConfigSpace(config_space)

    hooks = Hooks(
        prepare_fn,
        recover_fn,
        reset_fn,
        check_fn,
        agree_fn,
        restore,
        input_variants_fn,
        worst_input,
    )
    process = ProcessFunctions(
        functools.partial(group_for, scope=scope),
        default_group if scope == "world" else NoWorld,
        is_traced,
        is_off,
        lambda: knobs.autotune_keys.get() or 1,
        torch.compiler.is_dynamo_compiling,
        untraced,
    )

    def decorate(fn: Any) -> Any:
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(decorate(fn.__func__))
        check_tunable(fn, "autotune", restore)
        keys, key_sizes = sized_key(fn, key_fn, rounding, waves_fn)
        deciding = [prune_fn, check_fn, input_variants_fn, reset_fn]
        deciding += [prior_fn] if search == "prior" else []
        validators = tuple(each for each in deciding if each is not None)
        composer = _Composer(
            scope,
            policy,
            functools.partial(
                search_for, user_search=own_search, compiles_ahead=prepare_fn is not None
            ),
            validators,
            version or "",
            tuple(restore),
            worst_input,
            ignore,
            # Records depend on constants as they were at decoration.
            Snapshot([fn, *validators]),
            MemoryStore(),
        )
        tuned: AutoTuner[..., Any] = AutoTuner(
            fn,
            space,
            keys,
            prune_fn,
            hooks,
            composer.parts_for,
            composer.memory_store.clear,
            process,
            origin_of,
            key_sizes,
            fallback_fn or (lambda config: False),
            prior_fn,
        )
        _tuned.add(tuned)
        return tuned

    return decorate


_tuned: weakref.WeakSet[AutoTuner[..., Any]] = weakref.WeakSet()


def _read_sources() -> None:
    """Parse the sources of the functions whose records are in packs with kernels.

    Parsing takes 0.5 s of a first call. It runs while kernels are loaded, so the first call finds
    the result.
    """
    keys = [each.key for packed in packs_in(pack_places()) for each in records_of(packed)]
    names = {(key.module, key.function) for key in keys}
    for tuned in list(_tuned):
        origin = Origin.of(tuned.fn, ())
        if (origin.module, origin.function) in names:
            source_of([tuned.fn])


shipped.background_jobs.append(_read_sources)


def _is_positive(value: Any) -> bool:
    return isinstance(value, numbers.Real) and value is not True and bool(value > 0)  # type: ignore[operator]


@dataclass(frozen=True)
class _Composer:
    """Parts of one tuned function that do not depend on the call."""

    scope: str
    policy: Callable[..., Policy]
    """Returns the policy. The arguments are the device name and whether ranks share the device."""
    search: Callable[..., Search]
    validators: tuple[Callable[..., object], ...]
    """User functions that decide which configs can win and what is timed."""
    version: str
    restore: tuple[str, ...]
    worst_input: bool
    ignore: tuple[str, ...]
    snapshot: Snapshot
    memory_store: MemoryStore

    def parts_for(self, process_group: Any, verbose: bool) -> Parts:
        """Return the parts for a first call over ``process_group``, for the current environment."""
        ranks: RankGroup = group_for(process_group, self.scope)
        gpu_is_shared = current_device().name == "cuda" and ranks_per_gpu() > 1
        policy = self.policy(current_device().name, gpu_is_shared=gpu_is_shared)
        packs = map(pack_store, pack_places())
        common = common_parts(policy, ranks, verbose, self.memory_store, *packs)
        files = file_store(knobs.cache_dir.get())
        return Parts(
            **{
                **vars(common),
                "trial_context": functools.partial(_without_gradients, common.trial_context),
            },
            memory_store=self.memory_store,
            search=self.search,
            check_search=functools.partial(check_search, policy),
            warm_start_search=ShortRace,
            fingerprint=functools.partial(self._fingerprint, ranks, policy),
            log=lambda key: FileLog(files.path(key), int(ranks.global_rank(ranks.rank))),
        )

    def _fingerprint(
        self, ranks: RankGroup, policy: Policy, function: Callable[..., Any], space: ConfigSpace
    ) -> Fingerprint:
        source, validators = sources_of(
            [function, *space.functions], self.validators, self.ignore, self.snapshot, space.classes
        )
        # Without these arguments the digest is the same as before they existed.
        others: list[object] = [list(self.restore)] if self.restore else []
        others += ["worst_input"] if self.worst_input else []
        digest = codec.digest(space.digest, validators.digests, *others)
        return fingerprint_of(ranks, policy, source, validators, digest, self.version)


@contextmanager
def _without_gradients(bounded: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Context manager for trials: disable gradients and bound the waits in kernels.

    A candidate that deadlocks in a kernel then fails, and all ranks drop it. No
    process has to be ended.
    """
    with torch.no_grad(), bounded():
        yield
