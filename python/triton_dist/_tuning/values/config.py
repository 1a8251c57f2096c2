"""Define a candidate (:class:`Config`) and all candidates of a function (:class:`ConfigSpace`)."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.show import show
from triton_dist._warn import warn
from triton_dist.errors import InvalidArgument, TuningWarning


class Config(Mapping[str, Any]):
    """Keyword arguments of the tuned function: an immutable map from name to value.

    A value may have any type, such as ``triton.Config``, enum, bool, string, int or dtype. If the
    map has exactly one ``triton.Config``, ``config[name]`` also finds its meta-parameters and
    options: ``config["BLOCK_SIZE_M"]`` and ``config["num_stages"]`` work. Iteration and
    ``**config`` use only the map.

    Equal configs have equal digests, in any order of names. The digest includes the code of
    functions, such as a ``pre_hook``, and the arguments of a ``functools.partial``. It does not
    include values in the closures of functions, because these may differ between ranks. They are
    compared as part of the record's fingerprint.

    Attributes:
        tree: the values as a JSON tree.
        digest: hash of ``tree``, 32 hexadecimal characters.

    Args:
        number: distinguishes configs that differ only in closures of their functions; from 1.
    """

    def __init__(self, values: Mapping[str, Any], number: int = 1) -> None:
        self._values = {name: _copied(value) for name, value in values.items()}
        self.tree: codec.Tree = {name: _encode(name, value) for name, value in self._values.items()}
        if number > 1:
            self.tree["#"] = number
        self.digest: str = codec.digest(self.tree)

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        triton_configs = [each for each in self._values.values() if codec.is_triton_config(each)]
        if len(triton_configs) == 1:
            attributes = vars(triton_configs[0]).items()
            options = {option: item for option, item in attributes if option != "kwargs"}
            return {**options, **triton_configs[0].kwargs}[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return show_config(self.tree)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for a call.

        Each call gets its own copy of a ``triton.Config``, which the called function may change.
        """
        return {name: _copied(value) for name, value in self._values.items()}

    def functions(self) -> Iterator[Callable[..., Any]]:
        """Yield the functions among the values, whose source a tuning result depends on.

        Values of containers, functions of Triton kernels and the pre-hook of a ``triton.Config``
        are included.
        """
        for each in _flattened(self._values.values()):
            if isinstance(each, types.FunctionType):
                yield each
            elif codec.is_triton_kernel(each):
                yield each.fn

    def classes(self) -> Iterator[type]:
        """Yield the classes among the values, and the classes of enum and dataclass values."""
        for each in _flattened(self._values.values()):
            if isinstance(each, type):
                yield each
            elif isinstance(each, enum.Enum) or dataclasses.is_dataclass(each):
                yield type(each)


def _flattened(values: Iterable[Any]) -> Iterator[Any]:
    """Yield ``values``. Replace each container and ``triton.Config`` by its contents."""
    for value in values:
        if codec.is_triton_config(value):
            yield from _flattened(vars(value).values())
        elif isinstance(value, Mapping):
            yield from _flattened(value.values())
        elif isinstance(value, (tuple, list, set, frozenset)):
            yield from _flattened(value)
        elif isinstance(value, functools.partial):
            yield from _flattened((value.func, value.args, value.keywords))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield value
            yield from _flattened(getattr(value, f.name, None) for f in dataclasses.fields(value))
        else:
            yield value


def show_config(tree: codec.Tree) -> str:
    """Return the tree of a config as Python source."""
    return "{" + ", ".join(f"{name!r}: {show(value)}" for name, value in tree.items()) + "}"


def _copied(value: Any) -> Any:
    """Return a copy of a ``triton.Config``, which is mutable; any other value unchanged."""
    if not codec.is_triton_config(value):
        return value
    copied = copy.copy(value)
    copied.kwargs = dict(value.kwargs)
    return copied


def _encode(name: str, value: object) -> codec.Tree:
    try:
        return codec.encode(value, with_bound_values=False)
    except TypeError as error:
        if codec.is_triton_config(value):
            _check_fields(name, value)
        shown = repr(value)
        if " at 0x" in shown:  # the default repr, which differs between processes
            raise InvalidArgument(
                "autotune",
                f"config_space value {name!r}",
                value,
                "a value with a stable text: a number, string, enum, tuple, frozen dataclass, "
                "triton.Config, function, functools.partial of these, or an object whose repr "
                "differs from the repr of all other values",
            ) from error
        return {"object": shown}


