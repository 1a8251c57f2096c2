"""The calls that a sample is the mean of.

How long a call takes may depend on values in its tensors: where experts of tokens fill tiles, one
batch ends with an idle wave of one config alone, and the next of another. With a ``vary_fn`` each
sample is of several calls: the one that is tuned for, and as likely ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from triton_dist._tuning.engine.conversation import Conversation, Situation
from triton_dist._tuning.engine.parts import Call, Subject
from triton_dist.errors import InvalidArgument, RankDisagreement

Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]


def sampled_calls(
    subject: Subject, call: Call, ranks: Conversation, seconds: float
) -> Sequence[Arguments]:
    """Arguments of the calls, as many on each rank; the first are those of ``call``. Collective,
    where there is a ``vary_fn``, which may take so many ``seconds``.

    Raises:
        InvalidArgument: what ``vary_fn`` returned are no arguments of the call.
        RankDisagreement: other ranks have more or fewer, or it raised there.
        Exception: of ``vary_fn``.
    """
    if subject.hooks.vary is None:
        return [(call.args, call.kwargs)]
    at, failure = Situation("vary_fn"), None
    calls: Sequence[Arguments] = ()
    try:
        with ranks.user_code(at, seconds) as watch:
            watch.begin()
            calls = _calls(subject, call)
    except Exception as error:
        failure = error
    own = f"{len(calls)} calls" if failure is None else f"{type(failure).__name__}: {failure}"
    said = ranks.gather(at, own, seconds)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # the error holds this frame
    if len(set(said)) > 1:
        by_rank = {ranks.named(rank): each for rank, each in enumerate(said)}
        raise RankDisagreement(f"vary_fn of {subject.name}", by_rank)
    return calls


def _calls(subject: Subject, call: Call) -> Sequence[Arguments]:
    assert subject.hooks.vary is not None
    signature = inspect.signature(subject.function)
    given = signature.bind_partial(*call.args, **call.kwargs).arguments
    calls: list[Arguments] = [(call.args, call.kwargs)]
    varied: object = subject.hooks.vary(*call.args, **call.kwargs)
    if not isinstance(varied, Iterable):
        expected = "mappings, one for each other call"
        raise InvalidArgument("autotune", "the result of vary_fn", varied, expected)
    for others in varied:
        if not isinstance(others, Mapping) or not others.keys() <= given.keys():
            expected = f"mappings from names of arguments of the call: {', '.join(given)}"
            raise InvalidArgument("autotune", "the result of vary_fn", others, expected)
        # In the order of the parameters, as ``given`` is.
        bound = inspect.BoundArguments(signature, {**given, **others})
        calls.append((bound.args, bound.kwargs))
    return calls
