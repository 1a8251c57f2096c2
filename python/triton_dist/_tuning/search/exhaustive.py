"""Every candidate once, in the order of the space."""

from __future__ import annotations

from collections.abc import Sequence

from triton_dist._tuning.values import Config, Outcome


class Exhaustive:
    """The search that cannot miss the best config and needs no outcome to go on."""

    def __init__(self, candidates: Sequence[Config]) -> None:
        self._remaining = iter(candidates)

    def ask(self) -> Config | None:
        return next(self._remaining, None)

    def tell(self, config: Config, outcome: Outcome) -> None:
        """Nothing to learn."""
