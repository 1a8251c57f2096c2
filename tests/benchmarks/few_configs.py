"""Benchmarks over few configs: what they print and write does not depend on their number."""

from __future__ import annotations

import contextlib

from tests.distributed.calls import some_configs
from tests.docs.run_blocks import run_program
from triton_dist.testing.opinfo import OPINFOS


def run_with_few_configs(ops: tuple[str, ...], path: str, *arguments: str) -> str:
    """Return what the program at ``path`` prints in this rank, which tunes ``ops`` quickly."""
    with contextlib.ExitStack() as stack:
        for op in ops:
            stack.enter_context(some_configs(OPINFOS[op].op))
        return run_program(path, *arguments)
