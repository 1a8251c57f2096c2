"""Define ``tune.autotune``: build its tuner from device, ranks, stores, search and hooks.

The engine depends on protocols only. This module selects the implementations.
"""

from __future__ import annotations

import functools
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from triton_dist import knobs
from triton_dist._archive import pack_locations, packs_in
from triton_dist._tuning.arguments import (
    check_choice,
    check_tunable,
    rounding_functions,
    tuple_of_names,
)
from triton_dist._tuning.engine.components import Components, Hooks, NoWorld, ProcessFunctions
from triton_dist._tuning.engine.decorator import Decorator
from triton_dist._tuning.engine.dispatch import AutoTuner
from triton_dist._tuning.protocols import RankGroup
from triton_dist._tuning.search import SearchFactory, ShortRace, check_search, search_for
from triton_dist._tuning.shared import (
    common_components,
    file_store,
    fingerprint_of,
    is_off,
    pack_store,
)
from triton_dist._tuning.source import Snapshot, identity_of, source_of, sources_of
from triton_dist._tuning.store import FileLog, MemoryStore
from triton_dist._tuning.store.packs import records_of
from triton_dist._tuning.values import (
    Config,
    ConfigSpace,
    Fingerprint,
    FunctionIdentity,
    Policy,
    Product,
    codec,
    qualified_name,
)
from triton_dist._tuning.values.policy import FULL_SEARCHES, MODEL_SEARCHES, TRIES_BY_EFFORT
from triton_dist._tuning.values.sizes import key_fn_with_sizes
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
    search: str | SearchFactory = "racing",
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

    At the first call of a key, all ranks of the group measure the candidates together. The time of
    a config is its time on the slowest rank. The config with the lowest time wins. Of configs that
    noise hides within 1 % of the lowest time, the first in the space wins. The winner is recorded
    in ``~/.triton_dist/autotune/<function>/``. Later calls and later processes use it.

    Args:
        config_space: dicts of keyword arguments of the function, or a callable that returns them,
            called at the first tuning. The first config is the default. Or a ``tune.Product``,
            which can have millions of configs because it does not list them.
        key_fn: called with the arguments of the function; returns a hashable key. Each key is tuned
            once.
        prune_fn: ``prune_fn(config, *args, **kwargs)`` returns a true value to keep the config.
            Only the result of rank 0 of the group is used.
        scope: with ``"world"``, tune together with the ranks of ``autotune_pg``, by default all
            ranks. With ``"rank"``, tune on this rank alone.
        prepare_fn: ``prepare_fn(*args, **kwargs, **config)`` compiles a config and checks its
            resources, without a launch. If it raises on any rank, the config is dropped before any
            rank launches it. On GPUs, it also runs once per config at the start, with Triton's
            compilation disabled (``warmup`` returns ``None``, exceptions are ignored). This lists
            the kernels that other processes compile while candidates are measured.
        recover_fn: ``recover_fn(*args, **kwargs)`` resets the state of each rank after a config
            failed, because some rank may have launched it.
        reset_fn: ``reset_fn(*args, **kwargs)`` undoes side effects of the function. It runs before
            each run of the tuning, untimed, and after the last run.
        check_fn: ``check_fn(output, reference)`` returns ``False`` or raises to reject a config.
            The reference is the output of the first config that ran.
        timing: with ``"events"``, time each run with the device's timer. With ``"graph"``, capture
            the run in a CUDA graph and time its replays, for functions that production code
            captures. CPU ranks have no graphs and always use ``"events"``.
        max_seconds: start no new config after this time. The first config is always measured.
        max_trials: maximum number of configs to try.
        search: which configs are tried, in what order. ``"racing"``: sample all in rounds and drop
            clear losers early. ``"exhaustive"``: take all samples of one config after another.
            ``"surrogate"``, for spaces too large to try completely: a model of the measured times
            selects configs, and the fastest of them race. ``"optuna"``: Optuna's TPE sampler
            selects the configs; this needs the extra ``optuna`` on all ranks. ``"auto"``: racing
            for few candidates, else surrogate. ``"prior"``: race the ``max_trials`` configs (by
            default 8) that ``prior_fn`` predicts to be the fastest; without ``prior_fn``, the first
            configs of the space. Or a callable that takes a dict from parameter name to its values
            and returns an object with ``ask`` and ``tell`` (``tune.Search``).
        effort: ``"quick"``, ``"normal"`` or ``"max"``: try 50, 200 or 1000 candidates of a space
            that is too large to try completely. ``"quick"`` limits every search to 50 candidates.
            ``max_trials`` overrides these numbers.
        version: version of the function, chosen by its author. Records of other versions are not
            used. A shipped record needs a version, which is compared instead of the source code.
        agree_fn: ``agree_fn(*args, **kwargs)`` returns values that must be equal on all ranks in
            addition to the key, such as a size that ``key_fn`` rounds. They are compared as text at
            the first call of a key. If they differ, all ranks raise instead of hanging.
        restore: names of arguments that the function changes (tensors, or tuples, lists and dicts
            of tensors). During tuning they are restored before each run, untimed. After the tuning
            they are restored before the user's call runs. The copies need as much memory as the
            tensors.
        ignore: names of constants that records do not depend on, such as ``"RANK"``. Constants are
            globals, closure cells, default arguments and attributes that the function, its hooks
            or their helpers read.
        sizes: names of int arguments of the function, or of int fields of a named tuple that
            ``key_fn`` returns, such as a number of tokens, with too many values to tune each. Each
            size is rounded up by ``fine_bucket``, so one tuning serves a range. A mapping from name
            to function sets another rounding. The arguments are added to the result of ``key_fn``,
            which may omit them. At the first call in a new range, only the best configs of
            neighbouring ranges race, for ``TRITON_DIST_AUTOTUNE_WARM_START_MS`` milliseconds. If
            nothing can be measured, the config is chosen from the records of these ranges.
        fallback_fn: ``fallback_fn(config)`` returns true for configs that are never much slower
            than the best, such as a library's algorithm. One of them races at every size. It wins
            if the measured times do not decide. If the function returns names, one config per name
            races, at most four.
        waves_fn: ``waves_fn(key, config)`` returns the number of waves of a call: its tiles divided
            by the tiles that run concurrently, not rounded. ``key`` is the result of ``key_fn``.
            The tuner assumes that calls with equal numbers of waves, rounded up, take equal time.
            It uses this to select configs for a size from times at neighbouring sizes. For
            ``None``, it assumes that the time grows with the sizes. Requires ``sizes``.
        prior_fn: ``prior_fn(config, *args, **kwargs)`` returns the predicted milliseconds of a
            config, without measuring; ``inf`` or NaN if unknown. Only the result of rank 0 is used.
            ``"racing"``, ``"exhaustive"`` and ``"prior"`` try configs with small predictions first.
            A race skips a config if the times of other configs show that its prediction is too
            large. With ``TRITON_DIST_AUTOTUNE=prior``, predictions replace measurements.
        input_variants_fn: ``input_variants_fn(*args, **kwargs)`` returns mappings from argument
            names to other, equally likely values. The number of mappings must be equal on all
            ranks. It is for functions whose time depends on the values in their tensors. Each
            sample is the mean over the call and one call per mapping. It cannot be combined with
            ``restore`` and ``reset_fn``, because nothing is restored between these calls.
        worst_input: each sample is the time of the slowest of these calls, not their mean.

    The decorated function accepts these further keywords: ``autotune=True``,
    ``autotune_verbose=False``, ``autotune_pg=None``, ``autotune_allow_arg_overwrite=False``. With
    ``autotune_allow_arg_overwrite=True``, the caller may set a tunable argument by keyword. The
    remaining tunable arguments are then tuned for this value, and each value has its own key.

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
        "reset_fn": reset_fn,
        "check_fn": check_fn,
    }
    for name, function in functions.items():
        if not callable(function) and (function is not None or name == "key_fn"):
            raise InvalidArgument("autotune", name, function, "a function")
    restore, ignore = tuple_of_names("restore", restore), tuple_of_names("ignore", ignore)
    if input_variants_fn is not None and (restore or reset_fn is not None):
        expected = "None, because restore and reset_fn restore what a run changes"
        raise InvalidArgument("autotune", "input_variants_fn", input_variants_fn, expected)
    rounding = rounding_functions(sizes)
    if waves_fn is not None and not rounding:
        raise InvalidArgument("autotune", "waves_fn", waves_fn, "None without sizes")
    if isinstance(config_space, Product) and sizes:
        wanted = "a list of configs, such as list(product): sizes= reads every config"
        raise InvalidArgument("autotune", "config_space", config_space, wanted)
    if isinstance(config_space, Product) and not config_space.is_listed:
        number = f"{len(config_space)} combinations"
        if search in FULL_SEARCHES:
            wanted = f'"surrogate", "optuna" or "auto" for {number}'
            raise InvalidArgument("autotune", "search", search, wanted)
        if prior_fn is not None:
            wanted = f"None: it would be called for {number}"
            raise InvalidArgument("autotune", "prior_fn", prior_fn, wanted)
    if not callable(config_space) and not isinstance(config_space, Product):
        try:
            configs = iter(config_space)
        except TypeError as error:
            expected = "dicts of keyword arguments, or a function that returns them"
            raise InvalidArgument("autotune", "config_space", config_space, expected) from error
        config_space = list(configs)  # an iterator can be read only once
    user_search = search if callable(search) else None
    search_name = search if isinstance(search, str) else f"own {qualified_name(search)}"
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
        sized_key_fn, key_sizes = key_fn_with_sizes(fn, key_fn, rounding, waves_fn)
        optional_hooks = [prune_fn, check_fn, input_variants_fn, reset_fn]
        optional_hooks += [prior_fn] if search == "prior" else []
        hook_fns = [each for each in optional_hooks if each is not None]
        # Records depend on the values that constants have at decoration, now.
        snapshot, memory_store = Snapshot([fn, *hook_fns]), MemoryStore()

        def components_for(process_group: Any, verbose: bool) -> Components:
            """Return the components for a first call over ``process_group``, for the current
            environment."""
            ranks: RankGroup = group_for(process_group, scope)
            gpu_is_shared = current_device().name == "cuda" and ranks_per_gpu() > 1
            policy = Policy.for_device(
                current_device().name,
                gpu_is_shared=gpu_is_shared,
                timing=timing,
                search=search_name,
                max_seconds=max_seconds,
                max_trials=max_trials,
                effort=effort,
            )

            def fingerprint(function: Callable[..., Any], space: Any) -> Fingerprint:
                roots = [function, *space.functions]
                source, hooks_source = sources_of(roots, hook_fns, ignore, snapshot, space.classes)
                # If both are unset, the digest equals the digest of versions without them.
                others: list[object] = [list(restore)] if restore else []
                others += ["worst_input"] if worst_input else []
                digest = codec.digest(space.digest, hooks_source.digests, *others)
                return fingerprint_of(ranks, policy, source, hooks_source, digest, version or "")

            packs = map(pack_store, pack_locations())
            common = common_components(policy, ranks, verbose, memory_store, *packs)
            files = file_store(knobs.cache_dir.get())
            trial_context = functools.partial(_without_gradients, common.trial_context)
            return Components(
                **{**vars(common), "trial_context": trial_context},
                memory_store=memory_store,
                search=functools.partial(
                    search_for, user_search=user_search, compiles_ahead=prepare_fn is not None
                ),
                check_search=functools.partial(check_search, policy),
                warm_start_search=ShortRace,
                fingerprint=fingerprint,
                log=lambda key: FileLog(files.path(key), int(ranks.global_rank(ranks.rank))),
            )

        tuned: AutoTuner[..., Any] = AutoTuner(
            fn,
            space,
            sized_key_fn,
            prune_fn,
            hooks,
            components_for,
            memory_store.clear,
            process,
            identity_of,
            key_sizes,
            fallback_fn or (lambda config: False),
            prior_fn,
        )
        _tuned_functions.add(tuned)
        return tuned

    return decorate


_tuned_functions: weakref.WeakSet[AutoTuner[..., Any]] = weakref.WeakSet()


def _read_sources() -> None:
    """Parse the sources of tuned functions that have records in packs. Takes 0.5 s, so it runs in
    the background."""
    keys = [each.key for packed in packs_in(pack_locations()) for each in records_of(packed)]
    names = {(key.module, key.function) for key in keys}
    for tuned in list(_tuned_functions):
        origin = FunctionIdentity.of(tuned.fn, ())
        if (origin.module, origin.function) in names:
            source_of([tuned.fn])


shipped.background_jobs.append(_read_sources)


def _is_positive(value: Any) -> bool:
    return isinstance(value, numbers.Real) and value is not True and bool(value > 0)  # type: ignore[operator]


@contextmanager
def _without_gradients(
    trial_context: Callable[[], AbstractContextManager[object]],
) -> Iterator[None]:
    """Context manager for trials: disable gradients, and let a wait in a kernel fail after a time
    limit."""
    with torch.no_grad(), trial_context():
        yield
