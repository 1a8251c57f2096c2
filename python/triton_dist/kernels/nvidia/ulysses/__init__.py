"""Ulysses sequence parallelism; ``op.py`` describes the ops and their design."""

from triton_dist.kernels.nvidia.ulysses.context import UlyssesContext, create_ulysses_context
from triton_dist.kernels.nvidia.ulysses.op import ulysses_post_attn, ulysses_pre_attn

__all__ = [
    "UlyssesContext",
    "create_ulysses_context",
    "ulysses_post_attn",
    "ulysses_pre_attn",
]
