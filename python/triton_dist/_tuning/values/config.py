"""One candidate (:class:`Config`) and all of them (:class:`ConfigSpace`)."""

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

    A value may be anything: a ``triton.Config``, an enum, a bool, a string, an int, a dtype.
    Reading a name that is not in the map falls through to the one ``triton.Config`` in it, to its
    meta-parameters and then its options, so ``config["BLOCK_SIZE_M"]`` and ``config["num_stages"]``
    work. Iteration and ``**config`` see the map alone.

    Equal configs have equal digests, whatever the order of their names. Of functions in it, such as
    a ``pre_hook``, the code counts: what they bind may differ by rank, and is a constant in the
    fingerprint. Of a ``functools.partial`` the arguments count as well.

    Args:
        number: tells it from others that differ in what their functions bind alone.
    """

    def __init__(self, values: Mapping[str, Any], number: int = 1) -> None:
        self._values = {name: _own(value) for name, value in values.items()}
        self.tree: codec.Tree = {name: _encode(name, value) for name, value in self._values.items()}
        if number > 1:
            self.tree["#"] = number
        self.digest: str = codec.digest(self.tree)

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        inner = [value for value in self._values.values() if codec.is_triton_config(value)]
        if len(inner) == 1:
            options = {
                option: item for option, item in vars(inner[0]).items() if option != "kwargs"
            }
            return {**options, **inner[0].kwargs}[name]
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
        """The keyword arguments for a call, for the callee to keep: a function that changes its
        ``triton.Config`` changes no other call's."""
        return {name: _own(value) for name, value in self._values.items()}

    def functions(self) -> Iterator[Callable[..., Any]]:
        """The functions in it (values, those of Triton kernels, and pre-hooks of a
        ``triton.Config``): their source counts too."""
        for each in _parts(self._values.values()):
            if isinstance(each, types.FunctionType):
                yield each
            elif codec.is_triton_kernel(each):
                yield each.fn

    def classes(self) -> Iterator[type]:
        """The classes in it, and those of its enums and dataclasses: their source counts too."""
        for each in _parts(self._values.values()):
            if isinstance(each, type):
                yield each
            elif isinstance(each, enum.Enum) or dataclasses.is_dataclass(each):
                yield type(each)


def _parts(values: Iterable[Any]) -> Iterator[Any]:
    """All that is in ``values``: in containers, and in a ``triton.Config``."""
    for value in values:
        if codec.is_triton_config(value):
            yield from _parts(vars(value).values())
        elif isinstance(value, Mapping):
            yield from _parts(value.values())
        elif isinstance(value, (tuple, list, set, frozenset)):
            yield from _parts(value)
        elif isinstance(value, functools.partial):
            yield from _parts((value.func, value.args, value.keywords))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield value
            yield from _parts(getattr(value, f.name, None) for f in dataclasses.fields(value))
        else:
            yield value


def show_config(tree: codec.Tree) -> str:
    """The tree of a config as it would be typed."""
    return "{" + ", ".join(f"{name!r}: {show(value)}" for name, value in tree.items()) + "}"


def _own(value: Any) -> Any:
    """A ``triton.Config`` is mutable: everyone gets a copy. Its ``pre_hook`` is shared."""
    if not codec.is_triton_config(value):
        return value
    own = copy.copy(value)
    own.kwargs = dict(value.kwargs)
    return own


def _encode(name: str, value: object) -> codec.Tree:
    try:
        return codec.encode(value, binding=False)
    except TypeError as error:
        if codec.is_triton_config(value):
            _check_parts(name, value)
        shown = repr(value)
        if " at 0x" in shown:  # the default repr: another text in each process
            raise InvalidArgument(
                "autotune",
                f"config_space value {name!r}",
                value,
                "a value with a stable text: a number, string, enum, tuple, frozen dataclass, "
                "triton.Config, function, functools.partial of these, or an object whose repr "
                "tells it from all others",
            ) from error
        return {"object": shown}


def _check_parts(name: str, config: Any) -> None:
    """Name the part of a ``triton.Config`` that has no text."""
    for part, value in {**vars(config), **config.kwargs}.items():
        if part != "kwargs":
            _encode(f"{name}: {part}", value)


def _same(one: Any, other: Any) -> bool:
    """True if two values of equal text are one; where they cannot be compared they are not."""
    if one is other or codec.is_exact(one, binding=False):
        return True
    try:
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)  # of tensors, each element
    except Exception:
        return False


def told_apart(configs: Iterable[Config]) -> list[Config]:
    """``configs``, numbered where several differ in what their functions bind alone."""
    known: dict[str, Config] = {}
    result = []
    for config in configs:
        number = 1
        while _bound(known.setdefault(config.digest, config)) != _bound(config):
            number += 1
            config = Config(config, number)
        result.append(config)
    return result


def _bound(config: Config) -> list[Any]:
    """The functions in it with what they bind; themselves, where that has no text."""
    return [codec.encode(f) if codec.is_exact(f) else f for f in config.functions()]


