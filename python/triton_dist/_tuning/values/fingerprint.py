"""Define the fingerprint: everything that a tuning result depends on, apart from its key.

A fingerprint is stored with each result. A result is used only while its fingerprint matches the
present fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from triton_dist._tuning.values import codec


class Difference(NamedTuple):
    """One difference between two fingerprints."""

    sentence: str
    is_patch_level: bool
    """True if only the patch level of a version differs: ``major.minor`` is equal, or the major
    version of a driver. Tolerated unless versions are checked strictly."""
    constant: str = ""
    """Name of the constant that changed, if any. The statement that defines it is then not reported
    as a further difference."""


DIFFERS_BY_RANK = "differs by rank"
"""Reason in :attr:`Fingerprint.uncounted` for a bound value that differs between ranks."""

_DEFAULT_SETTING = "TRITON_DEFAULT_FP_FUSION=true"
"""Triton's default, which triton_dist sets in each process that compiles."""

_CONSTANT_GROUPS = ("literal", "bound", "uncounted")


@dataclass(frozen=True)
class Fingerprint:
    """What a tuning result depends on, as text. Each mapping is from name to text."""

    hardware: Mapping[str, str]
    """GPU and driver."""
    software: Mapping[str, str]
    """Versions of libraries, and environment settings that change compiled code."""
    topology: Mapping[str, str]
    """Number of ranks and their placement on hosts."""
    policy: Mapping[str, str]
    """How candidates were measured and how many were tried."""
    source: Mapping[str, str]
    """Digests of the Python statements that the function may run, by qualified name."""
    space: str
    version: str = ""
    """Version declared by the author of the function; empty if not declared."""
    literal: Mapping[str, str] = field(default_factory=dict)
    """Constants: globals that the code reads and that the source assigns a literal value."""
    bound: Mapping[str, str] = field(default_factory=dict)
    """Constants whose values are known at run time only, such as closure cells. Values that differ
    between ranks are left out."""
    uncounted: Mapping[str, str] = field(default_factory=dict)
    """Constants that are not compared, with the reason for each."""

    def compare(self, present: Fingerprint) -> Iterator[Difference]:
        """Yield the differences between this recorded fingerprint and ``present``."""
        constants = list(self._compare_constants(present))
        changed_constants = {each.constant for each in constants}
        for group in fields(self):
            before, after = getattr(self, group.name), getattr(present, group.name)
            if isinstance(before, str) or group.name in _CONSTANT_GROUPS:
                continue
            for name in sorted(before.keys() | after.keys()):
                old, new = before.get(name), after.get(name)
                is_constant = (
                    group.name == "source" and name.rpartition(":")[2] in changed_constants
                )
                if old != new and not is_constant:
                    is_patch_level = (group.name == "software" and _same_release(old, new, 2)) or (
                        name == "driver" and _same_release(old, new, 1)  # 550.54 equals 550.90
                    )
                    yield Difference(_sentence(group.name, name, old, new), is_patch_level)
        yield from constants
        yield from self._compare_version(present)
        if self.space != present.space:
            yield Difference(
                f"config space: its digest was {self.space}, is {present.space}; the configs, "
                "their order, prune_fn, check_fn, reset_fn or restore changed",
                False,
            )

    def diff(self, present: Fingerprint) -> list[str]:
        """Return one sentence per difference. Each sentence has the name and both values."""
        return [difference.sentence for difference in self.compare(present)]

    @property
    def settings(self) -> str:
        """Environment settings that change compiled code or its speed, such as
        ``CUDA_LAUNCH_BLOCKING=1``.

        They are separated by ``", "``. The setting that triton_dist makes itself is left out.
        """
        settings = self.software.get("settings", "").split(", ")
        return ", ".join(each for each in settings if each != _DEFAULT_SETTING)

    @property
    def constants(self) -> dict[str, str]:
        """The text of each literal or bound constant, by name."""
        return {**self.literal, **self.bound}

    @property
    def digest(self) -> str:
        """Digest of everything that :meth:`compare` compares, except patch levels of versions."""
        software = {name: _release(text, 2) for name, text in self.software.items()}
        hardware = dict[str, codec.Tree](self.hardware)
        if "driver" in hardware:
            hardware["driver"] = _release(self.hardware["driver"], 1)
        constants = {n: text for n, text in self.constants.items() if n not in self.uncounted}
        exact = map(dict, (self.topology, self.policy, self.source, constants))
        return codec.digest(software, hardware, *exact, self.version, self.space)

    def _compare_constants(self, present: Fingerprint) -> Iterator[Difference]:
        before, after = self.constants, present.constants
        uncounted = self.uncounted.keys() | present.uncounted.keys()
        for name in sorted((before.keys() | after.keys()) - uncounted):
            old, new = before.get(name), after.get(name)
            if old != new:
                yield Difference(_sentence("constant", name, old, new), False, name)

    def _compare_version(self, present: Fingerprint) -> Iterator[Difference]:
        if self.version != present.version:
            old, new = (each.version or "not declared" for each in (self, present))
            yield Difference(f"version: the version of the function was {old}, is {new}", False)


class OlderFingerprint(Fingerprint):
    """Fingerprint of a record in an older format (schema 1 to 3).

    In these formats, digests of code were computed differently, so a comparison always differs.
    """

    def compare(self, present: Fingerprint) -> Iterator[Difference]:
        for difference in super().compare(present):
            is_about_code = difference.sentence.startswith(("source: ", "config space: "))
            if not (is_about_code or difference.constant):
                yield difference
        yield Difference(
            "source: not comparable, because an older version of triton_dist wrote the record",
            False,
        )


class ShippedFingerprint(Fingerprint):
    """Fingerprint of a result that is shipped in a pack (a file of results for other machines).

    Only hardware, topology and the declared version are compared. Software versions, code and
    config space are not: the author of the function vouches for the result until the declared
    version changes. ``software`` has the versions used for tuning, for information only.
    """

    def compare(self, present: Fingerprint) -> Iterator[Difference]:
        for group in ("hardware", "topology"):
            after = getattr(present, group)
            for name, old in sorted(getattr(self, group).items()):
                if old != after.get(name):
                    yield Difference(_sentence(group, name, old, after.get(name)), False)
        yield from self._compare_version(present)


def with_equal_bound_constants(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """Return the fingerprints of all ranks, in order, with equal bound constants.

    A bound constant that differs between ranks becomes uncounted on all ranks.
    """
    bound = {name for each in fingerprints for name in each.bound}
    first, *others = (each.constants for each in fingerprints)
    common = {
        name: first[name]
        for name in sorted(bound)
        if name in first and all(other.get(name, "") == first[name] for other in others)
    }
    uncounted = dict.fromkeys(sorted(bound - common.keys()), DIFFERS_BY_RANK)
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
    """Return the epoch and the first ``parts`` numbers of a version; other text unchanged."""
    try:
        version = Version(text)
    except InvalidVersion:
        return text
    return [version.epoch, *version.release[:parts]]


def _same_release(old: str | None, new: str | None, parts: int) -> bool:
    """Return whether both are versions and their first ``parts`` numbers are equal."""
    if old is None or new is None:
        return False
    before, after = _release(old, parts), _release(new, parts)
    return before == after and isinstance(before, list)
