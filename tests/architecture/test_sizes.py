"""Modules stay small enough to be read at one sitting."""

from __future__ import annotations

import statistics

import pytest

from tests.architecture.source import PACKAGE, modules, name

LONGEST = 400
LONGEST_KERNEL = 450
MEDIAN = 120
NINETIETH_PERCENTILE = 280


@pytest.fixture(scope="module")
def lines() -> dict[str, int]:
    return {
        name(path): len((PACKAGE / path).read_text(encoding="utf-8").splitlines())
        for path in modules()
    }


def test_no_module_is_too_long(lines: dict[str, int]) -> None:
    too_long = {
        module: count
        for module, count in lines.items()
        if count > (LONGEST_KERNEL if module.startswith("kernels/") else LONGEST)
    }
    assert not too_long


def test_most_modules_are_short(lines: dict[str, int]) -> None:
    # In kernels/ a file is one thought: what counts there is how many of them an op reaches
    # (test_reach.py), so that nobody slices one for a number.
    counts = [count for module, count in lines.items() if not module.startswith("kernels/")]
    assert statistics.median(counts) <= MEDIAN
    assert statistics.quantiles(counts, n=10)[-1] <= NINETIETH_PERCENTILE
