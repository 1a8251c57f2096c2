"""Expert-parallel dispatch + grouped GEMM; ``op.py`` describes the op and its design."""

from triton_dist.kernels.nvidia.ep_group_gemm.op import ep_dispatch_group_gemm

__all__ = ["ep_dispatch_group_gemm"]
