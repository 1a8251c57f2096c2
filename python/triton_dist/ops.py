"""Build an op in your own package: its context, its algorithms and its tuned function.

These names are public, and so are ``triton_dist.runtime.symmetric.allocate`` and the classes of
``triton_dist.testing.opinfo.base``. Other names of ``triton_dist.kernels.common`` are private.
"""

from triton_dist.kernels.common.context import Buffer, Memory, OpContext
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall, op
from triton_dist.kernels.common.peers import current_flag, timeout_words_at
from triton_dist.kernels.common.slots.epochs import EpochSlots
from triton_dist.runtime.launch import Launch

__all__ = [
    "Algorithm",
    "Algorithms",
    "Buffer",
    "EpochSlots",
    "Launch",
    "Memory",
    "OpCall",
    "OpContext",
    "current_flag",
    "op",
    "timeout_words_at",
]