def _check_fields(name: str, config: Any) -> None:
    """Raise ``InvalidArgument`` for the first field of a ``triton.Config`` without stable text."""
    for part, value in {**vars(config), **config.kwargs}.items():
        if part != "kwargs":
            _encode(f"{name}: {part}", value)


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values with equal text are equal; ``False`` if comparing them raises."""
    if one is other or codec.is_encodable(one, with_bound_values=False):
        return True
    try:
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)  # tensors: all elements
    except Exception:
        return False


def numbered(configs: Iterable[Config]) -> list[Config]:
    """Return ``configs``, with different numbers for configs that differ only in the closures of
    their functions."""
    known: dict[str, Config] = {}
    result = []
    for config in configs:
        number = 1
        while _closures(known.setdefault(config.digest, config)) != _closures(config):
            number += 1
            config = Config(config, number)
        result.append(config)
    return result


def _closures(config: Config) -> list[Any]:
    """Return the functions in ``config``, encoded with the values in their closures if possible."""
    return [codec.encode(f) if codec.is_encodable(f) else f for f in config.functions()]


@dataclass(frozen=True)
class PrunedConfig:
    """A config that ``prune_fn`` rejected."""

    config: Config
    reason: str


def _as_config(candidate: Any) -> Config:
    if not isinstance(candidate, Mapping):
        raise InvalidArgument(
            "autotune", "config_space entry", candidate, "a dict of keyword arguments"
        )
    return candidate if isinstance(candidate, Config) else Config(candidate)


class ConfigSpace(Sequence[Config]):
    """All candidates in order of preference; the first is the default.

    The space is evaluated at first use, not at import, so importing a kernel module does not use a
    GPU. Duplicate configs are dropped. If unequal configs have equal texts, all but the first are
    dropped with a warning.

    Args:
        source: list of dicts of keyword arguments, or a callable without arguments that returns
            such a list.
    """

    def __init__(
        self, source: Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
    ):
        self._source = source

    @property
    def config_fn(self) -> Callable[[], Iterable[Mapping[str, Any]]] | None:
        """The callable that returns the configs; ``None`` if the space was given as a list."""
        return self._source if callable(self._source) else None

    @functools.cached_property
    def _configs(self) -> tuple[Config, ...]:
        candidates: object = self._source if self.config_fn is None else self.config_fn()
        if not isinstance(candidates, Iterable):
            expected = "dicts of keyword arguments"
            raise InvalidArgument("autotune", "the result of config_space", candidates, expected)
        configs: dict[str, Config] = {}
        ambiguous: list[str] = []
        for config in numbered(map(_as_config, candidates)):
            first = configs.setdefault(config.digest, config)
            if first is not config:
                ambiguous += [name for name in config if not _are_equal(config[name], first[name])]
        if ambiguous:
            warn(
                f"config_space: {len(ambiguous)} values of {', '.join(sorted(set(ambiguous)))} "
                "print like an earlier value but are not equal to it; their configs are dropped. "
                "Give these objects distinct reprs, or use a number or a name instead",
                TuningWarning,
            )
        return tuple(configs.values())

    def __getitem__(self, index: Any) -> Any:
        return self._configs[index]

    def __len__(self) -> int:
        return len(self._configs)

    def __contains__(self, config: object) -> bool:
        return isinstance(config, Config) and self.find(config.digest, config.tree) is not None

    @property
    def default(self) -> Config:
        """The config used without tuning."""
        return self._configs[0]

    @functools.cached_property
    def _index_by_digest(self) -> dict[str, int]:
        return {config.digest: index for index, config in enumerate(self._configs)}

    def index_of(self, config: Config) -> int:
        """Return the index of ``config``, which must be in the space."""
        return self._index_by_digest[config.digest]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All names that occur in a config."""
        return frozenset(name for config in self._configs for name in config)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the configs and their order. The order counts, because it breaks ties."""
        return codec.digest([config.digest for config in self._configs])

    @functools.cached_property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Functions in the configs, without duplicates."""
        return tuple(dict.fromkeys(f for config in self._configs for f in config.functions()))

    @functools.cached_property
    def classes(self) -> tuple[type, ...]:
        """Classes in the configs, without duplicates."""
        return tuple(dict.fromkeys(c for config in self._configs for c in config.classes()))

    def find(self, config_digest: str, tree: codec.Tree = None) -> Config | None:
        """Return the config with this digest, or ``None``.

        A :class:`~triton_dist._tuning.values.product.Product` also needs the config's ``tree``.
        """
        index = self._index_by_digest.get(config_digest)
        return None if index is None else self._configs[index]

    def without(self, fixed: Config) -> ConfigSpace:
        """Return the space that remains when the caller passes the values in ``fixed``."""
        space = RemainingSpace(
            [{name: value for name, value in c.items() if name not in fixed} for c in self]
        )
        space.fixed = fixed
        return space

    def prune(
        self, prune_fn: Callable[..., object] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[PrunedConfig]]:
        """Return the configs for which ``prune_fn(config, *args, **kwargs)`` is true, and the
        other configs."""
        if prune_fn is None:
            return list(self._configs), []
        kept: list[Config] = []
        pruned: list[PrunedConfig] = []
        for config in self._configs:
            if prune_fn(config, *args, **kwargs):
                kept.append(config)
            else:
                pruned.append(PrunedConfig(config, prune_reason(prune_fn)))
        return kept, pruned


class RemainingSpace(ConfigSpace):
    """Space that remains when the caller passes ``fixed``. ``prune_fn`` gets complete configs."""

    fixed: Config

    def prune(
        self, prune_fn: Callable[..., object] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[PrunedConfig]]:
        others = {name: value for name, value in kwargs.items() if name not in self.fixed}
        prune_fn = prune_fn and with_fixed_arguments(prune_fn, self.fixed)
        return super().prune(prune_fn, args, others)


def with_fixed_arguments(function: Callable[..., object], fixed: Config) -> Callable[..., object]:
    """Return ``function``, called with ``fixed`` added to each config."""

    @functools.wraps(function)
    def with_fixed(config: Config, /, *args: Any, **kwargs: Any) -> object:
        return function(Config({**config, **fixed}), *args, **kwargs)

    return with_fixed


def prune_reason(prune_fn: Callable[..., object] | None) -> str:
    """Return the reason recorded for a config that ``prune_fn`` rejects."""
    return f"{getattr(prune_fn, '__name__', repr(prune_fn))} dropped it"
