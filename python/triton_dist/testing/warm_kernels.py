"""Kernels, imported and rewritten as Triton's interpreter runs them, and the sources of all that is
tuned, read and parsed: importing this module does it.

The server that ranks are forked from imports it where they interpret. Each rank otherwise spends
half a second on the kernels, and one that tunes a second and a half on the sources: more than most
of what it is started for.
"""

from __future__ import annotations

import gc
import sys

from triton.runtime.interpreter import InterpretedFunction

import triton_dist.kernels.nvidia as ops  # all kernels
from triton_dist._tuning.source import source_of
from triton_dist.tune import AutoTuner


def rewrite() -> int:
    """Rewrite each kernel and device function of ours, and those of ``triton.language``; how many
    there are."""
    found = {
        value
        for name, module in list(sys.modules.items())
        if name.startswith(("triton_dist.", "triton.language"))
        for value in list(vars(module).values())
        if isinstance(value, InterpretedFunction)
    }
    for function in found:
        function.rewrite()
    return len(found)


def read_sources() -> int:
    """Read what each op's records depend on; how many ops there are. What a file says is kept."""
    found = [value for value in vars(ops).values() if isinstance(value, AutoTuner)]
    for op in found:
        source_of([op.fn])
    return len(found)


rewrite()
read_sources()
gc.freeze()  # nothing of it is garbage: a collection in a rank would only copy it
