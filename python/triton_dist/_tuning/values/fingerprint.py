"""What a tuning result depends on besides its key, and what may change without invalidating it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from packaging.version import InvalidVersion, Version


class Difference(NamedTuple):
    """One thing that changed."""

    sentence: str
    patch_level: bool
    """A version whose ``major.minor`` (of a driver: branch) is the same: tolerated, unless
    versions are checked strictly."""


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
    """What the function's author declares it to be; empty: nothing."""

    def compare(self, now: Fingerprint) -> Iterator[Difference]:
        """What is different ``now`` from what was recorded here."""
        for field in fields(self):
            before, after = getattr(self, field.name), getattr(now, field.name)
            if isinstance(before, str):
                continue
            for name in sorted(before.keys() | after.keys()):
                old, new = before.get(name), after.get(name)
                if old != new:
                    patch_level = (field.name == "software" and _same_release(old, new, 2)) or (
                        name == "driver" and _same_release(old, new, 1)  # 550.54 and 550.90 are one
                    )
                    yield Difference(_sentence(field.name, name, old, new), patch_level)
        yield from self._compare_version(now)
        if self.space != now.space:
            yield Difference(
                f"config space: its digest was {self.space}, is {now.space}; the configs, their "
                "order, prune_fn or check_fn changed",
                False,
            )

    def diff(self, now: Fingerprint) -> list[str]:
        """A sentence for each difference, naming the field and both values."""
        return [difference.sentence for difference in self.compare(now)]

    def _compare_version(self, now: Fingerprint) -> Iterator[Difference]:
        if self.version != now.version:
            old, new = (each.version or "not declared" for each in (self, now))
            yield Difference(f"version: that of the function was {old}, is {new}", False)


class ShippedFingerprint(Fingerprint):
    """What a shipped result depends on: the hardware and topology that it names, and the version
    that the function's author declares.

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


def _sentence(group: str, name: str, old: str | None, new: str | None) -> str:
    if group == "source":
        if old is None:
            return f"source: {name} is reached now and was not"
        if new is None:
            return f"source: {name} was reached and is not now"
        return f"source: {name} changed, its digest was {old}, is {new}"
    return f"{group}: {name} was {old or 'not recorded'}, is {new or 'not known'}"


def _same_release(old: str | None, new: str | None, parts: int) -> bool:
    """Whether the first ``parts`` numbers agree; builds such as ``+cpu`` do not count."""
    if old is None or new is None:
        return False
    try:
        before, after = Version(old), Version(new)
    except InvalidVersion:
        return False
    return (before.epoch, before.release[:parts]) == (after.epoch, after.release[:parts])
