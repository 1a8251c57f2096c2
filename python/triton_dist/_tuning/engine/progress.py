"""Collect the outcomes of a tuning, including outcomes of an interrupted tuning in the journal."""

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
from triton_dist._tuning.values.outcome import RankTimes, merge_outcomes
from triton_dist.errors import RankTimeout


def journal_header(key: Key, fingerprint: Fingerprint, candidates: codec.Tree) -> codec.Tree:
    """Return the data that identifies a tuning. A tuning is resumed only with equal data."""
    return {
        "function": key.function,
        "key": key.text,
        "hardware_group": key.hardware,
        "fingerprint": codec.digest(vars(fingerprint)),
        "candidates": candidates,
    }


def candidates_id(candidates: Sequence[Config]) -> codec.Tree:
    """Return a short tree that identifies a list of candidates."""
    digests = [config.digest for config in candidates]
    return {"number": len(digests), "digest": codec.digest(digests)}


class Progress:
    """The outcomes of one tuning, and the journal that stores them for the next start.

    The search is deterministic, so a resumed search repeats the requests of the interrupted search.
    If the journal has the outcome of a request, nothing is measured.

    Args:
        header: the data that identifies the tuning. A journal with another header is discarded.
        replaced_record: the record of this rank that the new record will replace, if any.

    Attributes:
        num_requests: number of answered requests.
    """

    def __init__(
        self,
        journal: Journal,
        header: codec.Tree,
        replaced_record: TuningRecord | None,
        ranks: Channel,
    ) -> None:
        self._journal, self._ranks = journal, ranks
        self._header = header
        # Merge the quarantined configs of all ranks, which may have separate cache folders.
        self._quarantined: dict[str, Failure] = {}
        for quarantined in ranks.all_gather(Step("quarantine"), dict(journal.quarantined(header))):
            self._quarantined = {**quarantined, **self._quarantined}
        self._entries: list[JournalEntry] = []
        if ranks.is_leader:
            self._entries = list(
                journal.begin(
                    header, replaced_record.digest if replaced_record is not None else None
                )
            )
        self.num_requests = 0
        self._outcomes: dict[Config, Outcome] = {}
        self._samples_by_rank: dict[str, list[list[float]]] = {}
        self._seconds, self._start_seconds = 0.0, time.monotonic()

    @property
    def num_tried(self) -> int:
        """Number of configs that have an outcome."""
        return len(self._outcomes)

    def has_outcome(self, config: Config) -> bool:
        return config in self._outcomes

    @property
    def seconds(self) -> float:
        """Duration of the tuning in seconds, including earlier starts of the program."""
        return self._seconds + time.monotonic() - self._start_seconds

    def known_outcome(self, request: Request) -> Outcome | None:
        """On the leader, return the outcome of ``request`` if the journal has it.

        For a quarantined config, return its failure.
        """
        digest = request.config.digest
        if self.num_requests < len(self._entries):
            entry = self._entries[self.num_requests]
            if (entry.config_digest, entry.num_samples) == (digest, request.num_samples):
                self._seconds, self._start_seconds = entry.seconds, time.monotonic()
                return entry.outcome
            # The search differs from the interrupted search: discard the remaining entries.
            del self._entries[self.num_requests :]
        return self._quarantined.get(digest)

    def quarantine(self, config: Config, failure: Failure) -> None:
        """Exclude ``config`` at the next start. Any rank and any thread may call this method."""
        self._journal.quarantine(self._header, config.digest, failure)

    @contextmanager
    def trying(self, config: Config) -> Iterator[None]:
        """Context manager in which ``config`` runs and may crash the process of any rank."""
        if not self._ranks.is_leader or self.has_outcome(config):
            yield
            return
        self._journal.trying(config.digest)
        try:
            yield
        except RankTimeout:
            raise
        except BaseException:
            self._journal.ended_by_exception(config.digest)
            raise

    def store_outcome(
        self, request: Request, outcome: Outcome, by_rank: Sequence[Sequence[float]] = ()
    ) -> Outcome:
        """Store the outcome of ``request``, and write it to the journal.

        Return the merged outcome of all requests for the config. ``by_rank`` has the samples of
        each rank.
        """
        config, digest, n = request.config, request.config.digest, self.num_requests
        earlier = self._samples_by_rank.setdefault(digest, [[] for _ in by_rank]) if by_rank else []
        for samples, new_samples in zip(earlier, by_rank, strict=True):
            samples += new_samples
        if self._ranks.is_leader and n >= len(self._entries):
            self._journal.append(
                JournalEntry(n, digest, request.num_samples, outcome, self.seconds)
            )
        self.num_requests += 1
        self._outcomes[config] = merge_outcomes(self._outcomes.get(config), outcome)
        return self._outcomes[config]

    def times_by_rank(self) -> dict[str, RankTimes]:
        """Return the times of each rank, by digest of the config; empty if there is one rank.

        Configs with fewer than half as many samples as the config with the most are left out.
        """
        by_rank = {digest: each for digest, each in self._samples_by_rank.items() if len(each) > 1}
        max_samples = max((len(each[0]) for each in by_rank.values()), default=0)
        return {
            digest: RankTimes.of(each)
            for digest, each in by_rank.items()
            if 2 * len(each[0]) >= max_samples > 0
        }

    def trials(self, index_of: Callable[[Config], int]) -> list[Trial]:
        """Return the trials in the order of the config space, whatever the order of requests."""
        configs = sorted(self._outcomes, key=index_of)
        return [Trial.of(config, self._outcomes[config]) for config in configs]
