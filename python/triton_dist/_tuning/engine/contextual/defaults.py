"""A call in which nothing may be tuned: each kernel runs with its first config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton_dist._tuning.engine.contextual.interception import Interception
from triton_dist._tuning.engine.contextual.launch import Launch, Undo
from triton_dist._tuning.protocols import RandomState


class Defaults:
    """In place of a session. Nothing is looked up, measured or kept."""

    calls = 1
    random_state: RandomState | None = None

    def __init__(self, interception: Interception) -> None:
        self._interception = interception

    def __enter__(self) -> Defaults:
        self._interception.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._interception.end(self)

    def launch(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Launch(tuner, args, kwargs, Undo()).known(tuner.configs[0])

    def run(self, call: Callable[[], Any]) -> Any:
        return call()

    def has_drawn(self) -> bool:
        return False

    def end_call(self) -> bool:
        return True

    def fail_call(self, error: Exception) -> None:
        pass
