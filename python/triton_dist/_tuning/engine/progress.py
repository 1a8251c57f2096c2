"""Outcomes of the candidates, from this start of the program and from an interrupted one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from triton_dist._tuning.engine.channel import Channel, Step
from triton_dist._tuning.protocols import Journal
from triton_dist._tuning.values import (
    Config,
    Failure,
    Fingerprint,
    JournalEntry,
    Key,
    Outcome,
    Request,
    Trial,
    TuningRecord,
    codec,
)
from triton_dist._tuning.values.outcome import TimesByRank, merge_outcomes
from triton_dist.errors import RankTimeout


def journal_head(key: Key, fingerprint: Fingerprint, candidates: codec.Tree) -> codec.Tree:
    """Return the data that must be equal to resume an interrupted tuning."""
    return {
        "function": key.function,
        "key": key.text,
        "hardware_group": key.hardware,
        "fingerprint": codec.digest(vars(fingerprint)),
        "candidates": candidates,
    }


def head_of(candidates: Sequence[Config]) -> codec.Tree:
    """Return a short tree that identifies a list of candidates."""
    digests = [config.digest for config in candidates]
    return {"number": len(digests), "digest": codec.digest(digests)}


class Progress:
    """Outcomes by config, and the journal that keeps them for the next start.

    The search is deterministic, so a resumed search repeats the requests of the interrupted one.
    While the journal has the outcome of a request, nothing is measured.

    Args:
        head: the data that must match to resume; a journal with another head is discarded.
        own: this rank's record that the tuning replaces, if there is one.

    Attributes:
        requests: number of answered requests.
    """

    def __init__(
        self, journal: Journal, head: codec.Tree, own: TuningRecord | None, ranks: Channel
    ) -> None:
        self._journal, self._ranks = journal, ranks
        self._head = head
        # Ranks on other hosts may have their own cache folders.
        self._stuck: dict[str, Failure] = {}
        for stuck in ranks.all_gather(Step("quarantine"), dict(journal.quarantined(head))):
            self._stuck = {**stuck, **self._stuck}
        self._entries: list[JournalEntry] = []
        if ranks.is_leader:
            self._entries = list(journal.begin(head, own.digest if own is not None else None))
        self.requests = 0
        self._outcomes: dict[Config, Outcome] = {}
        self._by_rank: dict[str, list[list[float]]] = {}
        self._seconds, self._begin = 0.0, time.monotonic()

    @property
    def tried(self) -> int:
        """Number of configs that have an outcome."""
        return len(self._outcomes)

    def has(self, config: Config) -> bool:
        return config in self._outcomes

    @property
    def seconds(self) -> float:
        """Duration of the tuning in seconds, including earlier starts."""
        return self._seconds + time.monotonic() - self._begin

    def known(self, request: Request) -> Outcome | None:
        """On the leader, return the outcome of ``request`` if it is already known."""
        digest = request.config.digest
        if self.requests < len(self._entries):
            entry = self._entries[self.requests]
            if (entry.config, entry.samples) == (digest, request.samples):
                self._seconds, self._begin = entry.seconds, time.monotonic()
                return entry.outcome
            # The search differs from the interrupted one: discard the remaining entries.
            del self._entries[self.requests :]
        return self._stuck.get(digest)

    def quarantine(self, config: Config, failure: Failure) -> None:
        """Exclude ``config`` from the next start. Any rank and any thread may call this."""
        self._journal.quarantine(self._head, config.digest, failure)

    @contextmanager
    def trying(self, config: Config) -> Iterator[None]:
        """Context manager in which ``config`` may end the process of any rank."""
        if not self._ranks.is_leader or self.has(config):
            yield
            return
        self._journal.trying(config.digest)
        try:
            yield
        except RankTimeout:
            raise
        except BaseException:
            self._journal.ended_otherwise(config.digest)
            raise

    def learn(
        self, request: Request, outcome: Outcome, by_rank: Sequence[Sequence[float]] = ()
    ) -> Outcome:
        """Write the outcome to the journal, before the next request is broadcast.

        Return the merged outcome of all requests for the config. ``by_rank`` has each rank's
        samples.
        """
        config, digest, n = request.config, request.config.digest, self.requests
        own = self._by_rank.setdefault(digest, [[] for _ in by_rank]) if by_rank else []
        for known, new in zip(own, by_rank, strict=True):
            known += new
        if self._ranks.is_leader and n >= len(self._entries):
            self._journal.append(JournalEntry(n, digest, request.samples, outcome, self.seconds))
        self.requests += 1
        self._outcomes[config] = merge_outcomes(self._outcomes.get(config), outcome)
        return self._outcomes[config]

    def by_rank(self) -> dict[str, TimesByRank]:
        """Return the times of each rank, if there are several ranks.

        Configs that lost the race early, with fewer than half of the most samples, are left out.
        """
        several = {digest: own for digest, own in self._by_rank.items() if len(own) > 1}
        most = max((len(own[0]) for own in several.values()), default=0)
        return {
            digest: TimesByRank.of(own)
            for digest, own in several.items()
            if 2 * len(own[0]) >= most > 0
        }

    def trials(self, place: Callable[[Config], int]) -> list[Trial]:
        """Return the trials in the order of the space, independent of the search."""
        return [Trial.of(each, self._outcomes[each]) for each in sorted(self._outcomes, key=place)]
