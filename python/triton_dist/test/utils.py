"""Shapes and assertions that test scripts share."""

from __future__ import annotations

import torch

from triton_dist.testing.assertions import assert_allclose, assert_bitwise_equal, bitwise_equal

__all__ = [
    "LAYER_CONFIGS",
    "assert_allclose",
    "assert_bitwise_equal",
    "bitwise_equal",
    "dtype_named",
]

# Global N and K of a feed-forward layer's first GEMM.
LAYER_CONFIGS = {
    "LLaMA-7B": {"N": 11008, "K": 4096},
    "LLaMA-3.1-8B": {"N": 14336, "K": 4096},
    "LLaMA-3.1-70B": {"N": 28672, "K": 8192},
    "LLaMA-3.1-405B": {"N": 53248, "K": 16384},
    "Mistral-7B": {"N": 14336, "K": 4096},
    "Qwen2-72B": {"N": 29568, "K": 8192},
    "GPT-3-175B": {"N": 49152, "K": 12288},
}


def dtype_named(name: str) -> torch.dtype:
    """``"float16"`` to ``torch.float16``, for command lines."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
