"""Make the first call of a key: agree on the key, use a record or tune, and store the record.

Read ``_FirstCall`` from top to bottom. The leader (rank 0 of the group) decides, and all ranks
follow its messages. Every rank sends the same sequence of messages, even after a failure, so no
rank waits in vain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

from triton_dist._tuning.engine.agreement import (
    Agreement,
    LocalRecord,
    Proposal,
    find_remote_record,
    local_record,
    mark_used,
    unstable_constants,
)
from triton_dist._tuning.engine.candidates import CandidateSet, Selection
from triton_dist._tuning.engine.channel import Channel, Step, timestamp
from triton_dist._tuning.engine.choice import Choice, add_note, is_caused_by_config
from triton_dist._tuning.engine.compile_ahead import CompileAhead
from triton_dist._tuning.engine.components import Call, Components, TunedFunction
from triton_dist._tuning.engine.inputs import Restorer, calls_of_sample
from triton_dist._tuning.engine.progress import Progress, journal_header
from triton_dist._tuning.engine.report import Report
from triton_dist._tuning.engine.trial import TrialRunner
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
    UnlistedCandidates,
    Validity,
    validity,
)
from triton_dist._tuning.values.show import error_text
from triton_dist.errors import (
    CaptureInProgress,
    InvalidArgument,
    NoValidConfig,
    RankDisagreement,
    TuningFrozen,
    TuningTimeout,
)

_SELF_EXPLANATORY_ERRORS = (InvalidArgument, RankDisagreement)
"""Errors whose text has the cause, so that no note is added."""

_NextRequest: TypeAlias = "tuple[int | None, int, Outcome | None, tuple[int, ...]]"
"""The next request: index of its config (``None``: the search is over), number of samples, outcome
if it is known, and indices of configs to compile."""


def resolve(tuned_fn: TunedFunction, components: Components, call: Call) -> Choice:
    """Return the config for ``call``. The first rule that applies is used:

    1. A valid record in the cache of any rank. If several ranks have one, all ranks use the record
       of the lowest rank. A shipped record is used only if no rank has a record of its own.
    2. A valid record in the leader's remote store. If another job tunes the key now, the leader may
       wait for the record of that job.
    3. If predictions replace measurements, if tuning is forbidden, or during CUDA-graph capture:
       the config predicted from the leader's records of neighbouring sizes. Raise if the leader's
       ``prune_fn`` raises.
    4. If predictions replace measurements: the first config for which the leader's ``prior_fn``
       predicts a time near the smallest. Without ``prior_fn``, the first fallback config, or the
       first config.
    5. If tuning is forbidden: raise. Raise even during CUDA-graph capture, where rule 6 would
       otherwise use the default.
    6. During CUDA-graph capture: the default, which is the first config.
    7. The winner of a tuning by all ranks, which the leader records. If there are records of
       neighbouring sizes, the candidates are the few configs that are near the best there. If not,
       all configs are candidates.

    Raises:
        TuningFrozen: tuning is forbidden on some rank; raised on every rank.
        CaptureInProgress: the leader's ``prune_fn``, ``fallback_fn`` or ``waves_fn`` raised during
            a capture; raised on every rank.
        RankDisagreement: functions, keys, config spaces or fingerprints differ between ranks, or
            another rank ended or raised an error.
        TuningTimeout: a rank did not reach a step; raised on every rank that reached the step.
        PriorFailed: the leader's ``prior_fn`` raised; raised on every rank.
        NoValidConfig: ``prune_fn`` kept no config, or every config failed; raised on every rank.
    """
    # Trials draw random numbers. Rewind the generators afterwards, so that the program computes the
    # same numbers whether it tuned or not.
    random_state = components.random_state((call.args, call.kwargs))
    first_call = _FirstCall(tuned_fn, components, call, random_state)
    try:
        with watchdog.paused():
            return first_call.resolve()
    except BaseException as error:  # KeyboardInterrupt too: release the other ranks
        first_call.ranks.abort(error)
        raise
    finally:
        # Stored errors refer to frames of this call, and the frames refer to its arguments.
        first_call.ranks.drop_errors()
        first_call.selection.drop_errors()
        random_state.rewind()


class _FirstCall:
    """The first call of one key on this rank."""

    def __init__(
        self, tuned_fn: TunedFunction, components: Components, call: Call, random_state: RandomState
    ) -> None:
        self._tuned_fn, self._components, self._call = tuned_fn, components, call
        self._random_state = random_state
        self._changed_arguments: tuple[str, ...] = ()
        hint = f"The key of this rank is {call.key!r:.200}"
        if call.agreed_keys:
            known = ", ".join(f"{key!r:.200}" for key in call.agreed_keys[-3:])
            hint += (
                ", which is new here. Ranks that call with one of the "
                f"{len(call.agreed_keys)} tuned key(s), such as {known}, do not tune and "
                "will not join. Check that all ranks use the same sizes, and "
                "that clear() was called on all ranks or on none"
            )
        self.ranks = Channel(
            components.ranks,
            tuned_fn.name,
            components.settings.step_seconds,
            components.settings.grace_seconds,
            key=f"{call.key!r:.200}",
            call=call.number,
            hint=f"{hint}.",
        )
        self.selection = Selection(components, tuned_fn, call, self.ranks)
        self._incumbent: Config | None = None
        self._unstable_constants = ""

    def resolve(self) -> Choice:
        """Apply the rules of :func:`resolve`. Every rank takes the same branches."""
        tuned_fn, components, call, ranks = self._tuned_fn, self._components, self._call, self.ranks
        key = Key.of(tuned_fn.identity, call.key, components.hardware)
        fingerprint = components.fingerprint(tuned_fn.function, tuned_fn.space)
        stored = components.store.find(key.with_signature_of(fingerprint))
        # Each rank looks up its own caches first. The first message compares the results.
        local = local_record(stored, lambda record: self._validate(record, fingerprint))
        agreement = self._exchange_proposals(key, fingerprint, local)
        selection, key = self.selection, key.with_signature_of(agreement.fingerprint)
        selection.key, selection.fingerprint = key, agreement.fingerprint
        report = Report(components, key, ranks.clock)

        # Rule 1 of ``resolve``: a rank has a valid record. Rule 2: the remote store has one.
        found: StoredRecord | None = None
        cannot_tune = (
            bool(agreement.frozen_ranks) or agreement.cannot_measure or agreement.predict_only
        )
        if agreement.record_rank is not None:
            record = self._shared_record(agreement, local.record)
            location = f"the cache of rank {ranks.global_rank(agreement.record_rank)}"
            if record is local.record:
                location = local.location_or_reason
            found = StoredRecord(record, location)
        else:
            found = find_remote_record(
                components, ranks, agreement, key,
                lambda record: self._validate(record, agreement.fingerprint),
                may_wait=not cannot_tune,
            )  # fmt: skip
        if found is not None:
            record, location = found
            mark_used(record)
            report.cached(record, location, local.accepted)
            config = self._winner(record)
            try_recorded_winner = functools.partial(
                self._try_recorded_winner,
                source=f"config {config} of the tuning record in {location}",
                can_tune_again=agreement.will_call_function and not cannot_tune,
            )
            return Choice(
                config,
                record,
                size_table=selection.size_table(record, config),
                try_recorded_winner=try_recorded_winner,
            )

        # Rules 3 to 6: nothing may be measured.
        if cannot_tune:
            predicted, failure = selection.predicted_record()
            if agreement.predict_only:
                # Return no record with the predicted config, because ``tune`` must measure it.
                if predicted is not None:
                    return Choice(self._winner(predicted), None)
                config = selection.most_promising()
                report.predicted(config)
                return Choice(config, None)
            if predicted is not None:
                report.cached(predicted, "records of other sizes", "")
                return Choice(
                    self._winner(predicted), predicted, is_reusable=not agreement.cannot_measure
                )
            if failure or agreement.frozen_ranks:
                raise self._cannot_tune_error(agreement, local.location_or_reason, failure)
            return Choice(tuned_fn.space.default, None, is_reusable=False)

        # Rule 7: tune.
        try:
            components.check_search()
            record, location = self._tune(local, report)
        finally:
            if components.remote is not None:
                components.remote.release(key, agreement.fingerprint)
        report.tuned(record, location)
        mark_used(record)
        config, advice = self._winner(record), ""
        if ranks.is_leader and call.winner_failure:
            advice = (
                f"{tuned_fn.name}, key {key}: {call.winner_failure}. It was tuned again, and uses "
            )
            advice += str(config)
        elif ranks.is_leader and self._unstable_constants:
            advice = (
                f"{tuned_fn.name} was tuned again, because of {self._unstable_constants}. If "
                "this value differs at each start, the function is tuned at each start. To avoid "
                "this, name the value in ignore=(...) of autotune, or pass it as an argument"
            )
        size_table = selection.size_table(record, config)
        return Choice(
            config,
            record,
            size_table=size_table,
            was_tuned=True,
            advice=advice,
            changed_arguments=self._changed_arguments,
        )

    def _try_recorded_winner(
        self, call: Callable[[], Any], source: str, can_tune_again: bool
    ) -> tuple[Any, str]:
        """Make the first call in this process with the winner of a record.

        Args:
            call: the user's call.
            source: the config and the location of its record, as text.
            can_tune_again: every rank calls the function now, and tuning is allowed.

        Returns:
            The result of ``call`` and an empty text. If the config is unusable on some rank, every
            rank rewinds its random generators and returns ``None`` and the reason. All ranks then
            tune again.
        """
        ranks = self.ranks

        def reason_to_tune(failure: str | None) -> str:
            """Exchange failures with the other ranks. Return why all ranks tune again, or an empty
            text if they do not.

            ``failure`` is the error of the config as text; empty if the call returned, and ``None``
            if the call raised an exception that the config did not cause.
            """
            if not can_tune_again:
                return ""
            try:
                failures = ranks.all_gather(Step("first use of a record"), failure)
            except TuningTimeout:  # the call has finished, and tuning needs all ranks
                return ""
            # A new config does not help against an error that the config did not cause (None). The
            # call cannot be repeated if it changes arguments and has returned on some rank (""):
            # the arguments were not saved before the call.
            if None in failures or (self._tuned_fn.hooks.restored_arguments and "" in failures):
                return ""
            for rank, text in enumerate(failures):
                if text:
                    self._random_state.rewind()
                    return f"{source} failed on rank {ranks.global_rank(rank)}: {text}"
            return ""

        try:
            result = call()
        except Exception as error:
            why = reason_to_tune(error_text(error) if is_caused_by_config(error) else None)
            if why:
                return None, why
            if not isinstance(error, _SELF_EXPLANATORY_ERRORS):
                function = self._tuned_fn.identity.function
                remedy = f"To tune again: triton-dist clear {function}, or set "
                remedy += "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE=1."
                add_note(error, f"triton_dist: {source} was used. {remedy}")
            raise
        except BaseException as error:  # release the other ranks
            ranks.abort(error)
            raise
        return result, reason_to_tune("")

    def _cannot_tune_error(self, agreement: Agreement, reason: str, failure: str) -> Exception:
        """Return the error for a call that would have to tune while nothing may be measured.

        ``reason`` is why there is no record. ``failure`` is the failure of a user's function, if
        any.
        """
        name, key = self._tuned_fn.name, self.selection.key
        why = f"{reason}; {failure}" if failure else reason
        why_not = f"key {key} cannot be tuned during a capture: {why}"
        error: Exception = CaptureInProgress(name, why_not)
        if agreement.frozen_ranks:
            error = TuningFrozen(name, key, key.hardware, why, agreement.frozen_ranks)
        if failure:
            error.__cause__ = self.selection.prediction_error
        return error

    def _validate(self, record: TuningRecord, fingerprint: Fingerprint) -> Validity:
        """Return whether ``record`` may be used for this call, with the reasons."""
        space, best = self._tuned_fn.space, record.best
        # Even an outdated winner is a good candidate for the race.
        self._incumbent = self._incumbent or space.find(best.digest, best.config)
        result = validity(record, fingerprint, space, self._components.settings.strict_versions)
        if not result.reasons:
            result = replace(result, reasons=tuple(self._reasons_against(record)))
        if result.reasons:
            self._unstable_constants = (
                unstable_constants(record, fingerprint) or self._unstable_constants
            )
        return result

    def _reasons_against(self, record: TuningRecord) -> Iterator[str]:
        """Yield reasons against a record that matches the fingerprint.

        The rounding of sizes may have changed. The current ``prune_fn`` may drop the winner of a
        shipped record; for other records, it is part of the fingerprint.
        """
        sizes, key = self._tuned_fn.sizes, self._call.key
        if sizes is not None and not sizes.family(key).rounds_to(
            sizes.values(key), record.measured_sizes
        ):
            yield f"it was measured at {record.measured_sizes}, which belongs to another range now"
        if record.is_shipped and self.selection.prune_result.failure is not None:
            yield self.selection.prune_result.failure_text
        elif record.is_shipped and self._winner(record) not in self.selection.prune_result.kept:
            yield f"prune_fn drops the winner {record.best}"

    def _exchange_proposals(
        self, key: Key, fingerprint: Fingerprint, local: LocalRecord
    ) -> Agreement:
        tuned_fn, call, agree = self._tuned_fn, self._call, self._tuned_fn.hooks.agree
        name, space, remote = tuned_fn.name, tuned_fn.space, self._components.remote
        agreed_values = "" if agree is None else str(agree(*call.args, **call.kwargs))
        compared_texts = [
            ("the function that is called", name),
            (f"the key of {name}", f"{key} on {key.hardware}"),
            (f"the arguments of {name}", agreed_values),
            (f"the config space of {name}", f"{len(space)} configs, digest {space.digest}"),
        ]
        proposal = Proposal(
            compared_texts,
            fingerprint,
            local.record_summary,
            always_tune=self._components.settings.always_tune or bool(call.winner_failure),
            frozen=self._components.settings.frozen,
            cannot_measure=call.is_traced or self._components.device.is_capturing(),
            predict_only=self._components.settings.predict_only and not call.must_measure,
            will_call_function=call.will_call_function,
            max_remote_lookup_seconds=remote.max_find_seconds(may_wait=True) if remote else None,
        )
        proposals = self.ranks.first_all_gather(
            Step("first call of a key"), proposal, bool(call.winner_failure)
        )
        return Agreement(self.ranks, name, proposals)

    def _shared_record(self, agreement: Agreement, local: TuningRecord | None) -> TuningRecord:
        """Return the record that all ranks use. Send it unless every rank has it as ``local``."""
        if agreement.have_equal_records and local is not None:
            return local
        offer = local if self.ranks.rank == agreement.record_rank else None
        offers = self.ranks.all_gather(Step("share the record"), offer)
        record = next(record for record in offers if record is not None)
        self._components.memory_store.put(record)
        return record

    def _tune(self, local: LocalRecord, report: Report) -> StoredRecord:
        """Tune, and store the record: the leader on disk, the other ranks in memory."""
        forced = (
            "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE is set"
            if self._components.settings.always_tune
            else ""
        )
        candidate_set = self.selection.candidate_set()
        try:
            reason = self._call.winner_failure or forced or local.location_or_reason
            return self._measure(candidate_set, reason, local.record, report)
        except NoValidConfig as error:
            origin = candidate_set.warm_started_from
            if not origin:
                raise
            reason = f"all candidates {origin} failed: {next(iter(error.causes.values()))}"
        # Configs that are fast at neighbouring sizes may fail here, so try all configs.
        candidate_set = self.selection.candidate_set(warm_start=False)
        return self._measure(candidate_set, reason, local.record, report)

    def _measure(
        self,
        candidate_set: CandidateSet,
        reason: str,
        replaced_record: TuningRecord | None,
        report: Report,
    ) -> StoredRecord:
        """Measure the candidates, because of ``reason``, and store the record, which replaces
        ``replaced_record``."""
        components, ranks, tuned_fn = self._components, self.ranks, self._tuned_fn
        call, restore, sizes = self._call, tuned_fn.hooks.restored_arguments, tuned_fn.sizes
        restorer = Restorer(tuned_fn.function, restore, call.args, call.kwargs, self._random_state)
        key, fingerprint = self.selection.key, self.selection.fingerprint
        journal = components.journal(key)
        try:
            header = journal_header(key, fingerprint, candidate_set.candidates_id)
            progress = Progress(journal, header, replaced_record, ranks)
            ranks.on_stuck = progress.quarantine
            with report.begin(candidate_set, reason, tuned_fn.space.default):
                with components.trial_context():
                    restorer.save()
                    try:
                        error = self._run_search(candidate_set, progress, report, restorer)
                    finally:
                        restorer.restore()
                    self._changed_arguments = tuple(restorer.changed_arguments())
                trials = (*progress.trials(tuned_fn.space.index_of), *candidate_set.pruned_trials())
                ended, seconds, dropped = ranks.broadcast(
                    Step("end"), (timestamp(), progress.seconds, candidate_set.unlisted_counts())
                )
                rounded_sizes = call.sizes if sizes is None else sizes.values(call.key)
                measured_sizes = () if rounded_sizes == call.sizes else call.sizes
                record = TuningRecord(
                    key, fingerprint, trials, ended, seconds,
                    candidate_set.warm_started_from, measured_sizes, dropped,
                    progress.times_by_rank(),
                )  # fmt: skip
                try:
                    _ = record.best
                except NoValidConfig as no_config:  # every config failed; raised on every rank
                    journal.remove()  # the next start tries failed configs again
                    if error is not None:
                        # Avoid a reference cycle: the frames of ``error`` lead to this frame.
                        no_config.__cause__, error = error, None
                    raise
                if ranks.is_leader:
                    journal.finish(record.digest)
                location = (components.store if ranks.is_leader else components.memory_store).put(
                    record
                )
                journal.remove()
                if components.remote is not None:
                    components.remote.publish(record)
        finally:
            journal.close()
        return StoredRecord(record, location)

    def _run_search(
        self, candidate_set: CandidateSet, progress: Progress, report: Report, restorer: Restorer
    ) -> Exception | None:
        """Answer the requests of the search until there are no more.

        Return the first exception that a config raised on this rank, unless a config was measured.
        """
        components, ranks, policy = self._components, self.ranks, self._components.settings.policy
        call, prepare = self._call, self._tuned_fn.hooks.prepare
        sample_calls = calls_of_sample(
            self._tuned_fn, call, ranks, components.settings.step_seconds
        )
        # Only the leader has a search. The other ranks receive its requests by broadcast.
        search: Search | None = None
        if (
            ranks.is_leader
            and candidate_set.warm_started_from
            and not isinstance(candidate_set.candidates, UnlistedCandidates)
        ):
            search = components.warm_start_search(
                candidate_set.candidates, policy, components.settings.warm_start_ms
            )
        elif ranks.is_leader:
            search = components.search(
                candidate_set.candidates, policy, self._incumbent, candidate_set.predicted_ms
            )
        prepared = prepare and (lambda c: prepare(*call.args, **call.kwargs, **c.arguments()))
        compile_ahead = CompileAhead(
            prepared, components.compiler, components.settings.compile_seconds, ranks
        )
        with (
            components.deferred_checks() as run_checks,
            closing(compile_ahead),
            ExitStack() as scope,
        ):
            is_single_config = policy.max_tried(len(candidate_set.candidates)) == 1
            trial_runner = TrialRunner(
                self._tuned_fn,
                components,
                call,
                ranks,
                compile_ahead,
                run_checks,
                restorer,
                sample_calls,
                is_single_config,
            )
            # Drop the stored error if an exception ends this block.
            scope.callback(trial_runner.take_error)
            if call.winner_failure:
                trial_runner.recover("the recorded winner")
            while (next_request := self._next_request(search, progress, compile_ahead)) is not None:
                request, outcome = next_request
                label = candidate_set.label(request.config, policy)
                report.trying(label, request)
                by_rank: Sequence[Sequence[float]] = ()
                if outcome is None:
                    with progress.trying(request.config):
                        outcome = trial_runner.run_trial(request, label)
                        by_rank = trial_runner.samples_by_rank
                # The outcome is from the journal: an earlier start of the program measured it.
                elif isinstance(outcome, Measurement):
                    trial_runner.note_earlier_measurement(request.config)
                config_outcome = progress.store_outcome(request, outcome, by_rank)
                report.tried(label, request, outcome, config_outcome)
                if is_single_config:
                    search = None  # one run suffices to check a single config
                if search is not None:
                    with ranks.clock.phase("search"):
                        search.tell(request, outcome)
            trial_runner.undo_last_run()
            return trial_runner.take_error()

    def _next_request(
        self, search: Search | None, progress: Progress, compile_ahead: CompileAhead
    ) -> tuple[Request, Outcome | None] | None:
        """Return the leader's next request, and its outcome if the journal has it.

        Return ``None`` if the search is over, or if its limit of time or trials is reached. Start
        to compile the configs that the search may request next.
        """
        space, policy = self._tuned_fn.space, self._components.settings.policy
        next_request: _NextRequest = (None, 0, None, ())
        if search is not None:
            limit: AbstractContextManager[object] = nullcontext()
            if search.runs_user_code:
                limit = self.ranks.user_code(Step("the search"))
            with self.ranks.clock.phase("search"), limit:
                request = search.ask()
                upcoming = tuple(map(space.index_of, search.upcoming_configs()))
            max_trials, seconds, tried = policy.max_trials, policy.max_seconds, progress.num_tried
            if request is not None:
                is_new = not progress.has_outcome(request.config)
                too_many = is_new and max_trials is not None and tried >= max_trials
                too_long = seconds is not None and tried > 0 and progress.seconds >= seconds
                if not (too_many or too_long):
                    known = progress.known_outcome(request)
                    next_request = (
                        space.index_of(request.config),
                        request.num_samples,
                        known,
                        upcoming,
                    )
        step = Step(f"request {progress.num_requests + 1}")
        index, samples, outcome, upcoming = self.ranks.broadcast(
            step, next_request, self._components.settings.step_seconds
        )
        if index is None:
            return None
        if upcoming:
            compile_ahead.begin([space[each] for each in upcoming])
        return Request(space[index], samples), outcome

    def _winner(self, record: TuningRecord) -> Config:
        """Return the winner of ``record`` as a config of this process, which all ranks have."""
        best = record.best
        config = self._tuned_fn.space.find(best.digest, best.config)
        assert config is not None, best
        return config
