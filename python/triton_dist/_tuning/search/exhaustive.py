"""Every candidate once, in the order of the space."""

from __future__ import annotations

from collections.abc import Sequence

from triton_dist._tuning.values import Config, Outcome, Policy, Request


class Exhaustive:
    """The search that cannot miss the best config and needs no outcome to go on."""

    runs_user_code = False

    def __init__(
        self, candidates: Sequence[Config], policy: Policy, incumbent: Config | None = None
    ) -> None:
        """``incumbent``, if a candidate, is tried like any other."""
        self._ahead: Sequence[Config] = candidates[: policy.max_trials]
        self._remaining = iter([Request(config, policy.repeat) for config in self._ahead])

    def ask(self) -> Request | None:
        return next(self._remaining, None)

    def ahead(self) -> Sequence[Config]:
        named, self._ahead = self._ahead, ()
        return named

    def tell(self, request: Request, outcome: Outcome) -> None:
        """Nothing to learn."""
