"""Seeds and random operands."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch


def init_seed(seed: int = 0) -> None:
    """Seed Python, numpy and torch, and let fp32 products be fp32: no TF32, no 16-bit
    accumulation."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def rand_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """Uniform in [-1, 1) for floating dtypes, over the dtype's range for integers."""
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, tuple(shape), dtype=dtype, device=device)
    return (torch.rand(tuple(shape), dtype=torch.float32, device=device) * 2 - 1).to(dtype)
