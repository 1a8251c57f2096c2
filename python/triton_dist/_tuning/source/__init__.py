"""Find the source code that a function depends on: digests of statements, and texts of constants.

A tuning record is valid for the code that was timed: the function, its helpers, the Triton kernels
that it launches, and the constants that they read. :mod:`.modules` parses files into statements,
:mod:`.slices` finds the statements that a function depends on, and :mod:`.runtime_values` reads
values and constants.

Comments, docstrings and formatting have no effect on the result. Neither have the position in a
file and the location of the file.
"""

from triton_dist._tuning.source.runtime_values import Snapshot
from triton_dist._tuning.source.slices import (
    SourceDependencies,
    identity_of,
    source_of,
    sources_of,
)

__all__ = ["Snapshot", "SourceDependencies", "identity_of", "source_of", "sources_of"]
