"""The first call of a key, from meeting to record. Reads top to bottom.

One law: the leader decides, all agree, nobody infers. Each word of ``ranks`` is said by all ranks
at the same place, whatever happened on one of them before.
"""

from __future__ import annotations

import datetime
import time
import warnings
from dataclasses import dataclass

from triton_dist._tuning.engine.agreement import Arrival, Meeting, Verdict, meet
from triton_dist._tuning.engine.attempt import Attempts
from triton_dist._tuning.engine.parts import Call, Parts, Subject
from triton_dist._tuning.engine.report import Report
from triton_dist._tuning.protocols import Search
from triton_dist._tuning.values import (
    Config,
    Failure,
    Fingerprint,
    Key,
    Pruned,
    Trial,
    TuningRecord,
)
from triton_dist.errors import NoValidConfig, RankDisagreement, TuningWarning


@dataclass(frozen=True)
class Resolution:
    """The config of a key, and how it was come by."""

    config: Config
    record: TuningRecord | None
    """``None``: it is the default, because nothing could be tuned; it is not to be kept."""
    tuned: bool


@dataclass(frozen=True)
class _Plan:
    """What the leader's ``prune_fn`` made of the config space, as digests."""

    kept: tuple[str, ...] = ()
    pruned: tuple[tuple[str, str], ...] = ()
    failure: str | None = None


def resolve(subject: Subject, parts: Parts, call: Call) -> Resolution:
    """The config for ``call``, in this order:

    1. A record that is valid here, on any rank: all use the leader's, else the lowest rank's.
    2. During CUDA-graph capture, the default: the first config, with a warning.
    3. The winner of a tuning by all ranks, which the leader writes down.

    Raises:
        RankDisagreement: ranks came with different functions, keys, config spaces or fingerprints.
        RankTimeout: a rank did not come at all.
        NoValidConfig: nothing was left by ``prune_fn``, or every config failed; on every rank.
    """
    return _FirstCall(subject, parts, call).resolve()


