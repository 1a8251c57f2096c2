"""State that the tuned function changes: as it was before each run of a tuning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from triton_dist._tuning.protocols import RandomState
from triton_dist.errors import InvalidArgument


class Restorer:
    """The tensors among some arguments of one call, and the random number generators.

    Args:
        random_state: of the generators before the call.
        function: the tuned function; its signature says which argument is which.
        names: of the arguments; each a tensor, or tuples, lists and dicts of tensors.

    Raises:
        InvalidArgument: the call has no such argument, or it holds no tensor.
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
        if not names:
            return
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
        bound.apply_defaults()
        for name in names:
            value = bound.arguments.get(name)
            found = list(_tensors(value))
            if not found and value is not None:
                raise InvalidArgument(
                    "autotune", f"restore: argument {name}", value, "a tensor, or tensors"
                )
            self._tensors += found

    def keep(self) -> None:
        """Remember the tensors as they are now."""
        self._copies = [tensor.clone() for tensor in self._tensors]

    def restore(self) -> None:
        """Make the tensors what they were when they were kept, and rewind the generators."""
        self._random_state.rewind(numpy=False)
        for tensor, copy in zip(self._tensors, self._copies, strict=False):
            tensor.copy_(copy)


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif hasattr(value, "clone") and hasattr(value, "copy_"):
        yield value
