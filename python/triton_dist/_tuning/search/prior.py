"""Use predicted times (``prior_fn``): sample promising configs first, and skip hopeless configs.

A config is skipped only if the race shows that predictions are good. The race computes the ratio of
measured to predicted time for each sampled config. The optimistic time of a config is its predicted
time multiplied by a ratio four standard deviations below the mean, on a logarithmic scale. A config
is hopeless if this time is longer than the time of the fastest sampled config. If predictions are
bad, the ratios differ widely, and nothing is skipped.

Predictions for one algorithm say little about another. So a config is skipped only after another
config with the same algorithm was tried. All values that are strings identify the algorithm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from triton_dist._tuning.search.racing import Racing
from triton_dist._tuning.values import Config, Policy, Request

_MIN_SAMPLED = 8
"""Minimum number of sampled candidates with predictions before a candidate may be skipped."""
# A config is hopeless if even this far below its prediction it is slow
_NUM_STANDARD_DEVIATIONS = 4.0


def sorted_by_predicted_time(
    candidates: Sequence[Config], policy: Policy, predicted_ms: Mapping[Config, float]
) -> list[Config]:
    """Return the candidates, the fastest prediction first, those without a prediction last.

    The default (the first candidate) stays first, except with ``search="prior"``.
    """
    ranked = sorted(candidates, key=lambda config: predicted_ms.get(config, math.inf))
    default = [] if policy.search == "prior" else candidates[:1]
    return list(dict.fromkeys([*default, *ranked]))


class PredictedRacing(Racing):
    """Race that samples candidates in their order and skips hopeless candidates.

    Args:
        predicted_ms: the predicted milliseconds of each candidate; ``inf``: unknown.
    """

    def __init__(
        self,
        candidates: Sequence[Config],
        policy: Policy,
        incumbent: Config | None,
        predicted_ms: Mapping[Config, float],
    ) -> None:
        super().__init__(candidates, policy, incumbent)
        self._all_candidates, self._predicted_ms = self._candidates, predicted_ms

    def _first_samples(self) -> Iterator[Request]:
        """Yield the requests of stage 1. The stage runs again if the fastest candidate fails. It
        then also samples skipped candidates that the new fastest one does not make hopeless."""
        self._candidates = []
        for config in self._all_candidates:
            sampled = self._samples.get(config.digest)
            if sampled or config.digest in self._protected or not self._is_hopeless(config):
                yield from self._sample([config], self._policy.rounds[0])
                self._candidates.append(config)

    def _is_hopeless(self, config: Config) -> bool:
        ranked, predicted = self._ranked(self._candidates), self._predicted_ms
        compared = [each for each in ranked if predicted[each] < math.inf]
        if len(compared) < _MIN_SAMPLED or predicted[config] == math.inf:
            return False
        if _strings(config) not in map(_strings, self._candidates):
            return False
        ratios = (max(self._low_estimate_ms(each), 1e-9) / predicted[each] for each in compared)
        logs = list(map(math.log, ratios))
        lowest = statistics.fmean(logs) - _NUM_STANDARD_DEVIATIONS * statistics.stdev(logs)
        return predicted[config] * math.exp(lowest) > self._low_estimate_ms(ranked[0])


def _strings(config: Config) -> list[str]:
    return [value for value in config.values() if isinstance(value, str)]