class _FirstCall:
    def __init__(self, subject: Subject, parts: Parts, call: Call) -> None:
        self._subject, self._parts, self._call = subject, parts, call
        self._tolerated = ""

    def resolve(self) -> Resolution:
        subject, parts = self._subject, self._parts
        error, key = self._key()
        if key is None:
            meet(
                parts.ranks,
                Arrival(subject.name, failure=f"{type(error).__name__}: {error}"),
                error,
            )
            raise AssertionError("unreachable: a meeting with a failure raises it")
        fingerprint = parts.fingerprint(subject.function, subject.space)
        own, reason = self._own_record(key, fingerprint)
        meeting = meet(parts.ranks, self._arrival(key, fingerprint, own), None)
        report = Report(parts.verbose and parts.ranks.is_leader, key)

        if meeting.holder is not None:
            record = self._shared_record(meeting, own)
            report.cached(record, parts.store.describe(key), self._tolerated)
            return Resolution(self._config(record.best.digest), record, tuned=False)

        if meeting.capturing:
            if parts.ranks.is_leader:
                warnings.warn(
                    f"{subject.name}, key {key}: not tuned yet, and cannot be during CUDA-graph "
                    "capture; the first config is used. Call it, or its tune(), once before.",
                    TuningWarning,
                    stacklevel=2,
                )
            return Resolution(subject.space[0], None, tuned=False)

        record = self._tune(key, fingerprint, report, reason)
        (parts.store if parts.ranks.is_leader else parts.memory).put(record)
        report.tuned(record, parts.store.describe(key))
        return Resolution(self._config(record.best.digest), record, tuned=True)

    def _key(self) -> tuple[Exception | None, Key | None]:
        value = self._call.key
        if isinstance(value, Exception):
            return value, None
        try:
            return None, Key.of(self._subject.name, value, self._parts.hardware)
        except Exception as error:
            return error, None

    def _own_record(self, key: Key, fingerprint: Fingerprint) -> tuple[TuningRecord | None, str]:
        """This rank's valid record and where it is, or none and why."""
        record = self._parts.store.get(key)
        if record is None:
            return None, "no cached result"
        where = self._parts.store.describe(key)
        differences = list(record.fingerprint.compare(fingerprint))
        reasons = [d.sentence for d in differences if self._parts.strict or not d.patch_level]
        if not reasons and self._subject.space.find(record.best.digest) is None:
            reasons = ["its winner is not in the config space"]
        if reasons:
            return None, f"the cached result in {where} is not valid: {'; '.join(reasons)}"
        self._tolerated = "; ".join(difference.sentence for difference in differences)
        return record, where

    def _arrival(self, key: Key, fingerprint: Fingerprint, own: TuningRecord | None) -> Arrival:
        space, parts = self._subject.space, self._parts
        winner, record = (own.best.digest, own.digest) if own is not None else (None, None)
        return Arrival(
            function=self._subject.name,
            failure=None,
            key=key,
            space=f"{len(space)} configs, digest {space.digest}",
            fingerprint=fingerprint,
            verdict=Verdict(winner, record),
            is_leader=parts.ranks.is_leader,
            always_tune=parts.always_tune,
            capturing=parts.device.is_capturing(),
        )

    def _shared_record(self, meeting: Meeting, own: TuningRecord | None) -> TuningRecord:
        """The holder's record. It is sent only if some rank has none or another one."""
        if meeting.all_hold_it and own is not None:
            return own
        ranks = self._parts.ranks
        offer = own if ranks.rank == meeting.holder else None
        offers = ranks.gather(f"share the record of {self._subject.name}", offer)
        record = next(record for record in offers if record is not None)
        self._parts.memory.put(record)
        return record

    def _tune(
        self, key: Key, fingerprint: Fingerprint, report: Report, reason: str
    ) -> TuningRecord:
        parts, ranks = self._parts, self._parts.ranks
        candidates, pruned = self._candidates(key)
        if self._parts.always_tune:
            reason = "told to tune always"
        search = parts.search(candidates) if ranks.is_leader else None
        attempts = Attempts(self._subject, parts, self._call)
        trials: list[Trial] = []
        begin = time.monotonic()
        with parts.quiet(), report.begin(len(candidates), len(pruned), ranks.size, reason):
            while (config := self._next(search, len(trials), begin)) is not None:
                label = f"{len(trials) + 1}/{len(candidates)}"
                outcome = attempts.attempt(config, f"{self._subject.name} {label} {config}")
                trials.append(Trial.of(config, outcome))
                report.tried(label, config, outcome)
                if search is not None:
                    search.tell(config, outcome)
        trials += [Trial.of(each.config, Failure("pruned", each.reason)) for each in pruned]
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        timestamp, seconds = ranks.decide("end of the tuning", (now, time.monotonic() - begin))
        record = TuningRecord(key, fingerprint, tuple(trials), timestamp, seconds)
        _ = record.best  # raises NoValidConfig, on every rank, before anything is kept
        return record

    def _candidates(self, key: Key) -> tuple[list[Config], list[Pruned]]:
        """What the leader's ``prune_fn`` leaves; the others' is not asked."""
        subject, ranks = self._subject, self._parts.ranks
        failure: Exception | None = None
        plan = _Plan()
        if ranks.is_leader:
            try:
                kept, pruned = subject.space.prune(
                    subject.prune_fn, self._call.args, self._call.kwargs
                )
                plan = _Plan(
                    tuple(config.digest for config in kept),
                    tuple((each.config.digest, each.reason) for each in pruned),
                )
            except Exception as error:
                failure, plan = error, _Plan(failure=f"{type(error).__name__}: {error}")
        decided = ranks.decide(f"candidates of {subject.name}", plan)
        if failure is not None:
            raise failure
        if decided.failure is not None:
            raise RankDisagreement(f"prune_fn of {subject.name}", {0: f"raised {decided.failure}"})
        candidates = [self._config(digest) for digest in decided.kept]
        pruned = [Pruned(self._config(digest), reason) for digest, reason in decided.pruned]
        if not candidates:
            causes = {str(each.config): each.reason for each in pruned}
            raise NoValidConfig(subject.name, key, causes)
        return candidates, pruned

    def _next(self, search: Search | None, tried: int, begin: float) -> Config | None:
        """What the leader wants to try next; ``None`` when it is done, or the budget is."""
        policy = self._parts.policy
        spent = (policy.max_trials is not None and tried >= policy.max_trials) or (
            policy.max_seconds is not None
            and tried > 0
            and time.monotonic() - begin >= policy.max_seconds
        )
        asked = None if search is None or spent else search.ask()
        digest: str = self._parts.ranks.decide(
            f"candidate {tried + 1} of {self._subject.name}", asked.digest if asked else ""
        )
        return self._config(digest) if digest else None

    def _config(self, digest: str) -> Config:
        """The live config; every rank has it, because all have the same space."""
        config = self._subject.space.find(digest)
        if config is None:
            raise LookupError(f"{self._subject.name}: no config of the space has digest {digest}")
        return config
