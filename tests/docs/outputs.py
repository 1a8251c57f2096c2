"""Whether a block prints what its page shows."""

from __future__ import annotations

import doctest

import pytest

from tests.docs.markdown import Block


def check_output(block: Block, printed: str) -> None:
    """Compare with the page's ``text output``, if it has one; ``...`` stands for anything."""
    if block.expected is None:
        return
    checker, example = doctest.OutputChecker(), doctest.Example(block.text, block.expected)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not checker.check_output(block.expected, printed, flags):
        pytest.fail(f"{block.id}\n{checker.output_difference(example, printed, flags)}")
