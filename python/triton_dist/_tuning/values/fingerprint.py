"""Define the facts that a tuning result depends on, apart from its key, and compare them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from triton_dist._tuning.values import codec


class Difference(NamedTuple):
    """One changed fact."""

    sentence: str
    patch_level: bool
    """True if only the patch level of a version differs: ``major.minor``, or the branch of a
    driver, is equal. Tolerated unless versions are checked strictly."""
    constant: str = ""
    """Name of the constant that changed; its statement is then not reported in addition."""


DIFFERS = "differs by rank"
"""Reason recorded for a bound constant that is not compared."""

_OWN_SETTING = "TRITON_DEFAULT_FP_FUSION=true"
"""Setting that triton_dist makes in each process that compiles; Triton's default."""

_CONSTANTS = ("literal", "bound", "uncounted")


@dataclass(frozen=True)
class Fingerprint:
    """Facts as text, by group. ``source`` has digests of the statements that the code runs."""

    hardware: Mapping[str, str]
    software: Mapping[str, str]
    topology: Mapping[str, str]
    policy: Mapping[str, str]
    source: Mapping[str, str]
    space: str
    """Digest of the config space."""
    version: str = ""
    """Version declared by the author of the function; empty if not declared."""
    literal: Mapping[str, str] = field(default_factory=dict)
    """Globals that the code reads and whose values are literals in the source."""
    bound: Mapping[str, str] = field(default_factory=dict)
    """Values that functions bind, such as closure cells, and that are equal on all ranks."""
    uncounted: Mapping[str, str] = field(default_factory=dict)
    """Constants that are not compared, each with the reason."""

    def compare(self, now: Fingerprint) -> Iterator[Difference]:
        """Yield the differences between this recorded fingerprint and ``now``."""
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
                        name == "driver" and _same_release(old, new, 1)  # 550.54 equals 550.90
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
        """Return one sentence per difference, which names the field and both values."""
        return [difference.sentence for difference in self.compare(now)]

    @property
    def settings(self) -> str:
        """Environment settings that change code or its speed, such as ``CUDA_LAUNCH_BLOCKING=1``.

        Separated by ``", "``. The setting that triton_dist makes itself is left out.
        """
        given = self.software.get("settings", "").split(", ")
        return ", ".join(each for each in given if each != _OWN_SETTING)

    @property
    def constants(self) -> dict[str, str]:
        """All constants that are compared."""
        return {**self.literal, **self.bound}

    @property
    def digest(self) -> str:
        """Digest of everything that is compared, without patch levels."""
        software = {name: _release(text, 2) for name, text in self.software.items()}
        hardware = dict[str, codec.Tree](self.hardware)
        if "driver" in hardware:
            hardware["driver"] = _release(self.hardware["driver"], 1)
        constants = {n: text for n, text in self.constants.items() if n not in self.uncounted}
        exact = map(dict, (self.topology, self.policy, self.source, constants))
        return codec.digest(software, hardware, *exact, self.version, self.space)

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
            yield Difference(f"version: the version of the function was {old}, is {new}", False)


class OlderFingerprint(Fingerprint):
    """The fingerprint of a record of schema 1 to 3, whose digests of code are not comparable."""

    def compare(self, now: Fingerprint) -> Iterator[Difference]:
        for difference in super().compare(now):
            of_code = difference.sentence.startswith(("source: ", "config space: "))
            if not (of_code or difference.constant):
                yield difference
        yield Difference(
            "source: not comparable, because an older version of triton_dist wrote the record",
            False,
        )


class ShippedFingerprint(Fingerprint):
    """Facts that a shipped result depends on: hardware, topology, and the declared version.

    Software versions, code and config space are not compared. The author of the function vouches
    for the result until the declared version changes. ``software`` records the versions used for
    tuning, for information only.
    """

    def compare(self, now: Fingerprint) -> Iterator[Difference]:
        for group in ("hardware", "topology"):
            after = getattr(now, group)
            for name, old in sorted(getattr(self, group).items()):
                if old != after.get(name):
                    yield Difference(_sentence(group, name, old, after.get(name)), False)
        yield from self._compare_version(now)


def with_common_constants(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """Return the fingerprint of each rank after agreement on bound constants.

    A bound constant that differs between ranks becomes uncounted on all ranks. The order of ranks
    is kept.
    """
    bound = {name for each in fingerprints for name in each.bound}
    first, *others = (each.constants for each in fingerprints)
    common = {
        name: first[name]
        for name in sorted(bound)
        if name in first and all(other.get(name, "") == first[name] for other in others)
    }
    uncounted = dict.fromkeys(sorted(bound - common.keys()), DIFFERS)
    for each in reversed(fingerprints):
        uncounted |= each.uncounted
    return [
        replace(
            each,
            literal={name: text for name, text in each.literal.items() if name not in bound},
            bound=common,
            uncounted=dict(sorted(uncounted.items())),
        )
        for each in fingerprints
    ]


def _sentence(group: str, name: str, old: str | None, new: str | None) -> str:
    if group == "source":
        if old is None:
            return f"source: {name} is reached now, but was not"
        if new is None:
            return f"source: {name} was reached, but is not now"
        return f"source: {name} changed"
    if group == "constant":
        return f"constant: {name} was {old or 'not read'}, is {new or 'not read'}"
    if name == "settings":
        return f"settings: they were {old or 'none'}, are {new or 'none'}"
    return f"{group}: {name} was {old or 'not recorded'}, is {new or 'not known'}"


def _release(text: str, parts: int) -> list[int] | str:
    """Return the epoch and the first ``parts`` numbers of a version, or any other text as it is."""
    try:
        version = Version(text)
    except InvalidVersion:
        return text
    return [version.epoch, *version.release[:parts]]


def _same_release(old: str | None, new: str | None, parts: int) -> bool:
    """Return whether the first ``parts`` numbers are equal; builds such as ``+cpu`` are ignored."""
    if old is None or new is None:
        return False
    before, after = _release(old, parts), _release(new, parts)
    return before == after and isinstance(before, list)
