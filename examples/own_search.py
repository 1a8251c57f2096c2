"""Tune with your own search, here with Optuna's ask-and-tell interface.

    scripts/python examples/own_search.py

If Optuna is not installed (``pip install optuna``), the program prints a message and ends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from triton_dist import tune


class OptunaSearch:
    """Tree-structured Parzen estimators with the interface of :class:`triton_dist.tune.Search`."""

    def __init__(self, values: Mapping[str, Sequence[Any]], seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=20)
        self._study, self._states = optuna.create_study(sampler=sampler), optuna.trial.TrialState
        self._values = {name: list(each) for name, each in values.items()}
        # Optuna chooses an index into each list of values. It treats near integers as similar.
        self._index_distributions = {
            name: optuna.distributions.IntDistribution(0, len(each) - 1)
            for name, each in self._values.items()
        }
        self._pending: list[tuple[dict[str, Any], Any]] = []

    def ask(self) -> dict[str, Any]:
        trial = self._study.ask(self._index_distributions)
        config = {name: self._values[name][index] for name, index in trial.params.items()}
        self._pending.append((config, trial))
        return config

    def tell(self, config: Mapping[str, Any], milliseconds: float | None) -> None:
        trial = next((trial for each, trial in self._pending if each == config), None)
        if trial is None:
            return  # the default config, which ask() did not return
        self._pending = [pair for pair in self._pending if pair[1] is not trial]
        if milliseconds is None:
            self._study.tell(trial, state=self._states.FAIL)
        else:
            self._study.tell(trial, milliseconds)


@tune.autotune(
    tune.Product(
        {"rows": range(1, 101), "columns": range(1, 101), "unroll": (1, 2, 4, 8)},
        where=lambda config: config["rows"] * config["columns"] <= 5000,
    ),
    key_fn=lambda x: x,
    search=OptunaSearch,
    effort="quick",
)
def wait(x: int, rows: int, columns: int, unroll: int) -> None:
    """Sleep; the time is shortest at 40 rows, 60 columns and an unrolling by 4."""
    time.sleep(1e-3 + 2e-5 * (abs(rows - 40) + abs(columns - 60)) + 1e-4 * abs(unroll - 4))


def main() -> None:
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError:
        print("optuna is not installed: nothing is tuned")
        return
    print(f"of {len(wait.config_space)} configs optuna chose {wait.best_config(1)}")


if __name__ == "__main__":
    main()
