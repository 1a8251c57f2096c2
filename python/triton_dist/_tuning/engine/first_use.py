"""The first call with a recorded winner: a config that worked once may fail today.

Another build of the driver or compiler may need more shared memory, or refuse a kernel. If the
winner fails in this way on one rank, all ranks have to tune again. So they exchange one message
after this first call; later calls send none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.engine.conversation import Conversation, Situation
from triton_dist._tuning.protocols import RandomState
from triton_dist._tuning.values.show import said
from triton_dist.errors import InvalidArgument, RankDisagreement, TuningTimeout

_logger = logging.getLogger("triton_dist.tuning")
_UNUSABLE = {"OutOfResources", "CompilationError", "PTXASError", "CandidateFailed"}
"""Names of exception classes, since triton is not imported here. Running out of device memory is
not among them: other allocations of the program may be the cause."""
_REFUSALS = (InvalidArgument, RankDisagreement)
"""Errors that name their own cause."""
_FAILED_PASS = "PassManager::run failed"
"""Triton's text, in a plain ``RuntimeError``, for a compiler pass that failed."""


@dataclass(frozen=True)
class FirstUse:
    """The first call of this process with the winner of a record.

    Args:
        ranks: the conversation in which all ranks agreed on the record.
        source: the config and the record that has it, in words.
        remedy: how to tune again.
        votes: every rank calls the function now, and may tune.
        restores: the function changes its arguments, so a rank that ran it cannot repeat it.
        random_state: of the generators before the call.
    """

    ranks: Conversation
    source: str
    remedy: str
    votes: bool
    restores: bool
    random_state: RandomState

    def run(self, call: Callable[[], Any]) -> tuple[Any, str]:
        """Return the result of ``call`` and an empty text. If the config is unusable on some rank,
        return on every rank why, so that all ranks tune again.

        Raises:
            Exception: of ``call``, with a note.
        """
        try:
            result = call()
        except Exception as error:
            why = self._agreed(said(error) if is_unusable(error) else None)
            if why:
                self.random_state.rewind()
                return None, why
            if not isinstance(error, _REFUSALS):
                add_note(error, f"triton_dist: {self.source} was used. {self.remedy}")
            raise
        except BaseException as error:  # the others must not wait for this rank
            self.ranks.leave(error)
            raise
        why = self._agreed("")
        if why:
            self.random_state.rewind()
        return result, why

    def _agreed(self, failure: str | None) -> str:
        """Tell the other ranks how the call ended here. Return why all ranks tune again, or an
        empty text.

        Args:
            failure: empty if the call returned; ``None`` for an exception that no tuning mends.
        """
        if not self.votes:
            return ""
        try:
            failures = self.ranks.gather(Situation("first use of a record"), failure)
        except TuningTimeout:  # the call itself is over, and without that rank nothing is tuned
            return ""
        if None in failures or (self.restores and "" in failures):
            return ""
        for rank, text in enumerate(failures):
            if text:
                return f"{self.source} failed on rank {self.ranks.named(rank)}: {text}"
        return ""


def is_unusable(error: Exception) -> bool:
    """Return whether a config is to blame, which another build of the compiler may have made so."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint(_UNUSABLE) or _FAILED_PASS in said(error)


def add_note(error: Exception, text: str) -> None:
    """Show ``text`` with ``error``. Before Python 3.11, which has notes, make it a part of the
    message, or log it."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}",)
    else:
        _logger.warning("%s", text)
