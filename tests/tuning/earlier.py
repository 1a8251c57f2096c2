"""Functions that an earlier version of triton_dist has tuned: see ``data/cache_of_schema_2``.

Their code is part of what those records depend on. So nothing here is edited: what is to be tuned
by a later version goes into another file.
"""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist.autotuner import contextual_autotune
from triton_dist.tune import autotune, to_hashable

SCALE = 2


@autotune([{"n": 3}, {"n": 1}, {"n": 2}], key_fn=lambda x: x)
def plain(x, n):
    time.sleep(n * 2e-3)
    return SCALE * x * n


@autotune(
    [{"block": block, "stages": stages} for block in (128, 64) for stages in (2, 1)],
    key_fn=lambda x: to_hashable(x),
    prune_fn=lambda config, x: config["block"] * config["stages"] < 200,
)
def two_tunables(x, block, stages):
    time.sleep((block // 64 + stages) * 2e-3)
    return x * block


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (64, 128)], key=["n"])
@triton_dist.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index, mask=index < n) * 2, mask=index < n)


@contextual_autotune(n_repeat=2, n_warmup=1)
def doubled(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    n = x.numel()
    double_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
    return y


def tune_alone() -> None:
    """What was called in a process of its own."""
    plain(7)
    two_tunables(torch.ones(2, 3))
    two_tunables(torch.ones(2, 3), stages=2, autotune_allow_arg_overwrite=True)
    doubled(torch.ones(100))
