"""What the ranks say to one another during one tuning.

A rank that does not come is a :class:`TuningTimeout` on every rank that waits for it: it names the
phase, the config and the rank. If nothing else explains its absence it is stuck, in the config that
is being tried, and the config is quarantined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from triton_dist._tuning.engine.clock import Clock
from triton_dist._tuning.engine.watchdog import Watch, watchdog
from triton_dist._tuning.protocols import RankGroup
from triton_dist._tuning.values import Config, Failure
from triton_dist.errors import RankDisagreement, RankTimeout, TuningTimeout

T = TypeVar("T")


class Conversation:
    """Words of ``ranks``.

    Attributes:
        config: what is being tried; in the message when a rank does not come.
        clock: where the time went.
        has_met: whether all ranks have come to the first word.
        remark: what this rank knows that may explain it, such as its own failure.
        quarantine: called with a config that must not be tried again.
        lost: the error that ended the conversation. Whoever catches exceptions of the user's
            function must let it pass: no vote can be held any more.
    """

    def __init__(
        self,
        ranks: RankGroup,
        function: str,
        seconds: float,
        grace: float,
        key: str = "",
        call: int = 0,
    ) -> None:
        self._ranks = ranks.converse(function, key, call)
        self.has_met = False
        self._is_nested = watchdog.is_inside()
        self._function = function
        self._seconds, self._grace = seconds, grace
        self.rank, self.size, self.is_leader = ranks.rank, ranks.size, ranks.is_leader
        self.config: Config | None = None
        self.remark = ""
        self.clock = Clock()
        self.quarantine: Callable[[Config, Failure], object] = lambda config, failure: None
        self.lost: Exception | None = None

    def named(self, rank: int) -> int:
        """The rank of the world, for messages, errors and records."""
        return self._ranks.named(rank)

    def meet(self, phase: str, value: T) -> list[T]:
        """``gather``, as the first word. Inside the trial of another function it waits no longer
        than a step may take: there the others can say, at the end of the step, that they failed.

        Raises:
            RankDisagreement: the call of some rank was refused.
        """
        limit = self._seconds if self._is_nested else None
        values = self._say(phase, lambda: self._ranks.meet(self._full(phase), value, limit))
        self.has_met = True
        return values

    def decide(self, phase: str, value: T | None, after: float = 0.0) -> T:
        """``after``: how long the leader's own code or the user's may take before that."""
        limit = self._limit(after)
        return self._say(phase, lambda: self._ranks.decide(self._full(phase), value, limit))

    def gather(self, phase: str, value: T, after: float = 0.0) -> list[T]:
        """``after``: how long the user's code may run on other ranks before they come here."""
        limit = self._limit(after)
        return self._say(phase, lambda: self._ranks.gather(self._full(phase), value, limit))

    def align(self, phase: str, hold: Callable[[], object]) -> None:
        limit = self._limit(self._seconds)
        self._say(phase, lambda: self._ranks.align(self._full(phase), limit, hold))

    def leave(self, error: BaseException) -> None:
        """Spare the others the wait for this rank, which goes away because of ``error``."""
        said = error.summary if isinstance(error, TuningTimeout) else error
        text = f"{type(error).__name__}: {said}"
        told = isinstance(error, (RankTimeout, RankDisagreement))
        refused = not self.has_met and isinstance(error, Exception) and not told
        with suppress(RankTimeout):
            self._ranks.leave(text if len(text) <= 500 else f"{text[:500]} ...", refused)

    @contextmanager
    def user_code(self, phase: str, seconds: float | None = None) -> Iterator[Watch]:
        """Within, the user's code may run, each time for ``seconds`` at most.

        Raises:
            TimeoutError: it took longer, but came back before the process was ended.
        """
        limit = self._seconds if seconds is None else seconds
        stuck = functools.partial(self.stuck, phase, limit, "is stuck in the user's code")
        with watchdog.watching(limit, self._grace, stuck, self.leave) as watch:
            yield watch
        if watch.overdue:
            raise TimeoutError(f"{phase} took longer than {limit:g} s")

    def accused(self) -> Config | None:
        """What is to blame if a rank is stuck now."""
        return self.config

    def stuck(self, phase: str, seconds: float, how: str) -> TuningTimeout:
        """This rank is, in ``phase``; what is to blame will not be tried again."""
        config = self.accused()
        own = self.named(self.rank)
        error = self._timeout(phase, config, [own], seconds, {own: how})
        if config is not None:
            self.quarantine(config, Failure("timeout", error.summary, int(own)))
        return error

    def _say(self, phase: str, word: Callable[[], T]) -> T:
        try:
            with self.clock.phase("agree"):
                return word()
        except RankTimeout as late:
            if late.refusals:
                here = {self.named(r) for r in range(self.size)} - set(late.missing)
                by_rank = {**dict.fromkeys(here, "valid"), **late.refusals}
                what = f"the arguments of {self._function}"
                self.lost = RankDisagreement(what, dict(sorted(by_rank.items())))
                raise self.lost from None
            config = self.accused()
            error = self._timeout(phase, config, late.missing, late.seconds, late.because)
            if config is not None and late.missing and not late.because:
                self.quarantine(config, Failure("timeout", error.summary, int(late.missing[0])))
            self.lost = error
            raise error from None
        except RankDisagreement as error:
            self.lost = error
            raise

    def _timeout(
        self,
        phase: str,
        config: Config | None,
        missing: Sequence[int],
        seconds: float,
        because: Mapping[int, str],
    ) -> TuningTimeout:
        return TuningTimeout(
            rank=self.named(self.rank),
            function=self._function,
            phase=phase,
            config=config,
            missing=missing,
            seconds=seconds,
            because=because,
            remark=self.remark,
            is_meeting=not self.has_met and config is None,
        )

    def _full(self, phase: str) -> str:
        config = "" if self.config is None else f" {self.config}"
        return f"{phase}{config}"

    def _limit(self, after: float) -> float:
        """A rank whose device was waited for in vain comes late, to say so: not too late."""
        return after + self._grace if after else self._seconds
