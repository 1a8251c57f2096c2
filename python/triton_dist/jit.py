"""Module path for ``from triton_dist.jit import jit`` in existing scripts.

The import of a submodule sets an attribute of the package, which here would replace the decorator
``triton_dist.jit`` by this module. Therefore the decorator takes the place of this module in
``sys.modules``.
"""

import sys

from triton_dist._jit import jit as jit

jit.jit = jit  # type: ignore[attr-defined]
sys.modules[__name__] = jit  # type: ignore[assignment]
