"""Tune functions that launch ``triton.autotune`` kernels.

The first call of a key tunes all kernels that the function launches.

    @contextual_autotune(is_dist=True)
    def step(x):              # launches kernels that are decorated with triton.autotune
        ...

    step(x)    # calls the function until every kernel has a config, which is equal on all ranks
    step(x)    # calls the function once
"""

from triton_dist._tuning.compose_contextual import contextual_autotune

__all__ = ["contextual_autotune"]
