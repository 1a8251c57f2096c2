"""Addresses of the peers' memory, which kernels read from tables."""

from __future__ import annotations

import triton.language as tl

from triton_dist._jit import jit

# Bytes of which every target is a multiple. The compiler knows nothing of an address from a table;
# without this it stores 2 bytes at a time.
TARGET_ALIGNMENT = tl.constexpr(16)


@jit
def target_at(targets_ptr, slab, like_ptr):
    """Address to which the tiles of ``slab`` go. The hint stands here, since one on the result of
    a call is lost when the call is inlined (Triton 3.6)."""
    return tl.multiple_of(tl.load(targets_ptr + slab).to(like_ptr.dtype), TARGET_ALIGNMENT)
