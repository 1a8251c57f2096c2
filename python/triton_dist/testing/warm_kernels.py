"""Prepare interpreted kernels when this module is imported, so that forked ranks need not.

If ranks interpret kernels, the fork server of ``spawn_ranks`` imports this module once. This saves
3.5 s in each rank: 0.5 s to rewrite kernels, 1.5 s to read the sources on which records depend, and
1.5 s to import ``torch.distributed.tensor`` and ``torch._dynamo``, which layers use.
"""

from __future__ import annotations

import gc
import sys

import torch._dynamo  # noqa: F401  # custom ops of layers import it
from triton.runtime.interpreter import InterpretedFunction

import triton_dist.kernels.nvidia as ops  # all kernels
import triton_dist.layers.nvidia  # noqa: F401
from triton_dist._tuning.source import source_of
from triton_dist.tune import AutoTuner


def rewrite() -> int:
    """Rewrite each kernel of this package and of ``triton.language``; return their number."""
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
    """Read and cache the files that the ops' records depend on; return the number of ops."""
    found = [value.fn for value in vars(ops).values() if isinstance(value, AutoTuner)]
    source_of(found)  # all ops in one call, because they share most source
    return len(found)


rewrite()
read_sources()
gc.freeze()  # a garbage collection of these objects in a rank would copy their memory pages
