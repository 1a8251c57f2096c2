"""Facts that a tuning result depends on besides its key, and which of them may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from packaging.version import InvalidVersion, Version


class Difference(NamedTuple):
    """One thing that changed."""

    sentence: str
    patch_level: bool
    """A version whose ``major.minor`` (of a driver: branch) is the same: tolerated, unless
    versions are checked strictly."""
    constant: str = ""
    """The name of a value that the code reads or binds; the statement is not reported besides."""


DIFFERS = "differs by rank"
"""Reason for which a constant that a function binds does not count."""

_OWN_SETTING = "TRITON_DEFAULT_FP_FUSION=true"
"""Default of all supported versions of Triton; set wherever kernels are compiled."""

_CONSTANTS = ("literal", "bound", "uncounted")


@dataclass(frozen=True)
class Fingerprint:
    """Facts as text, by group. ``source`` has a digest for each function that is reached."""

    hardware: Mapping[str, str]
    software: Mapping[str, str]
    topology: Mapping[str, str]
    policy: Mapping[str, str]
    source: Mapping[str, str]
    space: str
    """Digest of the config space."""
    version: str = ""
    """Version that the function's author declares; empty: none."""
    literal: Mapping[str, str] = field(default_factory=dict)
    """Globals that the code reads and whose values stand in the source."""
    bound: Mapping[str, str] = field(default_factory=dict)
    """Values that functions were given when they were made, and that all ranks hold alike."""
    uncounted: Mapping[str, str] = field(default_factory=dict)
    """Constants that are not compared, and why."""

    def compare(self, now: Fingerprint) -> Iterator[Difference]:
        """Differences between what was recorded here and ``now``."""
        constants = list(self._compare_constants(now))
        named = {each.constant for each in constants}
        for group in fields(self):
            before, after = getattr(self, group.name), getattr(now, group.name)
            if isinstance(before, str) or group.name in _CONSTANTS:
                continue
            for name in sorted(before.keys() | after.keys()):
                old, new = before.get(name), after.get(name)
                if old != new and not (group.name == "source" and name.rpartition(":")[2] in named):
                    patch_level = (group.name == "software" and _same_release(old, new, 2)) or (
                        name == "driver" and _same_release(old, new, 1)  # 550.54 and 550.90 are one
                    )
                    yield Difference(_sentence(group.name, name, old, new), patch_level)
        yield from constants
        yield from self._compare_version(now)
        if self.space != now.space:
            yield Difference(
                f"config space: its digest was {self.space}, is {now.space}; the configs, their "
                "order, prune_fn, check_fn, reset_fn or restore changed",
                False,
            )

    def diff(self, now: Fingerprint) -> list[str]:
        """A sentence for each difference, naming the field and both values."""
        return [difference.sentence for difference in self.compare(now)]

    @property
    def settings(self) -> str:
        """Variables that are set and change code or its speed, such as ``CUDA_LAUNCH_BLOCKING=1``,
        separated by ``", "``; without the one that triton_dist sets itself."""
        given = self.software.get("settings", "").split(", ")
        return ", ".join(each for each in given if each != _OWN_SETTING)

    @property
    def constants(self) -> dict[str, str]:
        """All that count."""
        return {**self.literal, **self.bound}

    def _compare_constants(self, now: Fingerprint) -> Iterator[Difference]:
        before, after = self.constants, now.constants
        left_out = self.uncounted.keys() | now.uncounted.keys()
        for name in sorted((before.keys() | after.keys()) - left_out):
            old, new = before.get(name), after.get(name)
            if old != new:
                yield Difference(_sentence("constant", name, old, new), False, name)

    def _compare_version(self, now: Fingerprint) -> Iterator[Difference]:
        if self.version != now.version:
            old, new = (each.version or "not declared" for each in (self, now))
            yield Difference(f"version: that of the function was {old}, is {new}", False)


class OlderFingerprint(Fingerprint):
    """The fingerprint of a record of schema 1 to 3, whose digests of code are not comparable."""

    def compare(self, now: Fingerprint) -> Iterator[Difference]:
        for difference in super().compare(now):
            of_code = difference.sentence.startswith(("source: ", "config space: "))
            if not (of_code or difference.constant):
                yield difference
        yield Difference(
            "source: not comparable, as an older version of triton_dist wrote the record", False
        )


class ShippedFingerprint(Fingerprint):
    """Facts that a shipped result depends on: the hardware and topology that it names, and the
    version that the function's author declares.

    Versions of software, code and config space are not compared: who ships a result vouches for it
    until the declared version changes. ``software`` says what it was found with, for people.
    """

    def compare(self, now: Fingerprint) -> Iterator[Difference]:
        for group in ("hardware", "topology"):
            after = getattr(now, group)
            for name, old in sorted(getattr(self, group).items()):
                if old != after.get(name):
                    yield Difference(_sentence(group, name, old, after.get(name)), False)
        yield from self._compare_version(now)


def agreed(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """Each rank's fingerprint, in the order of ranks, without bound constants that ranks hold
    differently: these are noted as uncounted, alike on all ranks."""
    bound = {name for each in fingerprints for name in each.bound}
    held = [each.constants for each in fingerprints]
    alike = {
        name: held[0][name]
        for name in sorted(bound)
        if all(each.get(name, "") == held[0].get(name) for each in held)
    }
    uncounted = dict.fromkeys(sorted(bound - alike.keys()), DIFFERS)
    for each in reversed(fingerprints):
        uncounted |= each.uncounted
    return [
        replace(
            each,
            literal={name: text for name, text in each.literal.items() if name not in bound},
            bound=alike,
            uncounted=dict(sorted(uncounted.items())),
        )
        for each in fingerprints
    ]


def _sentence(group: str, name: str, old: str | None, new: str | None) -> str:
    if group == "source":
        if old is None:
            return f"source: {name} is reached now and was not"
        if new is None:
            return f"source: {name} was reached and is not now"
        return f"source: {name} changed"
    if group == "constant":
        return f"constant: {name} was {old or 'not read'}, is {new or 'not read'}"
    if name == "settings":
        return f"settings: they were {old or 'none'}, are {new or 'none'}"
    return f"{group}: {name} was {old or 'not recorded'}, is {new or 'not known'}"


def _same_release(old: str | None, new: str | None, parts: int) -> bool:
    """True if the first ``parts`` numbers agree; builds such as ``+cpu`` do not count."""
    if old is None or new is None:
        return False
    try:
        before, after = Version(old), Version(new)
    except InvalidVersion:
        return False
    return (before.epoch, before.release[:parts]) == (after.epoch, after.release[:parts])
