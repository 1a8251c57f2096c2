"""Judgement on the records of a tuned function that can be imported."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from triton_dist import knobs
from triton_dist._tuning.values import (
    Config,
    ConfigSpace,
    Fingerprint,
    Key,
    TuningRecord,
    Validity,
    validity,
)

if TYPE_CHECKING:
    from triton_dist.tune import AutoTuner


class Judge:
    """A tuner's answer about records, without a call's arguments.

    Args:
        ranks: facts of the group that would call the function, by their names in the fingerprint;
            this process is alone, so others are taken to be the recorded ones.
    """

    def __init__(self, tuned: AutoTuner, ranks: Mapping[str, str]) -> None:
        self._tuned, self._ranks, self._whole = tuned, ranks, tuned.fingerprint()

    def validity(self, record: TuningRecord, key: Key) -> Validity:
        """Reasons for and against ``record`` for a call with this key."""
        space = self._space(key)
        return self._validity(record, self._live(space), space)

    def _validity(self, record: TuningRecord, live: Fingerprint, space: ConfigSpace) -> Validity:
        topology = {**live.topology, **record.fingerprint.topology, **self._ranks}
        now = dataclasses.replace(live, topology=topology)
        return validity(record, now, space, knobs.autotune_version_check.get())

    def is_stale(self, record: TuningRecord) -> bool | None:
        """True if no call on this hardware can use ``record`` again; ``None`` if it was made on
        other hardware, of which nothing is known here. A call under the settings that ``record``
        was made under can."""
        if record.fingerprint.hardware.get("gpu") != self._whole.hardware.get("gpu"):
            return None
        space = self._space(record.key)
        live = self._live(space)
        made = record.fingerprint.software
        settings = {"settings": made["settings"]} if "settings" in made else {}
        software = {name: fact for name, fact in live.software.items() if name != "settings"}
        live = dataclasses.replace(live, software=software | settings)
        return bool(self._validity(record, live, space).reasons)

    def under(self, key: Key) -> Key:
        """The key by which a call here looks for records."""
        return key.under(self._live(self._space(key)))

    def _live(self, space: ConfigSpace) -> Fingerprint:
        whole = space is self._tuned.config_space
        return self._whole if whole else self._tuned.fingerprint(space)

    def _space(self, key: Key) -> ConfigSpace:
        """The space that such a call chooses from: without the names that it gave a value for."""
        space: ConfigSpace = self._tuned.config_space
        if key.given is None:
            return space
        text, digest = key.given
        try:
            given = Config(ast.literal_eval(text.removeprefix("with ")))
        except (ValueError, SyntaxError):  # values that are no literals
            given = Config({})
        return space.without(given) if given.digest == digest else space
