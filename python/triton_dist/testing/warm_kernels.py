"""Import, rewrite and parse all kernels and sources at import of this module.

The fork server imports it if ranks interpret kernels. Without this import, each rank would need 0.5
s for the kernels, and another 1.5 s each if it tunes (sources) or calls layers
(``torch.distributed.tensor`` and ``torch._dynamo``), which is more than most tests take.
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
    source_of(found)  # one slice for all ops, because they share most statements
    return len(found)


rewrite()
read_sources()
gc.freeze()  # these objects are never garbage; a collection in a rank would only copy pages
