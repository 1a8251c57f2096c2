"""A mark of tests that say exactly which regions there are, and how large."""

from __future__ import annotations

import pytest

from triton_dist import knobs
from triton_dist.debugging.modes import checks_of

exact_memory = pytest.mark.skipif(
    "race" in checks_of(knobs.debug.get()),
    reason="interp:race adds its notes to symmetric memory, and they are listed with the rest",
)
