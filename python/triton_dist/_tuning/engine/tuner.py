"""The first call of a key, from meeting to record. Reads top to bottom.

One law: the leader decides, all agree, nobody infers. Each message of ``ranks`` is sent by all
ranks at the same place, whatever happened on one of them before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TypeAlias

from triton_dist._tuning.engine.agreement import Arrival, Meeting, OwnRecord, Restless, own_record
from triton_dist._tuning.engine.candidates import Field, Pruning, Transfer, field_of
from triton_dist._tuning.engine.channel import Conversation, Situation, timestamp
from triton_dist._tuning.engine.choice import FirstUse, Resolution
from triton_dist._tuning.engine.compile_ahead import CompileAhead
from triton_dist._tuning.engine.inputs import Restorer, sampled_calls
from triton_dist._tuning.engine.parts import Call, Parts, Subject
from triton_dist._tuning.engine.progress import Progress, journal_head
from triton_dist._tuning.engine.report import Report
from triton_dist._tuning.engine.trial import Attempts
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.protocols import RandomState, Search
from triton_dist._tuning.values import (
    Config,
    Fingerprint,
    Key,
    Measurement,
    Outcome,
    Request,
    StoredRecord,
    TuningRecord,
    Unlisted,
    Validity,
    validity,
)
from triton_dist.errors import (
    CaptureInProgress,
    NoValidConfig,
    TuningFrozen,
)

_Wanted: TypeAlias = "tuple[int | None, int, Outcome | None, tuple[int, ...]]"
"""A request, with its config and those to be compiled ahead by place; ``None``: it is over."""


def resolve(subject: Subject, parts: Parts, call: Call) -> Resolution:
    """The config for ``call``, in this order:

    1. A record that is valid here, on any rank: all use the leader's, else the lowest rank's;
       shipped ones only if no rank has one of its own.
    2. Where tuning is forbidden, or during CUDA-graph capture, what the leader's records of
       neighbouring sizes predict; an error if its ``prune_fn`` raises.
    3. Where tuning is forbidden, none: an error, in a capture too, since a graph would keep the
       default for good.
    4. During CUDA-graph capture, the default: the first config.
    5. The winner of a tuning by all ranks, which the leader writes down: of the few configs that
       are near the best at neighbouring sizes, if there are such, else of all.

    Raises:
        TuningFrozen: tuning is forbidden on some rank; on every rank.
        CaptureInProgress: the leader's ``prune_fn``, ``safe_fn`` or ``waves_fn`` raised during a
            capture; on every rank.
        RankDisagreement: ranks came with different functions, keys, config spaces or fingerprints.
        TuningTimeout: a rank did not come to some step; on every rank that is there.
        NoValidConfig: nothing was left by ``prune_fn``, or every config failed; on every rank.
    """
    # What a first call draws, in trials or hooks, a later call does not: the numbers that a program
    # computes must not depend on whether it tuned.
    random_state = parts.random_state((call.args, call.kwargs))
    first = _FirstCall(subject, parts, call, random_state)
    try:
        with watchdog.paused():
            return first.resolve()
    except BaseException as error:  # an interrupt too: the others must not wait for this rank
        first.ranks.leave(error)
        raise
    finally:
        first.end()
        random_state.rewind()


def _hint(call: Call) -> str:
    """Words on why others may not come to a first call: theirs need no message."""
    known = ", ".join(f"{key!r:.200}" for key in call.agreed[-3:])
    beside = (
        f", which is new, and {len(call.agreed)} key(s) are known, such as {known}: a rank that "
        "calls it with one of those does not come. See that all ranks come with the same sizes, "
        "and that clear() was called on all or none"
    )
    return f"The key of this rank is {call.key!r:.200}{beside if known else ''}."


class _FirstCall:
    def __init__(
        self, subject: Subject, parts: Parts, call: Call, random_state: RandomState
    ) -> None:
        self._subject, self._parts, self._call = subject, parts, call
        self._random_state = random_state
        self._changed: tuple[str, ...] = ()
        self.ranks = self._ranks = Conversation(
            parts.ranks,
            subject.name,
            parts.settings.seconds,
            parts.settings.grace,
            key=f"{call.key!r:.200}",
            call=call.number,
            hint=_hint(call),
        )
        self._incumbent: Config | None = None
        self._restless = Restless(subject.name)
        self._pruning = Pruning(subject, call, self.ranks)
        self._transfer = Transfer(parts, subject, call, self.ranks, self._pruning)

    def end(self) -> None:
        """Drop the errors that were met: each holds frames of this call, and with them this."""
        self._ranks.end()
        self._pruning.forget()
        self._transfer.cause = None

    def resolve(self) -> Resolution:
        subject, parts = self._subject, self._parts
        key = Key.of(subject.origin, self._call.key, parts.hardware)
        fingerprint = parts.fingerprint(subject.function, subject.space)
        stored = parts.store.find(key.under(fingerprint))
        own = own_record(stored, lambda record: self._judge(record, fingerprint))
        meeting = self._meet(key, fingerprint, own)
        key = key.under(meeting.fingerprint)
        report = Report(parts, key, self._ranks.clock)

        if meeting.holder is not None:
            record = self._shared_record(meeting, own.record)
            holder = self._ranks.named(meeting.holder)
            where = own.where if record is own.record else f"the cache of rank {holder}"
            self._restless.is_used(record)
            report.cached(record, where, own.tolerated)
            found = self._resolution(key, meeting.fingerprint, record, tuned=False)
            return replace(found, first_use=self._first_use(found.config, where, meeting))

        if meeting.frozen or meeting.capturing:
            predicted, failure = self._transfer.predicted(key, meeting.fingerprint)
            if failure:
                why = f"{own.where}; {failure}"
                raise self._cannot(key, meeting, why) from self._transfer.cause
            if predicted is not None:
                report.cached(predicted, "records of other sizes", "")
                config = self._winner(predicted)
                return Resolution(config, predicted, tuned=False, kept=not meeting.capturing)

        if meeting.frozen:
            raise self._cannot(key, meeting, own.where)
        if meeting.capturing:
            return Resolution(subject.space.default, None, tuned=False)

        record, where = self._tune(key, meeting.fingerprint, own, report)
        report.tuned(record, where)
        self._restless.is_used(record)
        found = self._resolution(key, meeting.fingerprint, record, tuned=True)
        advice = self._restless.advice
        if self._call.unusable:
            now = f"It was tuned again, and uses {found.config}"
            advice = f"{subject.name}, key {key}: {self._call.unusable}. {now}"
        advice = advice if self._ranks.is_leader else ""
        return replace(found, advice=advice, changed=self._changed)

    def _cannot(self, key: Key, meeting: Meeting, why: str) -> Exception:
        """The error where nothing may be measured."""
        name = self._subject.name
        if meeting.frozen:
            return TuningFrozen(name, key, key.hardware, why, meeting.frozen)
        return CaptureInProgress(name, f"key {key} cannot be tuned during a capture: {why}")

    def _resolution(
        self, key: Key, fingerprint: Fingerprint, record: TuningRecord, tuned: bool
    ) -> Resolution:
        config = self._winner(record)
        return Resolution(config, record, tuned, span=self._transfer.span(key, fingerprint, record))

    def _first_use(self, config: Config, where: str, meeting: Meeting) -> FirstUse:
        remedy = (
            f"To tune again: triton-dist clear {self._subject.origin.function}, or set "
            "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE=1."
        )
        votes = meeting.runs and not (meeting.frozen or meeting.capturing)
        source = f"config {config} of the tuning record {where}"
        restores = bool(self._subject.hooks.restore)
        return FirstUse(self._ranks, source, remedy, votes, restores, self._random_state)

    def _judge(self, record: TuningRecord, fingerprint: Fingerprint) -> Validity:
        """Judge whether ``record`` may be used for this call."""
        space, best = self._subject.space, record.best
        # It won once, if under other circumstances: worth a place in the race.
        self._incumbent = self._incumbent or space.find(best.digest, best.config)
        found = validity(record, fingerprint, space, self._parts.settings.strict)
        if not found.reasons:
            found = replace(found, reasons=tuple(self._reasons_against(record)))
        if found.reasons:
            self._restless.look(record, fingerprint)
        return found

    def _reasons_against(self, record: TuningRecord) -> Iterator[str]:
        """Yield reasons against a valid record: it was measured at sizes that are in another range
        now, or the current ``prune_fn`` drops the winner of a shipped record. A record of this
        user was tuned with the current ``prune_fn``."""
        sizes, key = self._subject.sizes, self._call.key
        if sizes is not None and not sizes.family(key).holds(sizes.values(key), record.at):
            yield f"it was measured at {record.at}, which another range holds now"
        if record.shipped and self._pruning.answer.failure is not None:
            yield self._pruning.answer.raised
        elif record.shipped:
            best = self._subject.space.find(record.best.digest, record.best.config)
            if best is None or best not in self._pruning.answer.kept:
                yield f"prune_fn drops the winner {record.best}"

    def _meet(self, key: Key, fingerprint: Fingerprint, own: OwnRecord) -> Meeting:
        """Tell the other ranks what this one came with, and go on only if all have the same.

        Raises:
            TuningTimeout: a rank did not come.
            RankDisagreement: on every rank, if functions, keys, details, config spaces or
                fingerprints differ, and on the others if the call of some rank was refused.
        """
        subject, call, agree = self._subject, self._call, self._subject.hooks.agree
        name, space = subject.name, subject.space
        details = "" if agree is None else str(agree(*call.args, **call.kwargs))
        compared = [
            ("the function that is called", name),
            (f"the key of {name}", f"{key} on {key.hardware}"),
            (f"the arguments of {name}", details),
            (f"the config space of {name}", f"{len(space)} configs, digest {space.digest}"),
        ]
        arrival = Arrival.of(
            self._parts, compared, fingerprint, own.verdict, traced=call.traced, runs=call.runs
        )
        arrivals = self._ranks.meet(Situation("first call of a key"), arrival, bool(call.unusable))
        return Meeting(self._ranks, name, arrivals)

    def _shared_record(self, meeting: Meeting, own: TuningRecord | None) -> TuningRecord:
        """The holder's record. It is sent only if some rank has none or another one."""
        if meeting.all_hold_it and own is not None:
            return own
        offer = own if self._ranks.rank == meeting.holder else None
        offers = self._ranks.gather(Situation("share the record"), offer)
        record = next(record for record in offers if record is not None)
        self._parts.memory.put(record)
        return record

    def _tune(
        self,
        key: Key,
        fingerprint: Fingerprint,
        own: OwnRecord,
        report: Report,
    ) -> StoredRecord:
        """Measure, and keep what was found: on disk by the leader, in memory by the others."""
        parts, ranks, subject = self._parts, self._ranks, self._subject
        found = functools.partial(field_of, subject, parts, self._call, ranks, self._pruning, key)
        told = "told to tune always" if parts.settings.always_tune else ""
        reason = self._call.unusable or told or own.where
        field = found(functools.partial(self._transfer.few, key, fingerprint))
        try:
            return self._race(key, fingerprint, own, field, reason, report)
        except NoValidConfig as none:
            if not field.carried:
                raise
            reason = f"those {field.carried} all failed: {next(iter(none.causes.values()))}"
        # What is fast beside these sizes need not work here: all may be tried.
        return self._race(key, fingerprint, own, found(), reason, report)

    def _race(
        self,
        key: Key,
        fingerprint: Fingerprint,
        own: OwnRecord,
        field: Field,
        reason: str,
        report: Report,
    ) -> StoredRecord:
        """Measure the candidates of ``field``."""
        parts, ranks, subject = self._parts, self._ranks, self._subject
        call, restore = self._call, subject.hooks.restore
        restorer = Restorer(subject.function, restore, call.args, call.kwargs, self._random_state)
        journal = parts.journal(key)
        try:
            head = journal_head(key, fingerprint, field.head)
            progress = Progress(journal, head, own.record, ranks)
            ranks.on_stuck = progress.quarantine
            with report.begin(field, reason, subject.space.default):
                with parts.quiet():
                    restorer.keep()
                    try:
                        error = self._try(field, progress, report, restorer)
                    finally:
                        restorer.restore()
                    self._changed = tuple(restorer.changed())
                trials = (*progress.trials(field.place), *field.pruned_trials())
                ended, seconds, dropped = ranks.decide(
                    Situation("end"), (timestamp(), progress.seconds, field.dropped())
                )
                record = TuningRecord(
                    key, fingerprint, trials, ended, seconds, field.carried,
                    self._transfer.measured_at, dropped, progress.by_rank(),
                )  # fmt: skip
                try:
                    _ = record.best
                except NoValidConfig as none:  # on every rank
                    journal.remove()  # what failed is tried again by the next start
                    if error is not None:
                        none.__cause__, error = error, None  # its frames lead here: no cycle
                    raise
                if ranks.is_leader:
                    journal.finish(record.digest)
                where = (parts.store if ranks.is_leader else parts.memory).put(record)
                journal.remove()
        finally:
            journal.close()
        return StoredRecord(record, where)

    def _try(
        self, field: Field, progress: Progress, report: Report, restorer: Restorer
    ) -> Exception | None:
        """Do what the search asks for, until it asks for nothing more.

        Returns the first exception of a config on this rank, if no config was measured.
        """
        parts, ranks, policy = self._parts, self._ranks, self._parts.settings.policy
        sampled = sampled_calls(self._subject, self._call, ranks, parts.settings.seconds)
        search: Search | None = None
        if ranks.is_leader and field.carried and not isinstance(field.candidates, Unlisted):
            search = parts.brief(field.candidates, policy, parts.settings.transfer_ms)
        elif ranks.is_leader:
            search = parts.search(field.candidates, policy, self._incumbent)
        prepare = self._subject.hooks.prepare and self._prepare
        ahead = CompileAhead(prepare, parts.compiler, parts.settings.compile_seconds, ranks)
        with parts.settling() as settle, ahead, ExitStack() as scope:
            is_only = policy.most_tried(len(field.candidates)) == 1
            attempts = Attempts(
                self._subject, parts, self._call, ranks, ahead, settle, restorer, sampled, is_only
            )
            scope.callback(attempts.take_error)  # where another exception ends this
            if self._call.unusable:
                attempts.recover(self._call.unusable)
            while (decided := self._next(search, progress, ahead)) is not None:
                request, outcome = decided
                label = field.label(request.config, policy)
                report.trying(label, request)
                by_rank: Sequence[Sequence[float]] = ()
                if outcome is None:
                    with progress.trying(request.config):
                        outcome = attempts.attempt(request, label)
                        by_rank = attempts.by_rank
                elif isinstance(outcome, Measurement):
                    attempts.measured_before(request.config)
                together = progress.learn(request, outcome, by_rank)
                report.tried(label, request, outcome, together)
                if is_only:
                    search = None  # one run, which tells whether the config works
                if search is not None:
                    with ranks.clock.phase("search"):
                        search.tell(request, outcome)
            attempts.undo_the_last()
            return attempts.take_error()

    def _prepare(self, config: Config) -> None:
        prepare = self._subject.hooks.prepare
        assert prepare is not None
        prepare(*self._call.args, **self._call.kwargs, **config.arguments())

    def _next(
        self, search: Search | None, progress: Progress, ahead: CompileAhead
    ) -> tuple[Request, Outcome | None] | None:
        """The next request of the leader, with the answer if it is known already; ``None`` when the
        search is over, or the budget. What the search names for later begins to be compiled."""
        at, space = Situation(f"request {progress.requests + 1}"), self._subject.space
        wanted: _Wanted = (None, 0, None, ())
        if search is not None:
            with self._ranks.clock.phase("search"), self._watching(search):
                asked = search.ask()
                named = tuple(map(space.place, search.ahead()))
            if asked is not None and not self._spent(asked, progress):
                known = progress.known(asked)
                wanted = (space.place(asked.config), asked.samples, known, named)
        place, samples, outcome, named = self._ranks.decide(
            at, wanted, self._parts.settings.seconds
        )
        if place is None:
            return None
        if named:
            ahead.begin([space[each] for each in named])
        return Request(space[place], samples), outcome

    def _watching(self, search: Search) -> AbstractContextManager[object]:
        """Within, ``search`` may run the user's code, if it is one that does."""
        if not search.runs_user_code:
            return nullcontext()
        return self._ranks.user_code(Situation("the search"), begun=True)

    def _spent(self, asked: Request, progress: Progress) -> bool:
        policy = self._parts.settings.policy
        too_many = policy.max_trials is not None and progress.tried >= policy.max_trials
        too_long = policy.max_seconds is not None and progress.seconds >= policy.max_seconds
        return (too_many and not progress.has(asked.config)) or (too_long and progress.tried > 0)

    def _winner(self, record: TuningRecord) -> Config:
        """The live config; every rank has it, because all have the same space."""
        best = record.best
        config = self._subject.space.find(best.digest, best.config)
        if config is None:
            raise LookupError(f"{self._subject.name}: {best} is no config of the space")
        return config
