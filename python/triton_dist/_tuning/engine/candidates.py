"""Select the candidates of one tuning. They are equal on all ranks.

Candidates are configs that ``prune_fn`` keeps. If keys that differ only in sizes (*neighbours*) are
tuned, the candidates are only those few configs that are near the best at the neighbours
(:mod:`~triton_dist._tuning.sizes.neighbours`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triton_dist._tuning.engine.channel import Channel, Step, timestamp
from triton_dist._tuning.engine.components import Call, Components, TunedFunction
from triton_dist._tuning.engine.progress import candidates_id
from triton_dist._tuning.sizes.neighbours import SIZE_HOOK_NAMES, Neighbours
from triton_dist._tuning.sizes.size_table import SizeTable
from triton_dist._tuning.values import (
    Candidates,
    Config,
    ConfigSpace,
    Failure,
    Fingerprint,
    Key,
    Policy,
    PrunedConfig,
    Trial,
    TuningRecord,
    UnlistedCandidates,
    codec,
    validity,
)
from triton_dist._tuning.values.show import error_text
from triton_dist.errors import NoValidConfig, PriorFailed, RankDisagreement


class PruneResult(NamedTuple):
    """The configs that ``prune_fn`` keeps and drops. Both are empty if ``prune_fn`` failed."""

    kept: Candidates = ()
    dropped: Sequence[PrunedConfig] = ()
    failure: Exception | None = None
    """The exception of ``prune_fn``, or a ``TimeoutError`` if it took too long."""

    @property
    def kept_list(self) -> Sequence[Config]:
        """The kept configs as a list. Only for a function with sizes: its space can be listed."""
        assert not isinstance(self.kept, UnlistedCandidates)
        return self.kept

    @property
    def failure_text(self) -> str:
        """The failure as text; empty if there is none."""
        error = self.failure
        return "" if error is None else f"prune_fn raised {error_text(error)}"


MAX_LISTED_PRUNED = 1000
"""Maximum number of pruned configs that a record lists. If there are more, the record has only
their number by reason."""


@dataclass(frozen=True)
class _LeaderSelection:
    """The leader's selection, as it is broadcast. Configs are given by their index in the space."""

    kept: tuple[int, ...] | None = ()
    """The candidates. ``None``: there are too many to list."""
    pruned: tuple[tuple[int, str], ...] = ()
    warm_started_from: str = ""
    """Names the neighbours from which the candidates were chosen, if any."""
    failure: str | None = None
    """Failure of one of the user's functions."""
    failed_hook: str = "prune_fn"
    failed_prediction: tuple[str, str] | None = None
    """The config for which ``prior_fn`` failed, and the reason."""


class CandidateSet:
    """The configs that may be tried.

    Attributes:
        candidates: all candidates. If they are too many to list, only the leader prunes them.
        pruned: the configs that were pruned; empty if the space is too large to list.
        warm_started_from: names the neighbours from which the candidates were chosen, if any.
        predicted_ms: on the leader, the results of ``prior_fn``, if any; ``inf``: unknown.
    """

    def __init__(
        self,
        space: ConfigSpace,
        candidates: Candidates,
        pruned: Sequence[PrunedConfig] = (),
        warm_started_from: str = "",
        predicted_ms: Mapping[Config, float] | None = None,
    ) -> None:
        self._space, self.candidates = space, candidates
        self.predicted_ms = predicted_ms or {}
        self.pruned, self.warm_started_from = pruned, warm_started_from
        listed = () if isinstance(candidates, UnlistedCandidates) else candidates
        self._labels = {
            config.digest: f"{number}/{len(listed)}"
            for number, config in enumerate(listed, start=1)
        }

    def label(self, config: Config, policy: Policy) -> str:
        """Return the position of ``config`` among the candidates, such as ``3/96``; if they are not
        listed, among the tried configs."""
        label = f"{len(self._labels) + 1}/{policy.max_tried(len(self.candidates))}"
        return self._labels.setdefault(config.digest, label)

    def count_text(self, policy: Policy) -> str:
        """Return the number of candidates as text."""
        number = len(self.candidates)
        if isinstance(self.candidates, UnlistedCandidates):
            return f"{policy.max_tried(number)} of {number:,} combinations"
        return f"{number} configs ({len(self.pruned)} pruned)"

    @property
    def candidates_id(self) -> codec.Tree:
        """Short JSON tree that identifies these candidates in a journal."""
        if isinstance(self.candidates, UnlistedCandidates):
            return {"number": len(self.candidates), "digest": self._space.digest}
        return candidates_id(self.candidates)

    def pruned_trials(self) -> list[Trial]:
        """Return a trial for each pruned config; an empty list if there are too many."""
        listed = self.pruned if len(self.pruned) <= MAX_LISTED_PRUNED else []
        return [Trial.of(each.config, Failure("pruned", each.reason)) for each in listed]

    def unlisted_counts(self) -> dict[str, int]:
        """On the leader, return the number of unlisted pruned configs by reason."""
        if isinstance(self.candidates, UnlistedCandidates):
            return dict(self.candidates.num_pruned_by_reason)
        unlisted = self.pruned if len(self.pruned) > MAX_LISTED_PRUNED else []
        return dict(Counter(each.reason for each in unlisted))


