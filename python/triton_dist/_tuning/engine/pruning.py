"""The user's ``prune_fn``, asked about the config space for one call: on this rank, and once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triton_dist._tuning.engine.conversation import Conversation, Situation
from triton_dist._tuning.engine.parts import Call, Subject
from triton_dist._tuning.values import Candidates, Config, Pruned, Unlisted
from triton_dist._tuning.values.show import said


class Answer(NamedTuple):
    """The configs that may be used, and the others with the reason; both empty after a failure."""

    kept: Candidates = ()
    dropped: Sequence[Pruned] = ()
    failure: Exception | None = None
    """Raised by ``prune_fn``, or a ``TimeoutError``."""

    @property
    def listed(self) -> Sequence[Config]:
        """The same, of a space that is listed, as that of a function with sizes is."""
        if isinstance(self.kept, Unlisted):
            raise TypeError(f"a space of {len(self.kept)} combinations is not listed")
        return self.kept

    @property
    def raised(self) -> str:
        """The failure in words; empty if there is none."""
        error = self.failure
        return "" if error is None else f"prune_fn raised {said(error)}"


class Pruning:
    """Asks about ``call``, when the answer is first looked at."""

    def __init__(self, subject: Subject, call: Call, ranks: Conversation) -> None:
        self._subject, self._call, self._ranks = subject, call, ranks
        self._answer: Answer | None = None

    def forget(self) -> None:
        """Drop the answer, whose failure holds frames that hold this."""
        self._answer = None

    @property
    def answer(self) -> Answer:
        """Do not keep it in a local variable: its failure holds the frame of the first caller."""
        if self._answer is None:
            self._answer = self._ask()
        return self._answer

    def _ask(self) -> Answer:
        subject, call = self._subject, self._call
        try:
            with self._ranks.user_code(Situation("prune_fn")) as watch:
                watch.begin()
                return Answer(*subject.space.prune(subject.prune_fn, call.args, call.kwargs))
        except Exception as error:
            return Answer(failure=error)
