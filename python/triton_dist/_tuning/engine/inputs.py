"""Inputs of the runs of a tuning: arguments that are restored, or varied between runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from triton_dist._tuning.engine.channel import Channel, Step
from triton_dist._tuning.engine.parts import Call, TunedFunction
from triton_dist._tuning.protocols import RandomState
from triton_dist.errors import InvalidArgument, RankDisagreement


class Restorer:
    """Copies of the tensors in some arguments of a call and of the random state, to restore them.

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
        self._others: list[tuple[str, Any]] = []
        """Tensors of the other arguments, each with the name of the argument."""
        self._versions: list[int | None] = []
        for name, value in _arguments_by_name(function, args, kwargs).items():
            found = list(_tensors(value))
            # ``changed`` checks the tensors that ``restore`` does not cover.
            if name not in names:
                self._others += [(name, tensor) for tensor in found]
            elif not found and value is not None:
                raise InvalidArgument(
                    "autotune", f"restore: argument {name}", value, "a tensor, or tensors"
                )
            else:
                self._tensors += found

    def keep(self) -> None:
        """Copy the tensors, and note the version counters of the other arguments."""
        self._copies = [without_expanded_dimensions(tensor).clone() for tensor in self._tensors]
        self._versions = [_version(tensor) for _, tensor in self._others]

    def restore(self) -> None:
        """Restore the tensors from the copies, and rewind the generators."""
        self._random_state.rewind(numpy=False)
        for tensor, copy in zip(self._tensors, self._copies, strict=False):
            without_expanded_dimensions(tensor).copy_(copy)

    def changed(self) -> list[str]:
        """Return the names of other arguments that were changed in place since ``keep``.

        PyTorch counts its own in-place operations. Writes of Triton kernels are not counted.
        """
        pairs = zip(self._others, self._versions, strict=True)
        return list(dict.fromkeys(name for (name, each), old in pairs if _version(each) != old))


def without_expanded_dimensions(tensor: Any) -> Any:
    """Return a view of ``tensor`` in which each expanded dimension has size 1.

    PyTorch does not write to an expanded tensor, because several of its elements share one address.
    The view is of ``tensor.data``: writes to it do not increase the version counter. Autograd
    therefore accepts a tensor that it saved before the tensor was restored.
    """
    if str(getattr(tensor, "layout", "")) != "torch.strided":
        return tensor  # writes to ``data`` of a sparse tensor do not change the tensor
    found = tensor.data
    for dimension, stride in enumerate(found.stride()):
        if stride == 0 and found.shape[dimension] > 1:
            found = found.narrow(dimension, 0, 1)
    return found


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


def calls_per_sample(
    subject: TunedFunction, call: Call, ranks: Channel, seconds: float
) -> Sequence[Arguments]:
    """Return the calls that one sample averages over, the same number on each rank.

    The first call is ``call``; ``input_variants_fn`` returns the others in at most ``seconds``. All
    ranks call this function.

    Raises:
        InvalidArgument: ``input_variants_fn`` returned something other than arguments of the call.
        RankDisagreement: other ranks have another number of calls, or the function raised there.
    """
    step, failure, input_variants = Step("input_variants_fn"), None, subject.hooks.input_variants
    calls: list[Arguments] = [(call.args, call.kwargs)]
    if input_variants is None:
        return calls
    try:
        with ranks.user_code(step, seconds):
            signature = inspect.signature(subject.function)
            given = signature.bind_partial(*call.args, **call.kwargs).arguments
            variants: object = input_variants(*call.args, **call.kwargs)
            if not isinstance(variants, Iterable):
                expected = "mappings, one per additional call"
                raise InvalidArgument(
                    "autotune", "the result of input_variants_fn", variants, expected
                )
            for others in variants:
                if not isinstance(others, Mapping) or not others.keys() <= given.keys():
                    expected = f"mappings from names of arguments of the call: {', '.join(given)}"
                    raise InvalidArgument(
                        "autotune", "the result of input_variants_fn", others, expected
                    )
                # Order the arguments like the parameters.
                bound = inspect.BoundArguments(signature, {**given, **others})
                calls.append((bound.args, bound.kwargs))
    except Exception as error:
        failure = error
    own = f"{len(calls)} calls" if failure is None else f"{type(failure).__name__}: {failure}"
    results = ranks.all_gather(step, own, seconds)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # the error refers to this frame
    if len(set(results)) > 1:
        by_rank = {ranks.global_rank(rank): each for rank, each in enumerate(results)}
        raise RankDisagreement(f"input_variants_fn of {subject.name}", by_rank)
    return calls