class Selection:
    """Selection of the candidates for one call, and prediction from records of other sizes.

    All ranks must call each method together, except ``prune_result``. Only the leader's records are
    used.

    Attributes:
        prediction_error: the error of a prediction on this rank.
        key, fingerprint: set when all ranks agree on them.
    """

    key: Key
    fingerprint: Fingerprint

    def __init__(
        self, components: Components, tuned_fn: TunedFunction, call: Call, ranks: Channel
    ) -> None:
        self._components, self._tuned_fn, self._call, self._ranks = (
            components,
            tuned_fn,
            call,
            ranks,
        )
        self.prediction_error: Exception | None = None
        self._prune_result: PruneResult | None = None

    # ``cached_property`` would keep the result alive in a frame of its ``__get__``.
    @property
    def prune_result(self) -> PruneResult:
        """The result of ``prune_fn`` on this rank, computed at first use.

        Do not store it in a local variable: its failure refers to the frame of the first caller.
        """
        if self._prune_result is None:
            tuned_fn, call = self._tuned_fn, self._call
            try:
                with self._ranks.user_code(Step("prune_fn")):
                    kept_and_dropped = tuned_fn.space.prune(
                        tuned_fn.prune_fn, call.args, call.kwargs
                    )
                self._prune_result = PruneResult(*kept_and_dropped)
            except Exception as error:
                self._prune_result = PruneResult(failure=error)
        return self._prune_result

    def drop_errors(self) -> None:
        """Drop the stored errors, because they refer to frames that refer to this object."""
        self.prediction_error = self._prune_result = None

    def most_promising(self) -> Config:
        """Return the config to use without any measurement. Raise like :meth:`candidate_set`."""
        candidates = self.candidate_set(warm_start=False, only_best=True).candidates
        if isinstance(candidates, UnlistedCandidates):
            return self._tuned_fn.space.default
        return candidates[0]

    def candidate_set(self, warm_start: bool = True, only_best: bool = False) -> CandidateSet:
        """Return the configs that may be tried. Only the leader calls ``prune_fn``.

        Args:
            warm_start: if there are neighbours, return only configs that are near the best at them.
            only_best: return only the most promising config. Requires a space that can be listed.

        Raises:
            NoValidConfig: ``prune_fn`` kept no config; raised on every rank.
            PriorFailed: the leader's ``prior_fn`` failed; raised on every rank.
            RankDisagreement: the leader's ``prune_fn``, ``fallback_fn`` or ``waves_fn`` raised. The
                leader raises the original exception instead.
        """
        ranks, space, selected = self._ranks, self._tuned_fn.space, _LeaderSelection()
        predicted: Mapping[Config, float] = {}
        result = self.prune_result if ranks.is_leader else PruneResult()
        failure = result.failure
        if failure is not None:
            selected = _LeaderSelection(failure=result.failure_text)
        elif isinstance(result.kept, UnlistedCandidates):
            selected = _LeaderSelection(kept=None)
        elif ranks.is_leader:
            try:
                # Broadcast indices instead of configs, because the spaces are equal on all ranks.
                kept, warm_started_from = (
                    self._warm_started(result.kept) if warm_start else (result.kept, "")
                )
                predicted = {} if warm_started_from else self._predicted_ms(kept)
                if only_best and kept:
                    # Without predictions, fallbacks have the smallest value.
                    ms_by_config = predicted or {
                        c: 1.0 + (not self._tuned_fn.fallback_fn(c)) for c in kept
                    }
                    kept = [self._components.settings.policy.most_promising(ms_by_config)]
                dropped = tuple(
                    (space.index_of(each.config), each.reason) for each in result.dropped
                )
                selected = _LeaderSelection(
                    tuple(map(space.index_of, kept)), dropped, warm_started_from
                )
            except PriorFailed as error:
                failure = error
                selected = _LeaderSelection(failed_prediction=(error.config, error.cause))
            except Exception as error:  # raised by the user's fallback_fn or waves_fn
                failure = error
                selected = _LeaderSelection(
                    failure=f"{SIZE_HOOK_NAMES} raised {error_text(error)}",
                    failed_hook=SIZE_HOOK_NAMES,
                )
        selected = ranks.broadcast(
            Step("prune_fn"), selected, self._components.settings.step_seconds
        )
        if failure is not None:
            try:
                raise failure
            finally:
                del result, failure  # the error refers to this frame
        if selected.failed_prediction is not None:
            where = self._tuned_fn.name, self.key, ranks.global_rank(0)
            raise PriorFailed(*where, *selected.failed_prediction)
        if selected.failure is not None:
            raised = {ranks.global_rank(0): selected.failure}
            raise RankDisagreement(f"{selected.failed_hook} of {self._tuned_fn.name}", raised)
        # The kept configs are too many to send, and only the leader's search needs them.
        if selected.kept is None:
            unlisted = result.kept if ranks.is_leader else space.prune(None, (), {})[0]
            return CandidateSet(space, unlisted)
        candidates = [space[index] for index in selected.kept]
        pruned = [PrunedConfig(space[index], reason) for index, reason in selected.pruned]
        if not candidates:
            causes = {str(each.config): each.reason for each in pruned}
            raise NoValidConfig(self._tuned_fn.name, self.key, causes)
        return CandidateSet(space, candidates, pruned, selected.warm_started_from, predicted)

    def _predicted_ms(self, configs: Sequence[Config]) -> dict[Config, float]:
        """Return the prediction of ``prior_fn`` for each config; empty without ``prior_fn``.

        A prediction that is not finite is returned as ``inf``. Raise ``PriorFailed`` if
        ``prior_fn`` raises or returns something other than a positive number.
        """
        prior_fn, call, predicted = self._tuned_fn.prior_fn, self._call, {}
        if prior_fn is None:
            return {}
        with self._ranks.user_code(Step("prior_fn")):
            for config in configs:
                try:
                    ms = float(prior_fn(config, *call.args, **call.kwargs))
                    if ms <= 0:
                        raise ValueError(f"it returned {ms}")
                except Exception as error:
                    rank, cause = self._ranks.global_rank(0), error_text(error)
                    name, key = self._tuned_fn.name, self.key
                    raise PriorFailed(name, key, rank, str(config), cause) from error
                predicted[config] = ms if ms < math.inf else math.inf  # also for NaN
        return predicted

    def _warm_started(self, kept: Sequence[Config]) -> tuple[Sequence[Config], str]:
        """Return the configs of ``kept`` that are near the best at the neighbours.

        The second value is a text that names the neighbours. Without neighbours, return ``kept``
        and an empty text.
        """
        settings, failure = self._components.settings, self._call.winner_failure
        if settings.warm_start_ms > 0 and not (settings.always_tune or failure):
            neighbours = self._neighbours()
            if neighbours is not None and neighbours.tried_all_kinds(kept):
                candidates = neighbours.candidates(kept, settings.warm_start_ms)
                if candidates:
                    return candidates, f"warm-started from {neighbours}"
        return kept, ""

    def predicted_record(self) -> tuple[TuningRecord | None, str]:
        """Return a record predicted from the neighbours without measuring, or ``None``.

        The second value is the failure of a user's function as text; empty if there is none.
        """
        if self._tuned_fn.sizes is None:
            return None, ""
        record, failure = None, ""
        neighbours = self._neighbours()
        if neighbours is not None and neighbours.neighbours:
            self.prediction_error, failure = (
                self.prune_result.failure,
                self.prune_result.failure_text,
            )
            if self.prediction_error is None:
                try:
                    record = neighbours.predict(self.key, self.prune_result.kept_list, timestamp())
                except Exception as error:  # raised by the user's fallback_fn or waves_fn
                    self.prediction_error, failure = (
                        error,
                        f"{SIZE_HOOK_NAMES} raised {error_text(error)}",
                    )
        failure = failure and f"{failure} on rank {self._ranks.global_rank(0)}"
        seconds = self._components.settings.step_seconds
        return self._ranks.broadcast(Step("predict"), (record, failure), seconds)

    def size_table(self, record: TuningRecord, winner: Config) -> SizeTable | None:
        """Return the configs by exact size; ``None`` unless the function has exactly one size.

        The measured configs of a record passed ``prune_fn`` before they were measured. Only for a
        shipped record, ``prune_fn`` is called here, except for the winner.
        """
        space = self._tuned_fn.space
        # A latency curve exists over one size only.
        if self._tuned_fn.sizes is None or len(self._call.sizes) != 1:
            return None
        neighbours, curves = self._neighbours(), None
        if neighbours is not None:
            are_single = neighbours.family.have_single_sizes
            # A range with a single size ends at a multiple of the tile size, for which a library
            # may run another kernel. Use only neighbours whose ranges also have a single size, or
            # only neighbours whose ranges have several.
            is_single = are_single(neighbours.family.sizes)
            others = [each for each in neighbours.neighbours if are_single(each.sizes) == is_single]
            kept = self.prune_result.kept_list if record.is_shipped else space
            usable = [*kept] if winner in kept else [winner, *kept]
            curves = neighbours.latency_curves(record, usable, others)
        (curves,) = self._ranks.broadcast(
            Step("sizes"), (curves,), self._components.settings.step_seconds
        )
        return None if curves is None else SizeTable.of(curves, space)

    def _neighbours(self) -> Neighbours | None:
        """On the leader, return the neighbours of the key. Return ``None`` on other ranks, and for
        a function without sizes."""
        components, tuned_fn, strict = (
            self._components,
            self._tuned_fn,
            self._components.settings.strict_versions,
        )
        if tuned_fn.sizes is None or not self._ranks.is_leader:
            return None

        def is_valid(record: TuningRecord) -> bool:
            return not validity(record, self.fingerprint, tuned_fn.space, strict).reasons

        stored = components.store.records(self.key.function_name)
        records = (each.record for each in stored if each.is_of_function(self.key))
        user_key, fallback_fn = self._call.key, tuned_fn.fallback_fn
        return Neighbours.of(tuned_fn.sizes, fallback_fn, self.key, user_key, records, is_valid)
