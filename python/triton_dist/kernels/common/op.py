"""Define an op: a tuned function that chooses among several algorithms.

    @op(algorithms=ALGORITHMS, call=Call, version="3")
    def gemm_rs(A, B, ctx, gemm_config=None, ..., algorithm=None):
        return Call(A, B, ctx, gemm_config, ..., algorithm).run()

A config consists of the name of an algorithm and the values of its tunables. The classes of the
algorithms define the config space, and how to prune, compile and run a config.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import torch
import triton

from triton_dist import tune
from triton_dist.errors import InvalidArgument

CallT = TypeVar("CallT", bound="OpCall")
SizesT = TypeVar("SizesT")
P = ParamSpec("P")
KeyFnT = TypeVar("KeyFnT", bound=Callable[..., object])
R = TypeVar("R")

_DEPRECATED_KEYWORDS = ("method", "fuse_scatter")
"""Deprecated keywords that select an algorithm."""


class Algorithm(ABC, Generic[CallT, SizesT]):
    """An algorithm of an op, for calls of type ``CallT`` with sizes of type ``SizesT``."""

    name: str
    """Name of the algorithm in ``algorithm=`` and in records."""
    tunables: ClassVar[tuple[str, ...]] = ()
    """Names of the values in a config of this algorithm."""
    is_fallback: ClassVar[bool] = False
    """True if every tuning must measure the algorithm, because it is near the fastest at every
    size, like a library."""

    @abstractmethod
    def candidates(self) -> Iterable[tuple[Any, ...]]:
        """Return the values of ``tunables`` to try on this device, most promising first."""

    @abstractmethod
    def fits(self, config: Mapping[str, Any], sizes: SizesT) -> bool:
        """Return whether a config is worth trying for every call of a key with these sizes."""

    def check(self, call: CallT) -> None:
        """Raise ``InvalidArgument`` if this algorithm cannot run the call."""

    def compile(self, call: CallT) -> None:
        """Compile and load what ``run`` launches, without launching it. Libraries need nothing."""

    @abstractmethod
    def run(self, call: CallT) -> torch.Tensor:
        """Launch the call and return its result."""


class SelectableAlgorithm(Algorithm[CallT, SizesT]):
    """An algorithm that a deprecated keyword can select. Only the selected algorithm is then tried.

    Sizes have the attribute ``requested_algorithm``: the name of the selected algorithm, or
    ``None``.
    """

    def fits(self, config: Mapping[str, Any], sizes: Any) -> bool:
        return sizes.requested_algorithm in (None, self.name) and self.fits_sizes(config, sizes)

    @abstractmethod
    def fits_sizes(self, config: Mapping[str, Any], sizes: SizesT) -> bool:
        """Return whether a config is worth trying if the caller allows this algorithm.

        The result must not depend on the context, because calls with different contexts share keys.
        """


class Algorithms(dict[str, Algorithm[CallT, SizesT]]):
    """Dict of an op's algorithms by name, in the order in which they are tried.

    ``function`` is the op's name in errors.
    """

    def __init__(self, function: str, algorithms: Iterable[Algorithm[CallT, SizesT]]) -> None:
        super().__init__((algorithm.name, algorithm) for algorithm in algorithms)
        self.function = function

    def __missing__(self, name: object) -> Algorithm[CallT, SizesT]:
        expected = f"None or one of {', '.join(map(repr, self))}"
        raise InvalidArgument(self.function, "algorithm", name, expected)

    def requested_algorithm(self, method: object) -> str | None:
        """Return the algorithm that the deprecated keyword ``method`` selects, or ``None``.

        ``method`` is an enumeration member whose value is the name of an algorithm.
        """
        if method is None:
            return None
        if not isinstance(method, enum.Enum) or method.value not in self:
            names = ", ".join(map(repr, self))
            expected = f"None or an enumeration member whose value is one of {names}"
            raise InvalidArgument(self.function, "method", method, expected)
        return str(method.value)

    def config_space(self) -> list[dict[str, Any]]:
        """Return the configs of all algorithms; the first is the default."""
        return [
            {"algorithm": each.name, **dict(zip(each.tunables, values, strict=True))}
            for each in self.values()
            for values in each.candidates()
        ]


def check_straggler(function: str, option: object) -> None:
    """Raise ``InvalidArgument`` unless ``straggler_option`` is a rank and a number of cycles."""
    match option:
        case (int(), int(cycles)) if cycles >= 0:
            return
    expected = "None, or (rank, cycles): two ints, cycles at least 0"
    raise InvalidArgument(function, "straggler_option", option, expected)


def check_tiles(function: str, config: Any, algorithm: str | None = None) -> None:
    """Raise ``InvalidArgument`` unless ``gemm_config`` contains the tile sizes of a GEMM."""
    try:
        config.kwargs["BLOCK_SIZE_K"]
    except (AttributeError, KeyError) as error:
        expected = "a triton.Config" + (f" for algorithm={algorithm!r}" if algorithm else "")
        if isinstance(config, triton.Config):
            missing = {f"BLOCK_SIZE_{axis}" for axis in "MNK"} - set(config.kwargs)
            config, expected = str(config), f"a config that sets {', '.join(sorted(missing))}"
        raise InvalidArgument(function, "gemm_config", config, expected) from error


class OpCall:
    """Checked arguments of one call of an op: a dataclass whose fields are the op's parameters.

    If the op's last parameter is ``validated_key``, the tuner passes the call's key there.
    ``key_fn`` has then already checked the operands, and the call need not check them again.
    """

    chosen_algorithm: Algorithm[
        Any, Any
    ]  # object of the algorithm that the argument ``algorithm`` names

    def run(self) -> torch.Tensor:
        return self.chosen_algorithm.run(self)

    def compile(self) -> None:
        """Compile and load what ``run`` launches."""
        self.chosen_algorithm.compile(self)


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class GEMMCall(OpCall):
    """Base class of calls of GEMM ops, with the parameters that all these ops have."""

    gemm_config: triton.Config | None
    algorithm: str | None
    A_scale: torch.Tensor | None
    B_scale: torch.Tensor | None
    use_fast_accum: bool
    validated_key: Any


def op(
    *,
    algorithms: Algorithms[Any, Any],
    call: Callable[..., Any],
    version: str,
    key_fn: Callable[..., Any] | None = None,
    sizes: Callable[..., Any] | None = None,
    key_sizes: Sequence[str] = (),
    agree_fn: Callable[..., object] = lambda *_, **__: "",
    predict_ms: Callable[[Mapping[str, Any], Any], float] | None = None,
    **settings: Any,
) -> Callable[[Callable[P, R]], tune.AutoTuner[P, R]]:
    """Decorate the function of an op's ``op.py``, whose parameters are the fields of ``call``.

    Records, errors and pickles use the name of the package that contains ``op.py``, so files in the
    package can be renamed.

    Args:
        algorithms: the algorithms to choose from.
        call: builds the ``OpCall`` from the op's arguments.
        version: a new value invalidates the records in the package's folder ``records/``.
        key_fn: argument of ``tune.autotune``; default: the attribute ``key`` of the call.
        sizes: converts the op's arguments to the argument ``sizes`` of ``Algorithm.fits``; default:
            ``key_fn``. All calls of a key must have equal sizes, because they share one winner.
        key_sizes: argument ``sizes`` of ``tune.autotune``.
        predict_ms: returns the predicted milliseconds of a config, from the result of ``sizes``.
        agree_fn, settings: arguments of ``tune.autotune``.
    """
    key_of = key_fn or (lambda *args, **kwargs: call(*args, **kwargs).key)
    sizes_of = sizes or key_of

    def decorate(fn: Any) -> Any:
        signature = inspect.signature(fn)

        def prune(config: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> bool:
            algorithm = algorithms[config["algorithm"]]
            # If the caller passes ``algorithm``, it replaces the algorithm of every config, but the
            # configs still have their own tunables.
            if config.keys() != {"algorithm", *algorithm.tunables}:
                return False
            return algorithm.fits(config, sizes_of(*args, **kwargs))

        def prepare(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            call(**bound.arguments).compile()

        def agree(*args: Any, **kwargs: Any) -> object:
            """Raise at the first call of a key if every candidate would fail with its arguments."""
            arguments = signature.bind_partial(*args, **kwargs).arguments
            if arguments.get("straggler_option") is not None:
                check_straggler(algorithms.function, arguments["straggler_option"])
            op_sizes = sizes_of(*args, **kwargs)
            requested = getattr(op_sizes, "requested_algorithm", None)
            if requested is not None and not any(
                algorithms[requested].fits(config, op_sizes)
                for config in algorithms.config_space()
                if config["algorithm"] == requested
            ):
                keyword = next(
                    name for name in _DEPRECATED_KEYWORDS if arguments.get(name) is not None
                )
                call_of_fn = f"{algorithms.function}.fn(…, algorithm={requested!r})"
                expected = "an algorithm that fits these sizes. To run it anyway, pass "
                expected += f"autotune=False or call {call_of_fn}"
                raise InvalidArgument(algorithms.function, keyword, arguments[keyword], expected)
            return agree_fn(*args, **kwargs)

        def recover(*args: Any, **kwargs: Any) -> None:
            """Reset the context after a candidate failed on some rank. All ranks call this."""
            signature.bind_partial(*args, **kwargs).arguments["ctx"].reset()

        tuner = tuned(
            config_space=algorithms.config_space,
            key_fn=key_of,
            prune_fn=prune,
            prepare_fn=prepare,
            prior_fn=predict_ms and (lambda c, /, *a, **kw: predict_ms(c, sizes_of(*a, **kw))),
            agree_fn=agree,
            recover_fn=recover if "ctx" in signature.parameters else None,
            # Measure in CUDA graphs, as in serving. Host time then does not hide the overlap.
            timing="graph",
            version=version,
            sizes=key_sizes,
            fallback_fn=lambda c: algorithms[c["algorithm"]].is_fallback and c["algorithm"],
            **settings,
        )(fn)
        tuner.overwritten_arguments = ("output", "gathered")
        # Without tuning, omit ``algorithm``: the context's algorithm or the op's default then runs.
        tuner.omitted_if_untuned = ("algorithm",)
        tuner.key_parameter = "validated_key" if "validated_key" in signature.parameters else ""
        return tuner

    return decorate


def tuned(key_fn: KeyFnT, **settings: Any) -> tune.Decorator[KeyFnT]:
    """Decorate a function of an ``op.py`` without algorithms.

    ``key_fn`` and ``settings`` are arguments of ``tune.autotune``.
    """

    def decorate(fn: Any) -> Any:
        # Records then contain the name of the package instead of its op.py, which can be renamed.
        fn.__module__ = fn.__module__.rpartition(".")[0] or fn.__module__
        return tune.autotune(key_fn=key_fn, **settings)(fn)

    return decorate
