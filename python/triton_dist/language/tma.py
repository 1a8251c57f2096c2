"""Visibility of TMA stores."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.language import target_info

from triton_dist._jit import jit
from triton_dist.language._spin import INTERPRETED
from triton_dist.runtime import waits


def _barrier_interpreted() -> None:
    if waits.on_publish is not None:
        waits.on_publish()


_barrier: Any = _barrier_interpreted if INTERPRETED.value else tl.debug_barrier


@jit
def publish_tile():
    """Make the program's TMA stores visible to other GPUs; call it between stores and ``notify``.

    After a TMA store, Triton 3.6 waits only until the store has *read* shared memory, and moves
    even this wait into the next iteration. Without this call, the flag could become visible before
    the data (seen in PTX for sm_90). Triton 3.9 waits until the store is complete; waiting again
    here is cheap. Below compute capability 9.0, descriptor stores are ordinary stores and a barrier
    suffices. In the interpreter, this function only informs the race check
    (``TRITON_DIST_DEBUG=interp:race``).
    """
    if not INTERPRETED and target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, $1;",
            "=r,r",
            [0],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    _barrier()
