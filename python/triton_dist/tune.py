"""Tune arguments of functions: ``@triton_dist.tune.autotune(config_space, key_fn, prune_fn)``.

The first call of a key tunes. Later calls look up the config.

    @autotune(config_space=[{"config": c} for c in configs], key_fn=lambda A, B: to_hashable(A))
    def matmul(A, B, config): ...

    matmul(A, B)
    matmul(A, B, autotune=False)    # uses the first config
"""

from triton_dist._tuning.compose import autotune
from triton_dist._tuning.engine.decorator import Decorator as Decorator  # what autotune returns
from triton_dist._tuning.engine.dispatch import AutoTuner
from triton_dist._tuning.search import Search
from triton_dist._tuning.shared import autotuning
from triton_dist._tuning.source.runtime_values import constant
from triton_dist._tuning.values import Product, bucket, fine_bucket, to_hashable

__all__ = [
    "AutoTuner",
    "Product",
    "Search",
    "autotune",
    "autotuning",
    "bucket",
    "constant",
    "fine_bucket",
    "to_hashable",
]
