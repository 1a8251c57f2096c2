"""Decode attention over ranks; ``op.py`` describes the op and its design."""

from triton_dist.kernels.nvidia.decode_attention.context import (
    SpDecodeContext,
    create_sp_decode_context,
)
from triton_dist.kernels.nvidia.decode_attention.op import sp_decode_attn

__all__ = ["SpDecodeContext", "create_sp_decode_context", "sp_decode_attn"]
