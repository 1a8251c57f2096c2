"""What an earlier version has tuned is found, or one sentence says why not.

``data/cache_of_schema_2`` was written by the version before records had a hash of their trials. (Of
what comes with the package, ``tests/kernels/test_shipped_records.py`` shows the same.)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tuning import earlier
from triton_dist import knobs
from triton_dist._tuning import shared
from triton_dist._tuning.store import FileStore
from triton_dist._tuning.values import TuningRecord
from triton_dist.errors import TuningFrozen, TuningWarning
from triton_dist.runtime.device import detect
from triton_dist.runtime.device.cpu import CpuDevice

DATA = Path(__file__).parent / "data" / "cache_of_schema_2"


def given() -> TuningRecord:
    with pytest.warns(TuningWarning, match="stages=2 overwrites"):
        return earlier.two_tunables.tune(
            torch.ones(2, 3), stages=2, autotune_allow_arg_overwrite=True
        )


# By function and key, as they are shown.
RECORDS: dict[str, Callable[[], Any]] = {
    "plain 7": lambda: earlier.plain.tune(7),
    "two_tunables ((2, 3), (3, 1), torch.float32)": lambda: earlier.two_tunables.tune(
        torch.ones(2, 3)
    ),
    "two_tunables ((2, 3), (3, 1), torch.float32) with {'stages': 2}": given,
    "tests.tuning.earlier.double_kernel (100, 'torch.float32', 'torch.float32')": (
        lambda: earlier.doubled(torch.ones(100))
    ),
}


def stored() -> dict[str, TuningRecord]:
    records = [each.record for each in FileStore(DATA).records()]
    return {f"{record.key.function} {record.key}": record for record in records}


class ThatHost(CpuDevice):
    """Where they were tuned."""

    def __init__(self, facts: Mapping[str, str]) -> None:
        self._facts = facts

    def facts(self) -> Mapping[str, str]:
        return self._facts


@pytest.fixture
def there(monkeypatch) -> Callable[[TuningRecord], None]:
    """Puts this process where a record was made, with a copy of the folder, and forbids to tune."""
    cache = knobs.cache_dir.get()
    shutil.copytree(DATA, cache)
    monkeypatch.setenv("TRITON_DIST_DEVICE", "cpu")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    for function in (earlier.plain, earlier.two_tunables, earlier.doubled):
        function.clear()

    def put(record: TuningRecord) -> None:
        device = ThatHost(record.fingerprint.hardware)
        monkeypatch.setattr(detect, "_cpu", lambda: device)
        monkeypatch.setattr(shared, "software_versions", lambda: dict(record.fingerprint.software))

    return put


def test_the_table_has_every_record_of_the_folder():
    assert stored().keys() == RECORDS.keys()
    assert len(RECORDS) == len(list(DATA.rglob("*.json")))


@pytest.mark.parametrize("name", RECORDS)
def test_one_sentence_says_why_it_is_not_used(name, there):
    there(stored()[name])
    with pytest.raises(TuningFrozen, match="source: not comparable, because an older version"):
        RECORDS[name]()
