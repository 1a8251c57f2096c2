"""Benchmarks over few configs: what they print and write does not depend on their number."""

from __future__ import annotations

import contextlib

from tests.distributed.calls import some_configs
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
