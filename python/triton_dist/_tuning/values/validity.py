"""Judges whether a record may be used now, for the tuner and for ``explain``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from triton_dist._tuning.values.config import ConfigSpace
from triton_dist._tuning.values.fingerprint import Difference, Fingerprint
from triton_dist._tuning.values.record import TuningRecord


@dataclass(frozen=True)
class Validity:
    """Judgement on a record. Each sentence names the field, what was recorded and what is now."""

    reasons: tuple[str, ...]
    """Reasons for not using it; empty if it is used."""
    tolerated: tuple[str, ...] = ()
    """Differences that are accepted: patch levels, unless versions are checked strictly."""


def validity(record: TuningRecord, now: Fingerprint, space: ConfigSpace, strict: bool) -> Validity:
    """Judge ``record`` for a function that depends on ``now`` and chooses from ``space``.

    What is compared is the fingerprint's to say: of a shipped record less than of a user's own.

    Args:
        strict: a difference at patch level counts too (``TRITON_DIST_AUTOTUNE_VERSION_CHECK``).
    """
    differences = list(_told(record.fingerprint, now))
    reasons = [d.sentence for d in differences if strict or not d.patch_level]
    tolerated = [d.sentence for d in differences if not strict and d.patch_level]
    # Of one's own record, equal spaces have equal digests: this guards against edited ones. That of
    # a shipped record may have changed.
    best = record.best
    if not reasons and space.find(best.digest, best.config) is None:
        reasons = [f"config space: the winner {best} is not in it"]
    return Validity(tuple(reasons), tuple(tolerated))


_INTERPRETER = " (interpreter)"
"""Ends the name of a GPU, or of none, whose kernels are interpreted."""


def _told(then: Fingerprint, now: Fingerprint) -> Iterator[Difference]:
    """Differences to be told. If kernels were interpreted then and are not now, or the other way
    round, or if it is another GPU, that is said alone: driver, libraries, code and config space may
    all be others for that one reason, and explain nothing."""
    was, is_ = (each.hardware.get("gpu", "") for each in (then, now))
    if was == is_:
        yield from then.compare(now)
    elif was.endswith(_INTERPRETER) == is_.endswith(_INTERPRETER):
        yield from (d for d in then.compare(now) if d.sentence.startswith("hardware: gpu "))
    elif was.removesuffix(_INTERPRETER) == is_.removesuffix(_INTERPRETER):
        made = (
            "with TRITON_INTERPRET=1, which is not set"
            if was.endswith(_INTERPRETER)
            else ("without TRITON_INTERPRET=1, which is set")
        )
        yield Difference(f"it was made {made} now", False)
    else:
        how = "with" if was.endswith(_INTERPRETER) else "without"
        yield Difference(f"it was made {how} TRITON_INTERPRET=1, on {was}; now it is {is_}", False)
