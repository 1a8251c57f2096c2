"""AllGather-attention; ``op.py`` describes the op and its design."""

from triton_dist.kernels.nvidia.sp_ag_attention.context import (
    SPAttentionContext,
    create_sp_ag_attention_context,
)
from triton_dist.kernels.nvidia.sp_ag_attention.op import (
    sp_ag_attention,
    sp_ag_attention_backward,
)

__all__ = [
    "SPAttentionContext",
    "create_sp_ag_attention_context",
    "sp_ag_attention",
    "sp_ag_attention_backward",
]
