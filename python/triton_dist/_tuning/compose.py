"""The one place that picks device, ranks, store, search and benchmarker, and makes a tuner of
them."""

from __future__ import annotations

import functools
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from triton_dist import knobs
from triton_dist._archive import pack_places, packs_in
from triton_dist._tuning.engine.decorated import check_tunable, names_of, one_of, roundings
from triton_dist._tuning.engine.dispatch import AutoTuner
from triton_dist._tuning.engine.parts import Hooks, NoGroup, Parts, Surroundings
from triton_dist._tuning.protocols import RankGroup, Search
from triton_dist._tuning.search import Brief, Factory, search_for
from triton_dist._tuning.shared import common_parts, file_store, fingerprint_of, is_off, pack_store
from triton_dist._tuning.source import Snapshot, origin_of, source_of
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
from triton_dist._tuning.values.policy import EFFORTS, LISTING
from triton_dist._tuning.values.sizes import sized_key
from triton_dist.errors import InvalidArgument
from triton_dist.runtime.compiling import shipped
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import default_group, group_for
from triton_dist.runtime.sharing import ranks_per_gpu
from triton_dist.runtime.tracing import is_traced, untraced

_SCOPES = ("world", "rank")
_TIMINGS = ("events", "graph")
_SEARCHES = (*LISTING, "surrogate", "auto")