@dataclass(frozen=True)
class Pruned:
    """A config that is not worth measuring."""

    config: Config
    reason: str


def _as_config(candidate: Any) -> Config:
    if not isinstance(candidate, Mapping):
        raise InvalidArgument(
            "autotune", "config_space entry", candidate, "a dict of keyword arguments"
        )
    return candidate if isinstance(candidate, Config) else Config(candidate)


class ConfigSpace(Sequence[Config]):
    """All candidates, in the order of preference: the first is the default.

    Evaluated when first looked at, never at import, so that importing a module of kernels touches
    no GPU. Duplicates are dropped; of those that only print alike there is a warning.

    Args:
        source: list of dicts, or a callable without arguments that returns one.
    """

    def __init__(
        self, source: Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
    ):
        self._source = source

    @property
    def maker(self) -> Callable[[], Iterable[Mapping[str, Any]]] | None:
        """The callable that returns the configs, if one was given."""
        return self._source if callable(self._source) else None

    @functools.cached_property
    def _configs(self) -> tuple[Config, ...]:
        candidates: object = self._source if self.maker is None else self.maker()
        if not isinstance(candidates, Iterable):
            expected = "dicts of keyword arguments"
            raise InvalidArgument("autotune", "the result of config_space", candidates, expected)
        configs: dict[str, Config] = {}
        alike: list[str] = []
        for config in told_apart(map(_as_config, candidates)):
            first = configs.setdefault(config.digest, config)
            if first is not config:
                alike += [name for name in config if not _same(config[name], first[name])]
        if alike:
            warn(
                f"config_space: {len(alike)} values of {', '.join(sorted(set(alike)))} print like "
                "an earlier one and are not equal to it; their configs are dropped. Give such "
                "objects a repr that tells them apart, or use a number or a name for them",
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
        """The config that is used where nothing is tuned."""
        return self._configs[0]

    @functools.cached_property
    def _place_of(self) -> dict[str, int]:
        return {config.digest: place for place, config in enumerate(self._configs)}

    def place(self, config: Config) -> int:
        """The place of ``config``, which is in it."""
        return self._place_of[config.digest]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Every name that some config sets."""
        return frozenset(name for config in self._configs for name in config)

    @functools.cached_property
    def digest(self) -> str:
        """Changes with any config and with their order, which breaks ties."""
        return codec.digest([config.digest for config in self._configs])

    @functools.cached_property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Those in its configs, each once."""
        return tuple(dict.fromkeys(f for config in self._configs for f in config.functions()))

    @functools.cached_property
    def classes(self) -> tuple[type, ...]:
        """The same for classes."""
        return tuple(dict.fromkeys(c for config in self._configs for c in config.classes()))

    def find(self, config_digest: str, tree: codec.Tree = None) -> Config | None:
        """The config with this digest, if it is in the space.

        Args:
            tree: of the config: a space that is not listed finds it by that alone.
        """
        place = self._place_of.get(config_digest)
        return None if place is None else self._configs[place]

    def without(self, fixed: Config) -> ConfigSpace:
        """The space that is left when the caller gives these values."""
        return FixedSpace(self, fixed)

    def prune(
        self,
        prune_fn: Callable[..., object] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, list[Pruned]]:
        """The configs that ``prune_fn(config, *args, **kwargs)`` keeps, and the others with the
        reason."""
        if prune_fn is None:
            return list(self._configs), []
        kept: list[Config] = []
        pruned: list[Pruned] = []
        for config in self._configs:
            if prune_fn(config, *args, **kwargs):
                kept.append(config)
            else:
                pruned.append(Pruned(config, reason_of(prune_fn)))
        return kept, pruned


class FixedSpace(ConfigSpace):
    """The rest of ``space`` when the caller gives some values: its configs without these names.

    ``prune_fn`` still sees whole configs.
    """

    def __init__(self, space: ConfigSpace, fixed: Config) -> None:
        self._fixed = fixed
        super().__init__(
            [{name: value for name, value in c.items() if name not in fixed} for c in space]
        )

    def prune(
        self,
        prune_fn: Callable[..., object] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[list[Config], list[Pruned]]:
        others = {name: value for name, value in kwargs.items() if name not in self._fixed}
        validator = prune_fn and validator_of_whole(prune_fn, self._fixed)
        return super().prune(validator, args, others)


def validator_of_whole(validator: Callable[..., object], fixed: Config) -> Callable[..., object]:
    """``prune_fn`` or ``fallback_fn`` about configs without the names in ``fixed``: it still sees
    whole ones."""

    @functools.wraps(validator)
    def of_rest(config: Config, /, *args: Any, **kwargs: Any) -> object:
        return validator(Config({**config, **fixed}), *args, **kwargs)

    return of_rest


def reason_of(prune_fn: Callable[..., object] | None) -> str:
    """Reason for which a config is not kept."""
    return f"{getattr(prune_fn, '__name__', repr(prune_fn))} dropped it"
