"""Words to use inside kernels, interpreted or compiled.

They are plain ``tl`` atomics with ``sem`` and ``scope``; the three pieces of inline assembly are
no-ops in the interpreter and below the compute capability that they are for.

===================  ====================================================================
``symm_at``          a region's address on a peer
``notify``           set or add a flag, after everything the program wrote (release)
``wait``             spin until flags have reached a value (acquire); gives a token
``consume_token``    tie a load to the ``wait`` before it
``give_turn``        before a look at what other programs of the grid do
``only_rows``        of what a descriptor loads, the rows that are used: for checks
``breakpoint``       stop here, for ``triton-dist debug attach``: interpreted only
``dump``             print values; interpreted, with rank, program and line
``publish_tile``     make TMA stores visible, before a ``notify``
``mark``             with mark("wait"): what is done within, for timelines that ask for it
===================  ====================================================================
"""

from triton_dist.language._checked import breakpoint, dump  # the first: Python's word for it
from triton_dist.language._marks import mark
from triton_dist.language.signals import (
    consume_token,
    give_turn,
    notify,
    only_rows,
    symm_at,
    wait,
)
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
