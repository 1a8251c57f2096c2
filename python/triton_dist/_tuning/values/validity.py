"""Whether a record may be used now, and why not: the one judge of the tuner and of ``explain``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triton_dist._tuning.values.config import Config
from triton_dist._tuning.values.fingerprint import Fingerprint
from triton_dist._tuning.values.record import TuningRecord


@dataclass(frozen=True)
class Validity:
    """What a record's use fails on. Each sentence names the field, what was recorded and what is
    now."""

    reasons: tuple[str, ...]
    """Why it is not used; empty if it is."""
    tolerated: tuple[str, ...] = ()
    """What differs and is accepted: patch levels, unless versions are checked strictly."""


def validity(
    record: TuningRecord, now: Fingerprint, space: Iterable[Config], strict: bool
) -> Validity:
    """Judge ``record`` for a function that depends on ``now`` and chooses from ``space``.

    What is compared is the fingerprint's to say: of a shipped record less than of a user's own.

    Args:
        strict: a difference at patch level counts too (``TRITON_DIST_AUTOTUNE_VERSION_CHECK``).
    """
    differences = list(record.fingerprint.compare(now))
    reasons = [d.sentence for d in differences if strict or not d.patch_level]
    tolerated = [d.sentence for d in differences if not strict and d.patch_level]
    # Of one's own record, equal spaces have equal digests: this guards against edited ones. That of
    # a shipped record may have changed.
    if not reasons and all(config.digest != record.best.digest for config in space):
        reasons = [f"config space: the winner {record.best} is not in it"]
    return Validity(tuple(reasons), tuple(tolerated))
