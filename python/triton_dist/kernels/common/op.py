"""An op is a function that several algorithms can compute, its *ways*, and that is tuned over them.

    @op(algorithms=ALGORITHMS, call=Call, sizes=Sizes.of, key_fn=key_fn, version="3")
    def gemm_rs(A, B, ctx, gemm_config=None, ..., algorithm=None):
        return Call(A, B, ctx, gemm_config, ..., way).run()

A config is the name of a way and the values of that way's tunables, nothing else. From the ways
come the config space, what is pruned, what is compiled ahead, and the call itself; so another
algorithm is another ``Algorithm`` in the tuple. A call looks its way up once: what it costs the
host is benchmarks/bench_host_cost.py.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
import triton

from triton_dist import tune
from triton_dist.errors import InvalidArgument

C = TypeVar("C", bound="OpCall")
S = TypeVar("S")

_ASKING = ("method", "fuse_scatter")
"""Older keywords that name a way."""


class Algorithm(ABC, Generic[C, S]):
    """An algorithm of an op: ``C`` is the type of the op's calls, ``S`` of the sizes of a key."""

    name: str
    """Text that ``algorithm=`` and records say."""
    tunables: ClassVar[tuple[str, ...]] = ()
    """Names of the values in its configs."""
    is_fallback: ClassVar[bool] = False
    """Near the best at every size, as a library's: always raced."""

    @abstractmethod
    def candidates(self) -> Iterable[tuple[Any, ...]]:
        """Values of ``tunables`` worth trying on this process's device, the most promising
        first."""

    @abstractmethod
    def fits(self, config: Mapping[str, Any], sizes: S) -> bool:
        """Tell whether a config is worth trying for every call of a key with these sizes."""

    def check(self, call: C) -> None:
        """Refuse a call that cannot work this way.

        Raises:
            InvalidArgument: names the argument, its value and what was expected.
        """

    def compile(self, call: C) -> None:
        """Compile and load what ``run`` launches, and launch nothing. Libraries have theirs."""

    @abstractmethod
    def run(self, call: C) -> torch.Tensor:
        """Launch the call, and return its result."""


class NamedSizes(Protocol):
    """Sizes of a key of an op whose older keywords name a way."""

    @property
    def asked(self) -> str | None:
        """The way that the caller's keywords ask for."""


A = TypeVar("A", bound=NamedSizes)


class NamedAlgorithm(Algorithm[C, A]):
    """A way of an op whose older keywords name a way: then it alone is tried."""

    def fits(self, config: Mapping[str, Any], sizes: A) -> bool:
        return sizes.asked in (None, self.name) and self.fits_sizes(config, sizes)

    @abstractmethod
    def fits_sizes(self, config: Mapping[str, Any], sizes: A) -> bool:
        """Tell whether a config is worth trying where this way is allowed. It must not go by what a
        context holds: others have the same key."""


class Algorithms(dict[str, Algorithm[C, S]]):
    """The ways of an op by name, in the order in which they are tried. A dict, for each call looks
    its way up."""

    def __init__(self, function: str, algorithms: Iterable[Algorithm[C, S]]) -> None:
        super().__init__((algorithm.name, algorithm) for algorithm in algorithms)
        self.function = function

    def __missing__(self, name: object) -> Algorithm[C, S]:
        expected = f"None or one of {', '.join(map(repr, self))}"
        raise InvalidArgument(self.function, "algorithm", name, expected)

    def asked(self, method: object) -> str | None:
        """Name the way that the older keyword ``method`` asks for, by the member of an enumeration
        whose value it is; ``None``: it asks for none."""
        if method is None:
            return None
        if not isinstance(method, enum.Enum) or method.value not in self:
            names = ", ".join(map(repr, self))
            expected = f"None or the member of an enumeration that stands for one of {names}"
            raise InvalidArgument(self.function, "method", method, expected)
        return str(method.value)

    def has_candidates(self, name: str, sizes: S) -> bool:
        """Tell whether the way ``name`` is worth trying at all for calls of a key."""
        algorithm = self[name]
        configs = (
            dict(zip(algorithm.tunables, each, strict=True)) for each in algorithm.candidates()
        )
        return any(algorithm.fits({"algorithm": name, **config}, sizes) for config in configs)

    def config_space(self) -> list[dict[str, Any]]:
        """Configs of all ways; the first is the default."""
        return [
            {"algorithm": algorithm.name, **dict(zip(algorithm.tunables, values, strict=True))}
            for algorithm in self.values()
            for values in algorithm.candidates()
        ]


def check_straggler(function: str, option: object) -> None:
    """Refuse a ``straggler_option`` that says neither who sleeps nor how long.

    Raises:
        InvalidArgument: it is not two whole numbers.
    """
    match option:
        case (int(), int(cycles)) if cycles >= 0:
            return
    expected = "None, or (rank, cycles): two ints, cycles from 0 on"
    raise InvalidArgument(function, "straggler_option", option, expected)


