"""A look at every call of a tuned function, for a region; elsewhere calls are as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from triton_dist._tuning.engine.dispatch import AutoTuner
from triton_dist._warn import called_by_users

Around: TypeAlias = Callable[
    [AutoTuner, tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]
]
"""Makes of a tuned function and the arguments of its function what is entered around the call."""

_OWN = ("autotune", "autotune_verbose", "autotune_pg", "autotune_allow_arg_overwrite")


@contextmanager
def observed(around: Around) -> Iterator[None]:
    """Enter ``around(tuned, args, kwargs)`` for each call of any tuned function of this process.

    The method is replaced for so long, so that a call that nobody looks at costs what it did. What
    torch compiles is not looked at.
    """
    before: Any = AutoTuner.__call__

    def call(self: AutoTuner, /, *args: Any, **kwargs: Any) -> Any:
        if self._is_compiled():
            return before(self, *args, **kwargs)
        with around(self, args, {name: kwargs[name] for name in kwargs if name not in _OWN}):
            return before(self, *args, **kwargs)

    called_by_users([call])
    AutoTuner.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutoTuner.__call__ = before  # type: ignore[method-assign]
