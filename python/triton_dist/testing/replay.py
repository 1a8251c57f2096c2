"""Recorded spaces: what a search would have done on hardware that is not here.

A recorded space has the times of every config, each run many times, so any search can be replayed
on it and judged by runs that it did not see.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_dist._tuning.values import (
    Config,
    Failure,
    FailureKind,
    Measurement,
    Outcome,
    Policy,
    Request,
)
from triton_dist.errors import CandidateFailed

_KINDS: dict[str, FailureKind] = {
    "compile": "compile",
    "runtime": "launch",
    "timeout": "timeout",
    "constraints": "pruned",
}


@dataclass(frozen=True)
class RecordedSpace:
    """Every config of a space with the milliseconds of its runs, or why it has none."""

    name: str
    configs: tuple[Config, ...]
    runs: Mapping[str, tuple[float, ...] | Failure]
    """By the config's digest, in the order in which they were recorded."""

    @classmethod
    def read(cls, path: Path) -> RecordedSpace:
        """A space in the T4 format of the autotuning community: JSON, most often gzipped.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not in that format; says what is missing.
        """
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return cls.parse(text, path.name.partition(".")[0].removesuffix("_T4"))

    @classmethod
    def parse(cls, text: str | bytes, name: str) -> RecordedSpace:
        """The space in a text of that format. Raises ``ValueError`` like :meth:`read`."""
        configs: list[Config] = []
        runs: dict[str, tuple[float, ...] | Failure] = {}
        try:
            for result in json.loads(text)["results"]:
                config = Config(result["configuration"])
                configs.append(config)
                runs[config.digest] = _runs(result)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{name} is no space in T4 format: {error!r}") from error
        return cls(name, tuple(configs), runs)


def _runs(result: Mapping[str, Any]) -> tuple[float, ...] | Failure:
    invalidity = result["invalidity"]
    if invalidity == "correct":
        return tuple(map(float, result["times"]["runtimes"]))
    return Failure(_KINDS.get(invalidity, "wrong_result"), f"recorded as {invalidity!r}")


class Replay:
    """A function whose runs take as long as the recorded ones.

    Runs of a config are taken in order; after the last, the first comes again.

    Attributes:
        milliseconds: what all runs so far took together, untimed ones included.
    """

    def __init__(self, runs: Mapping[str, Sequence[float] | Failure]) -> None:
        self._runs = runs
        self._taken: dict[str, int] = {}
        self.milliseconds = 0.0

    def __call__(self, /, **config: Any) -> None:
        """One run, of the config with these values."""
        self.run(Config(config))

    def run(self, config: Config) -> None:
        """One run.

        Raises:
            CandidateFailed: it was recorded as a failure.
        """
        runs = self._runs[config.digest]
        if isinstance(runs, Failure):
            raise CandidateFailed(f"{config}: {runs}")
        taken = self._taken.get(config.digest, 0)
        self._taken[config.digest] = taken + 1
        self.milliseconds += runs[taken % len(runs)]

    def attempt(self, request: Request, policy: Policy) -> Outcome:
        """The outcome of ``request`` in a tuning: the first time, the config is run once before it
        is measured."""
        runs = self._runs[request.config.digest]
        if isinstance(runs, Failure):
            return runs
        if request.config.digest not in self._taken:
            self.run(request.config)
        times = []
        for _ in range(policy.warmup + request.samples):
            begin = self.milliseconds
            self.run(request.config)
            times.append(self.milliseconds - begin)
        return Measurement(tuple(times[policy.warmup :]), policy.warmup)
