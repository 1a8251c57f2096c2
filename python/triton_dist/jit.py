"""``from triton_dist.jit import jit``: the decorator, for scripts that know it as a module.

Importing a submodule binds its name on the package. So that ``triton_dist.jit`` is the decorator
before and after, the decorator stands for the module too.
"""

import sys

from triton_dist._jit import jit as jit

jit.jit = jit  # type: ignore[attr-defined]
sys.modules[__name__] = jit  # type: ignore[assignment]