def check_tiles(function: str, config: Any, algorithm: str | None = None) -> None:
    """Refuse a ``gemm_config`` that has no tiles of a product.

    Raises:
        InvalidArgument: says what it lacks.
    """
    try:
        config.kwargs["BLOCK_SIZE_K"]
    except (AttributeError, KeyError) as error:
        expected = (
            "a triton.Config"
            if algorithm is None
            else f"a triton.Config for algorithm={algorithm!r}"
        )
        if isinstance(config, triton.Config):
            missing = {f"BLOCK_SIZE_{axis}" for axis in "MNK"} - set(config.kwargs)
            config, expected = str(config), f"one with {', '.join(sorted(missing))}"
        raise InvalidArgument(function, "gemm_config", config, expected) from error


class OpCall:
    """Arguments of one call of an op, checked; a dataclass whose fields are the op's parameters.

    ``accepted_key``, the last of them, is for the tuner: the key of a call whose operands its
    ``key_fn`` has checked already.
    """

    chosen: Algorithm[Any, Any]

    def run(self) -> torch.Tensor:
        """Launch the call, and return its result."""
        return self.chosen.run(self)

    def compile(self) -> None:
        """Compile and load what ``run`` launches."""
        self.chosen.compile(self)


def op(
    *,
    algorithms: Algorithms[Any, Any],
    call: Callable[..., OpCall],
    sizes: Callable[..., Any],
    key_fn: Callable[..., Any],
    version: str,
    key_sizes: Sequence[str] = (),
    agree_fn: Callable[..., object] = lambda *_, **__: "",
    **settings: Any,
) -> Callable[[Callable[..., Any]], tune.AutoTuner]:
    """Decorate the function of an op's ``op.py``, whose parameters are the fields of ``call``.

    Records, errors and pickles name the folder of ``op.py``, from which users import the op: files
    inside it can be named anew without a tuning being lost.

    Args:
        sizes: ``sizes(*args, **kwargs)`` returns what ``Algorithm.fits`` receives, the same for all
            calls of a key, since a winner serves all of them.
        key_sizes: ``sizes`` of ``tune.autotune``. key_fn, agree_fn, settings: of ``tune.autotune``,
            such as ``scope="rank"`` for an op of one rank, which has no context.
        version: another one when results that are shipped (records/) must not be used any more.
    """

    def decorate(fn: Callable[..., Any]) -> tune.AutoTuner:
        signature = inspect.signature(fn)

        def prune(config: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> bool:
            algorithm = algorithms[config["algorithm"]]
            # A caller who fixes a way leaves configs of others, with their tunables.
            if config.keys() != {"algorithm", *algorithm.tunables}:
                return False
            return algorithm.fits(config, sizes(*args, **kwargs))

        def prepare(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            call(**bound.arguments).compile()

        def agree(*args: Any, **kwargs: Any) -> object:
            """Refuse at the first call of a key what would make every candidate of it fail."""
            given = signature.bind_partial(*args, **kwargs).arguments
            if given.get("straggler_option") is not None:
                check_straggler(algorithms.function, given["straggler_option"])
            found = sizes(*args, **kwargs)
            asked = getattr(found, "asked", None)
            if asked is not None and not algorithms.has_candidates(asked, found):
                by = next(name for name in _ASKING if given.get(name) is not None)
                expected = "an algorithm that fits here; to run it nevertheless, pass "
                expected += (
                    f"autotune=False or call {algorithms.function}.fn(…, algorithm={asked!r})"
                )
                raise InvalidArgument(algorithms.function, by, given[by], expected)
            return agree_fn(*args, **kwargs)

        def recover(*args: Any, **kwargs: Any) -> None:
            """Bring the context of all ranks back to one state after a candidate failed on some
            rank."""
            signature.bind_partial(*args, **kwargs).arguments["ctx"].reset()

        tuner = tuned(
            config_space=algorithms.config_space,
            key_fn=key_fn,
            prune_fn=prune,
            prepare_fn=prepare,
            agree_fn=agree,
            recover_fn=recover if "ctx" in signature.parameters else None,
            timing="graph",  # as in serving; streams of a library overlap there, whatever the host
            version=version,
            sizes=key_sizes,
            fallback_fn=lambda config: (
                algorithms[config["algorithm"]].is_fallback and config["algorithm"]
            ),
            **settings,
        )(fn)
        tuner.overwritten = ("output", "gathered")
        tuner.unsaid = (
            "algorithm",
        )  # the first is an op's own default, unless a context has another
        tuner.key_argument = "accepted_key"
        return tuner

    return decorate


def tuned(**settings: Any) -> Callable[[Callable[..., Any]], tune.AutoTuner]:
    """Decorate a function of an ``op.py`` that has no ways; ``settings``: of ``tune.autotune``."""

    def decorate(fn: Callable[..., Any]) -> tune.AutoTuner:
        fn.__module__ = fn.__module__.rpartition(".")[0] or fn.__module__
        return tune.autotune(**settings)(fn)

    return decorate
