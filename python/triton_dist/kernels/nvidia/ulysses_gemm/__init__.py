"""Ulysses exchanges fused with projections; ``op.py`` describes the ops and their design."""

from triton_dist.kernels.nvidia.ulysses_gemm.op import (
    ulysses_gemm_pre_attn,
    ulysses_post_attn_gemm,
)

__all__ = ["ulysses_gemm_pre_attn", "ulysses_post_attn_gemm"]
