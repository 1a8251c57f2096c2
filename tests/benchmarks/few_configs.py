"""Benchmarks over few configs: what they print and write does not depend on their number."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from unittest import mock

from tests.distributed.calls import some_configs, with_few_samples
from tests.docs.run_blocks import run_program
from triton_dist.testing.opinfo import OPINFOS


def run_with_few_configs(ops: dict[str, int], path: str, *arguments: str) -> str:
    """Return what the program at ``path`` prints in this rank.

    ``ops`` has the number of configs over which each op is tuned.
    """
    with contextlib.ExitStack() as stack:
        for name, most in ops.items():
            stack.enter_context(some_configs(OPINFOS[name].op, most))
        return run_program(path, *arguments)


def run_with_few_samples(ops: Sequence[str], path: str, *arguments: str) -> str:
    """Return what the program at ``path`` prints. All configs of ``ops`` are tuned."""
    with contextlib.ExitStack() as stack:
        for name in ops:
            op = OPINFOS[name].op
            patch = mock.patch.object(op, "_components_for", with_few_samples(op._components_for))
            stack.enter_context(patch)
        return run_program(path, *arguments)
