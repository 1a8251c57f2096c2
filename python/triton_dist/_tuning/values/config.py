"""Define a candidate (:class:`Config`) and the set of all candidates (:class:`ConfigSpace`)."""

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
    If a name is not in the map and the map has exactly one ``triton.Config``, the name is read from
    its meta-parameters and then its options: ``config["BLOCK_SIZE_M"]`` and
    ``config["num_stages"]`` work. Iteration and ``**config`` use only the map.

    Equal configs have equal digests; the order of names does not count. The digest covers the code
    of functions, such as a ``pre_hook``, and the arguments of a ``functools.partial``. It does not
    cover values that functions bind: these may differ by rank and are constants in the fingerprint.

    Args:
        number: distinguishes configs that differ only in the values that their functions bind.
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
        """Return the keyword arguments for a call.

        Each call gets its own copy of a ``triton.Config``, which the called function may change.
        """
        return {name: _copied(value) for name, value in self._values.items()}

    def functions(self) -> Iterator[Callable[..., Any]]:
        """Yield the functions whose source the result depends on.

        These are values, functions of Triton kernels, and pre-hooks of a ``triton.Config``.
        """
        for each in _parts(self._values.values()):
            if isinstance(each, types.FunctionType):
                yield each
            elif codec.is_triton_kernel(each):
                yield each.fn

    def classes(self) -> Iterator[type]:
        """Yield classes among the values, and classes of enums and dataclasses among them."""
        for each in _parts(self._values.values()):
            if isinstance(each, type):
                yield each
            elif isinstance(each, enum.Enum) or dataclasses.is_dataclass(each):
                yield type(each)


def _parts(values: Iterable[Any]) -> Iterator[Any]:
    """Yield ``values`` and, recursively, the contents of containers and ``triton.Config``."""
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
    """Return the tree of a config as Python source."""
    return "{" + ", ".join(f"{name!r}: {show(value)}" for name, value in tree.items()) + "}"


def _copied(value: Any) -> Any:
    """Copy a ``triton.Config``, which is mutable; its ``pre_hook`` is shared."""
    if not codec.is_triton_config(value):
        return value
    copied = copy.copy(value)
    copied.kwargs = dict(value.kwargs)
    return copied


def _encode(name: str, value: object) -> codec.Tree:
    try:
        return codec.encode(value, binding=False)
    except TypeError as error:
        if codec.is_triton_config(value):
            _check_parts(name, value)
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


def _check_parts(name: str, config: Any) -> None:
    """Raise an error that names the part of a ``triton.Config`` without a stable text."""
    for part, value in {**vars(config), **config.kwargs}.items():
        if part != "kwargs":
            _encode(f"{name}: {part}", value)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values of equal text are equal; false if they cannot be compared."""
    if one is other or codec.is_exact(one, binding=False):
        return True
    try:
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)  # tensors: all elements
    except Exception:
        return False


def numbered(configs: Iterable[Config]) -> list[Config]:
    """Number the ``configs`` that differ only in the values that their functions bind."""
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
    """Encode the functions in ``config`` with bound values; keep functions without a text."""
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
    """All candidates in order of preference; the first is the default.

    The space is evaluated at first use, not at import, so importing a kernel module touches no GPU.
    Duplicates are dropped. Unequal configs with equal texts are dropped with a warning.

    Args:
        source: list of dicts, or a callable without arguments that returns such a list.
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
        ambiguous: list[str] = []
        for config in numbered(map(_as_config, candidates)):
            first = configs.setdefault(config.digest, config)
            if first is not config:
                ambiguous += [name for name in config if not _same(config[name], first[name])]
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
    def _place_of(self) -> dict[str, int]:
        return {config.digest: place for place, config in enumerate(self._configs)}

    def place(self, config: Config) -> int:
        """Return the index of ``config``, which must be in the space."""
        return self._place_of[config.digest]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All names that any config sets."""
        return frozenset(name for config in self._configs for name in config)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the configs and of their order, which breaks ties."""
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
        """Return the config with this digest, or ``None``. An unlisted space needs its ``tree``."""
        place = self._place_of.get(config_digest)
        return None if place is None else self._configs[place]

    def without(self, fixed: Config) -> ConfigSpace:
        """Return the space that remains when the caller passes the values in ``fixed``."""
        rest = FixedSpace(
            [{name: value for name, value in c.items() if name not in fixed} for c in self]
        )
        rest.fixed = fixed
        return rest

    def prune(
        self, prune_fn: Callable[..., object] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[Pruned]]:
        """Return the configs that ``prune_fn(config, *args, **kwargs)`` keeps, and the pruned."""
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
    """A space without the names in ``fixed``, whose values the caller passes.

    ``prune_fn`` still gets complete configs.
    """

    fixed: Config

    def prune(
        self, prune_fn: Callable[..., object] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[Pruned]]:
        others = {name: value for name, value in kwargs.items() if name not in self.fixed}
        prune_fn = prune_fn and on_complete_configs(prune_fn, self.fixed)
        return super().prune(prune_fn, args, others)


def on_complete_configs(function: Callable[..., object], fixed: Config) -> Callable[..., object]:
    """Wrap ``prune_fn`` or ``fallback_fn`` to add ``fixed`` to each config that it gets."""

    @functools.wraps(function)
    def with_fixed(config: Config, /, *args: Any, **kwargs: Any) -> object:
        return function(Config({**config, **fixed}), *args, **kwargs)

    return with_fixed


def reason_of(prune_fn: Callable[..., object] | None) -> str:
    """Return the reason recorded for a config that ``prune_fn`` rejects."""
    return f"{getattr(prune_fn, '__name__', repr(prune_fn))} dropped it"
