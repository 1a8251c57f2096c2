"""Functions for use inside kernels, interpreted or compiled.

Flags use ``tl`` atomics with ``sem`` and ``scope``. The three pieces of inline assembly are no-ops
in the interpreter and below the compute capability that they need.

    symm_at        return the address of a symmetric region on a peer
    notify         set a flag or add to it, after all stores of the program (release)
    wait           spin until flags reach a value (acquire); return a token
    consume_token  order a load after the wait that returned the token
    give_turn      yield before polling the results of other programs of the grid
    only_rows      declare which rows of a descriptor's load are used, for debug checks
    breakpoint     stop for ``triton-dist debug attach``; interpreter only
    dump           print values; in the interpreter also rank, program and line
    publish_tile   make TMA stores visible before a ``notify``
    mark           ``with mark("wait"):`` records the run time of a block, for timelines
"""

from triton_dist.language._debug import breakpoint, dump  # hides Python's breakpoint()
from triton_dist.language._marks import mark
from triton_dist.language.signals import consume_token, give_turn, notify, only_rows, symm_at, wait
from triton_dist.language.tma import publish_tile

__all__ = [
    "breakpoint",
    "consume_token",
    "dump",
    "give_turn",
    "mark",
    "notify",
    "only_rows",
    "publish_tile",
    "symm_at",
    "wait",
]
