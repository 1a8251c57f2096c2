"""Tensor-parallel layers for NVIDIA GPUs; the same run interpreted on CPU ranks."""

from triton_dist.layers.nvidia.gemm_allreduce_layer import GEMMARLayer
from triton_dist.layers.nvidia.gemm_ar_layer import GemmARLayer

__all__ = ["GEMMARLayer", "GemmARLayer"]
