"""The next question of a search."""

from __future__ import annotations

from dataclasses import dataclass

from triton_dist._tuning.values.config import Config


@dataclass(frozen=True)
class Request:
    """Measure ``config`` with so many timed samples, now.

    A config may be asked for again: its samples are put together, and all but measuring (prepare,
    first run, check) is done at the first request alone.
    """

    config: Config
    samples: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"a request for {self.samples} samples measures nothing")
