"""``from triton_dist.jit import jit``: module path of the decorator, for existing scripts.

Importing a submodule sets its name on the package. The decorator replaces the module in
``sys.modules``, so ``triton_dist.jit`` is the decorator before and after the import.
"""

import sys

from triton_dist._jit import jit as jit

jit.jit = jit  # type: ignore[attr-defined]
sys.modules[__name__] = jit  # type: ignore[assignment]
