"""The invariants of ``make mutants`` can still be broken as the table says."""

from __future__ import annotations

import pytest

from tests.architecture.source import PACKAGE
from tests.mutants.table import MUTANTS, Mutant

AREAS = (
    "wait", "release", "epoch", "reset", "bound", "row mask", "deferred tiles", "agreement",
    "routing", "route sum", "runner", "samples", "sizes", "store", "fp8",
    "expert parallel", "ulysses", "decode attention", "attention",
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.invariant)
def test_what_is_broken_stands_once_in_the_source(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.path).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old


def test_each_kind_is_broken_twice_at_least() -> None:
    kinds = [mutant.invariant.partition(":")[0].partition(" lock")[0] for mutant in MUTANTS]
    assert {kind: kinds.count(kind) >= 2 for kind in kinds} == dict.fromkeys(AREAS, True)