def autotune(
    config_space: Product | Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]],
    key_fn: Callable[..., Any],
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
    input_variants_fn: Callable[..., Iterable[Mapping[str, Any]]] | None = None,
) -> Callable[[Callable[..., Any]], AutoTuner]:
    """Decorator: choose the tunable arguments of a function by measuring, once for each key.

    At the first call of a key all ranks of the group measure the candidates together; the config
    whose slowest rank is fastest (median; of those within 1 % the earliest in the space) is used
    from then on, and written to
    ``~/.triton_dist/autotune/<function>/``. Later calls, and later processes, look it up.

    Args:
        config_space: dicts of keyword arguments of the function, or a callable that returns them,
            called at the first tuning. The first is the default. Or a ``tune.Product``, which may
            have millions of configs and lists none.
        key_fn: called with the arguments of the function; returns a hashable value. One tuning a
        value.
        prune_fn: ``prune_fn(config, *args, **kwargs)``, truthy keeps the config; the leader's
        counts.
        scope: ``"world"``: tune with the ranks of ``autotune_pg``, default the world. ``"rank"``:
        alone.
        prepare_fn: ``prepare_fn(*args, **kwargs, **config)`` compiles a config and checks its
            resources, launching nothing; an exception on any rank drops the config before any rank
            launches it. On GPUs it is also run once for each config at the start, with Triton's
            compiling left out (``warmup`` returns ``None``, exceptions are ignored), to learn what
            other processes can compile ahead, while candidates are measured.
        recover_fn: ``recover_fn(*args, **kwargs)``, on all ranks, after a config failed that may
            have launched on some of them.
        reset_fn: ``reset_fn(*args, **kwargs)``, before each run while tuning, outside of the timed
            part, and after the last.
        check_fn: ``check_fn(output, reference)``, returns ``False`` or raises to reject a config;
            the reference is the output of the first config that ran.
        timing: ``"events"``, the device's timer around each run; ``"graph"``, around replays of the
            run, captured in a CUDA graph, for functions that will be used so. On CPU ranks, where
            nothing is queued and there is nothing to capture, both are the same.
        max_seconds: begin no new config after so many seconds; the first is always measured.
        max_trials: try at most so many configs.
        search: ``"racing"``, samples in rounds, clear losers leave early; ``"exhaustive"``, all
            samples of every config in turn; ``"surrogate"``, for spaces too large to try all: a
            model of what was measured says which to try, and the fastest of these race;
            ``"auto"``, racing where there are few candidates, else surrogate. Or a search of your
            own: called with the values by name of each parameter, it returns an object with ``ask``
            and ``tell`` (``tune.Search``).
        effort: ``"quick"``, ``"normal"`` or ``"max"``: 50, 200 or 1000 candidates are tried where
            not all are; with ``"quick"``, no more than 50 in any case. ``max_trials`` wins.
        version: what the author declares the function to be. Results of other versions are not
            used; shipped ones are matched by it instead of by the code, and not without it.
        agree_fn: ``agree_fn(*args, **kwargs)`` returns what must be the same on all ranks besides
            the key, such as an exact size behind a bucket; compared, as text, at the first call of
            a key. Ranks that differ get an error instead of a call that hangs.
        restore: names of arguments that the function changes (tensors, or tuples, lists and dicts
            of them): while tuning they are made what they were before each run, untimed, and the
            call that follows finds them unchanged. Takes as much memory again.
        ignore: names of constants that do not count in records: globals, closure cells, arguments
            and attributes that the function, its hooks or their helpers read or bind, such as
            ``"RANK"``.
        sizes: names of arguments of the function, or of fields of a named tuple that ``key_fn``
            returns: ints whose every value is not worth a tuning, such as a number of tokens. A
            tuning serves a range of each (``fine_bucket``; a mapping gives another rounding by
            name), and keys that differ in sizes alone learn from one another: the first call of a
            new range, beside tuned ones, lets their few best configs race for
            ``TRITON_DIST_AUTOTUNE_WARM_START_MS`` milliseconds. Where nothing can be measured,
            neighbours decide alone. Arguments are added to what ``key_fn`` returns, which then
            need not know them.
        fallback_fn: ``fallback_fn(config)``, true for configs that are far from the best nowhere,
            such as a library's: one of them races at every size, and is used in doubt. Where it
            returns names, one of each, of four at most.
        waves_fn: ``waves_fn(key, config)``, how many times a call of ``key``, which is what
            ``key_fn`` returns, fills the device: its tiles over those that run at a time, not
            rounded. What takes no more waves takes no more time, so this says which config is worth
            racing at a size beside those that were measured. ``None``: its time grows with the
            sizes. Needs ``sizes``.
        input_variants_fn: ``input_variants_fn(*args, **kwargs)`` returns mappings from names of
            arguments to other values, as likely as those of the call and as many on every rank, for
            functions whose time depends on values in their tensors: each sample is the mean of the
            call and of one call with each mapping. Not with ``restore`` and ``reset_fn``, as
            nothing is brought back between these calls.

    Call keywords of the decorated function: ``autotune=True``, ``autotune_verbose=False``,
    ``autotune_pg=None``, ``autotune_allow_arg_overwrite=False``. With the last one ``True``, a
    keyword that is also a tunable name holds, while tuning too: the other names are tuned for it,
    and each value of it is a key of its own.

    Raises:
        InvalidArgument: an argument above that is not one of its choices.
    """
    one_of("scope", scope, _SCOPES)
    one_of("timing", timing, _TIMINGS)
    if not callable(search):
        one_of("search", search, _SEARCHES)
    one_of("effort", effort, tuple(EFFORTS))
    if max_seconds is not None and not _is_positive(max_seconds):
        raise InvalidArgument("autotune", "max_seconds", max_seconds, "a positive number, or None")
    if max_trials is not None and (type(max_trials) is not int or max_trials < 1):
        raise InvalidArgument("autotune", "max_trials", max_trials, "a positive integer, or None")
    if version is not None and not (isinstance(version, str) and version):
        raise InvalidArgument("autotune", "version", version, "a text that is not empty, or None")
    named = {
        "key_fn": key_fn,
        "prune_fn": prune_fn,
        "prepare_fn": prepare_fn,
        "recover_fn": recover_fn,
        "agree_fn": agree_fn,
        "fallback_fn": fallback_fn,
        "waves_fn": waves_fn,
        "input_variants_fn": input_variants_fn,
    }
    for name, function in {**named, "reset_fn": reset_fn, "check_fn": check_fn}.items():
        if not callable(function) and (function is not None or name == "key_fn"):
            raise InvalidArgument("autotune", name, function, "a function")
    restore, ignore = names_of("restore", restore), names_of("ignore", ignore)
    if input_variants_fn is not None and (restore or reset_fn is not None):
        expected = "None where restore or reset_fn bring back what a run changes"
        raise InvalidArgument("autotune", "input_variants_fn", input_variants_fn, expected)
    rounding = roundings(sizes)
    if waves_fn is not None and not rounding:
        raise InvalidArgument("autotune", "waves_fn", waves_fn, "None where there are no sizes")
    if isinstance(config_space, Product) and sizes:
        wanted = (
            "a list of configs, such as list(product), as sizes= asks each what it may be used for"
        )
        raise InvalidArgument("autotune", "config_space", config_space, wanted)
    if isinstance(config_space, Product) and not config_space.is_listed and search in LISTING:
        wanted = f'"surrogate" or "auto" for a space of {len(config_space)} combinations'
        raise InvalidArgument("autotune", "search", search, wanted)
    if not callable(config_space) and not isinstance(config_space, Product):
        try:
            configs = iter(config_space)
        except TypeError as error:
            expected = "dicts of keyword arguments, or a function that returns them"
            raise InvalidArgument("autotune", "config_space", config_space, expected) from error
        config_space = list(configs)  # an iterator would be empty at the second look
    own = search if callable(search) else None
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

    hooks = Hooks(prepare_fn, recover_fn, reset_fn, check_fn, agree_fn, restore, input_variants_fn)
    surroundings = Surroundings(
        functools.partial(group_for, scope=scope),
        default_group if scope == "world" else NoGroup,
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
        keys, known = sized_key(fn, key_fn, rounding, waves_fn)
        deciding = (prune_fn, check_fn, input_variants_fn, reset_fn)
        validators = tuple(each for each in deciding if each is not None)
        composer = _Composer(
            scope,
            policy,
            functools.partial(search_for, own=own, ahead=prepare_fn is not None),
            validators,
            version or "",
            tuple(restore),
            ignore,
            Snapshot([fn, *validators]),
            MemoryStore(),
        )
        tuned = AutoTuner(
            fn,
            space,
            keys,
            prune_fn,
            hooks,
            composer.compose,
            composer.memory.clear,
            surroundings,
            origin_of,
            known,
            fallback_fn or (lambda config: False),
        )
        _tuned.add(tuned)
        return tuned

    return decorate


_tuned: weakref.WeakSet[AutoTuner] = weakref.WeakSet()


def _read_sources() -> None:
    """Read and parse all that the functions reach whose records are in packs with kernels: half a
    second of a first call, which has the result at hand then."""
    keys = [each.key for packed in packs_in(pack_places()) for each in records_of(packed)]
    names = {(key.module, key.function) for key in keys}
    for tuned in list(_tuned):
        origin = Origin.of(tuned.fn, ())
        if (origin.module, origin.function) in names:
            source_of([tuned.fn], (), Snapshot([tuned.fn]))


shipped.meanwhile.append(_read_sources)


def _is_positive(value: Any) -> bool:
    return isinstance(value, numbers.Real) and value is not True and bool(value > 0)  # type: ignore[operator]


@dataclass(frozen=True)
class _Composer:
    """Puts the parts together for one tuned function."""

    scope: str
    policy: Callable[..., Policy]
    """Policy of a device, by its name and by whether ranks take turns on it."""
    search: Callable[..., Search]
    validators: tuple[Callable[..., object], ...]
    """Functions that decide which configs can win, and what is timed."""
    version: str
    restore: tuple[str, ...]
    ignore: tuple[str, ...]
    snapshot: Snapshot
    memory: MemoryStore

    def compose(self, process_group: Any, verbose: bool) -> Parts:
        """The parts for a first call over ``process_group``, as the environment is now."""
        ranks: RankGroup = group_for(process_group, self.scope)
        alternates = current_device().name == "cuda" and ranks_per_gpu() > 1
        policy = self.policy(current_device().name, alternates=alternates)
        packs = map(pack_store, pack_places())
        common = common_parts(policy, ranks, verbose, self.memory, *packs)
        files = file_store(knobs.cache_dir.get())
        return Parts(
            **{**vars(common), "quiet": functools.partial(_quiet, common.quiet)},
            memory=self.memory,
            search=self.search,
            brief=Brief,
            fingerprint=functools.partial(self._fingerprint, ranks, policy),
            log=lambda key: FileLog(files.path(key), int(ranks.named(ranks.rank))),
        )

    def _fingerprint(
        self, ranks: RankGroup, policy: Policy, function: Callable[..., Any], space: ConfigSpace
    ) -> Fingerprint:
        validators = source_of(self.validators, self.ignore, self.snapshot)
        source = source_of([function, *space.functions], self.ignore, self.snapshot, space.classes)
        kept = [list(self.restore)] if self.restore else []  # as before for records without it
        digest = codec.digest(space.digest, validators.digests, *kept)
        return fingerprint_of(ranks, policy, source, validators, digest, self.version)


@contextmanager
def _quiet(bounded: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """No gradients, and no wait in a kernel that outlasts the patience of the other ranks: a
    candidate that dead-locks there fails and is voted out, and nobody has to be ended."""
    with torch.no_grad(), bounded():
        yield
