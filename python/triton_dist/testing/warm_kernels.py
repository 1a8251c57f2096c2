"""Prepare interpreted kernels when this module is imported, so that forked ranks need not.

The fork server of ``spawn_ranks`` imports this module if ranks interpret kernels. In each rank, the
kernels would take 0.5 s; the sources that tuning reads, 1.5 s; ``torch.distributed.tensor`` and
``torch._dynamo``, which layers need, 1.5 s. Together this exceeds the time of most tests.
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
