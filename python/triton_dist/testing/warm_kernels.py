"""Kernels, imported and rewritten as Triton's interpreter runs them: importing this module does it.

The server that ranks are forked from imports it where they interpret. Each rank otherwise spends
half a second on the same, more than most of what it is started for.
"""

from __future__ import annotations

import gc
import sys

from triton.runtime.interpreter import InterpretedFunction

import triton_dist.kernels.nvidia  # noqa: F401  # all kernels


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


rewrite()
gc.freeze()  # nothing of it is garbage: a collection in a rank would only copy it
