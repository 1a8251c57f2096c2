"""A tuned op in the harness: its winner, its other configs, its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from triton_dist.testing.overlap import Candidate
from triton_dist.tune import AutoTuner
from triton_dist.utils import rand_tensor

from .workload import TUNED, TUNED_AGAIN, Choice


class TunedOp:
    """``op(A, B, ctx)`` at one shape, tuned when it is made, or its cached config used.

    Args:
        A: filled with values such that those of the product have a standard deviation of 1.
        B: as it comes, U(-1, 1).
        terms: how many products a value of the output is the sum of, over all ranks.
        expected: what the op is to give for A and B as they are now.
        peers: what it is measured beside.
        is_own: whether a config runs an algorithm of this package.
        recover: brings the context of all ranks back to one state.
    """

    def __init__(
        self,
        op: AutoTuner,
        A: torch.Tensor,
        B: torch.Tensor,
        ctx: Any,
        choice: Choice,
        *,
        terms: int,
        serial: str,
        tolerance: float,
        expected: Callable[[], torch.Tensor],
        peers: Callable[[], Mapping[str, Candidate]],
        is_own: Callable[[Mapping[str, Any]], bool],
        recover: Callable[[], object],
    ) -> None:
        self.serial, self.tolerance, self.recover = serial, tolerance, recover
        self._op, self._A, self._B, self._ctx, self._choice = op, A, B, ctx, choice
        # A product of U(-scale, scale) and U(-1, 1) has a standard deviation of scale / 3.
        self._scale = 3 / terms**0.5
        self._expected, self._peers, self._is_own = expected, peers, is_own
        self.refresh()
        before = op.tuning_count
        self._record = op.tune(A, B, ctx)
        self._winner = op.best_config(A, B, ctx)
        tuned_now = op.tuning_count > before
        self.note = f"tuned now, {self._record.seconds:.1f} s" if tuned_now else "from the cache"

    def candidates(self) -> Mapping[str, Candidate]:
        winner = self._candidate(self._winner)
        others = {
            f"{'own' if self._is_own(config) else 'vendor'} {number}": self._candidate(config)
            for number, config in enumerate(self._others(), start=1)
        }
        return {**self._peers(), TUNED: winner, **others, TUNED_AGAIN: winner}

    def refresh(self) -> None:
        self._A.copy_(rand_tensor(self._A.shape, self._A.dtype, self._A.device) * self._scale)

    def _candidate(self, config: Mapping[str, Any]) -> Candidate:
        op, A, B, ctx, arguments = self._op, self._A, self._B, self._ctx, dict(config)
        return Candidate(
            "own" if self._is_own(config) else "vendor",
            lambda: op.fn(A, B, ctx, **arguments),
            self._expected,
            str(config),
        )

    def _others(self) -> list[Any]:
        """Configs beside the winner, best first by the record: all, or the best few and in any case
        the best of an own algorithm."""
        space, record = self._op.config_space, self._record
        measured = [trial for trial in record.trials if hasattr(trial.outcome, "median")]
        measured.sort(key=lambda trial: trial.outcome.median)
        found = (space.find(trial.digest) for trial in measured)
        ranked = [each for each in found if each is not None and each != self._winner]
        if self._choice.every:
            return ranked
        few = ranked[: self._choice.best]
        if not any(map(self._is_own, [self._winner, *few])):
            few += [each for each in ranked if self._is_own(each)][:1]
        return few
