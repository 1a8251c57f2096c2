"""Prepare the arguments of the runs of a tuning: restore changed tensors, and vary inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from triton_dist._tuning.engine.channel import Channel, Step
from triton_dist._tuning.engine.components import Call, TunedFunction
from triton_dist._tuning.protocols import RandomState
from triton_dist.errors import InvalidArgument, RankDisagreement


class Restorer:
    """Saved tensors of some arguments of a call, and the random state, to restore before each run.

    Args:
        function: the tuned function. Its signature maps values to argument names.
        names: arguments to restore: tensors, or tuples, lists and dicts of tensors.
        random_state: the state of the generators before the call.

    Raises:
        InvalidArgument: an argument in ``names`` contains no tensor.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        names: Sequence[str],
        args: Any,
        kwargs: Any,
        random_state: RandomState,
    ) -> None:
        self._random_state = random_state
        self._tensors: list[Any] = []
        self._copies: list[Any] = []
        self._unrestored: list[tuple[str, Any]] = []
        """Tensors of the other arguments, each with the name of the argument."""
        self._versions: list[int | None] = []
        for name, value in _arguments_by_name(function, args, kwargs).items():
            tensors = list(_tensors(value))
            # ``changed_arguments`` checks the tensors that are not restored.
            if name not in names:
                self._unrestored += [(name, tensor) for tensor in tensors]
            elif not tensors and value is not None:
                raise InvalidArgument(
                    "autotune", f"restore: argument {name}", value, "a tensor, or tensors"
                )
            else:
                self._tensors += tensors

    def save(self) -> None:
        """Copy the tensors to restore, and store the version counters of the other tensors."""
        self._copies = [without_expanded_dimensions(tensor).clone() for tensor in self._tensors]
        self._versions = [_version(tensor) for _, tensor in self._unrestored]

    def restore(self) -> None:
        """Restore the tensors from the copies, and rewind the generators."""
        self._random_state.rewind(numpy=False)
        for tensor, copy in zip(self._tensors, self._copies, strict=False):
            without_expanded_dimensions(tensor).copy_(copy)

    def changed_arguments(self) -> list[str]:
        """Return the names of arguments changed in place since ``save`` and not restored.

        Version counters count PyTorch's in-place operations, but no writes of Triton kernels.
        """
        pairs = zip(self._unrestored, self._versions, strict=True)
        return list(dict.fromkeys(name for (name, each), old in pairs if _version(each) != old))


def without_expanded_dimensions(tensor: Any) -> Any:
    """Return a view of ``tensor`` in which each expanded dimension has size 1.

    PyTorch does not write to an expanded tensor, because several of its elements share one address.
    The view is of ``tensor.data``: writes to it do not increase the version counter. Autograd
    therefore accepts a tensor that it saved before the tensor was restored.
    """
    if str(getattr(tensor, "layout", "")) != "torch.strided":
        return tensor  # writes to ``data`` of a sparse tensor do not change the tensor
    view = tensor.data
    for dimension, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dimension] > 1:
            view = view.narrow(dimension, 0, 1)
    return view


def _arguments_by_name(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name; empty for a builtin without a signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return {}
    bound = signature.bind_partial(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name)
    return arguments


def _version(tensor: Any) -> int | None:
    with suppress(AttributeError, RuntimeError):  # an inference tensor has no version counter
        return int(tensor._version)
    return None


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif hasattr(value, "clone") and hasattr(value, "copy_"):
        yield value


Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]


def calls_of_sample(
    tuned_fn: TunedFunction, call: Call, ranks: Channel, seconds: float
) -> Sequence[Arguments]:
    """Return the calls that are run for one sample. Their number is equal on all ranks.

    The first is ``call``. For each further call, ``input_variants_fn`` returns other arguments. It
    may take ``seconds``. All ranks must call this function.

    Raises:
        InvalidArgument: ``input_variants_fn`` returned something other than arguments of the call.
        RankDisagreement: another rank has another number of calls, or ``input_variants_fn`` raised
            there.
    """
    step, failure, input_variants = Step("input_variants_fn"), None, tuned_fn.hooks.input_variants
    calls: list[Arguments] = [(call.args, call.kwargs)]
    if input_variants is None:
        return calls
    try:
        with ranks.user_code(step, seconds):
            signature = inspect.signature(tuned_fn.function)
            arguments = signature.bind_partial(*call.args, **call.kwargs).arguments
            variants: object = input_variants(*call.args, **call.kwargs)
            if not isinstance(variants, Iterable):
                expected = "mappings, one per additional call"
                raise InvalidArgument(
                    "autotune", "the result of input_variants_fn", variants, expected
                )
            for variant in variants:
                if not isinstance(variant, Mapping) or not variant.keys() <= arguments.keys():
                    names = ", ".join(arguments)
                    expected = f"mappings from names of arguments of the call: {names}"
                    raise InvalidArgument(
                        "autotune", "the result of input_variants_fn", variant, expected
                    )
                # Order the arguments like the parameters.
                bound = inspect.BoundArguments(signature, {**arguments, **variant})
                calls.append((bound.args, bound.kwargs))
    except Exception as error:
        failure = error
    result = f"{len(calls)} calls" if failure is None else f"{type(failure).__name__}: {failure}"
    results = ranks.all_gather(step, result, seconds)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # the error refers to this frame
    if len(set(results)) > 1:
        by_rank = {ranks.global_rank(rank): each for rank, each in enumerate(results)}
        raise RankDisagreement(f"input_variants_fn of {tuned_fn.name}", by_rank)
    return calls
