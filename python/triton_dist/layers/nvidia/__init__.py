"""Tensor-parallel layers for NVIDIA GPUs; the same run interpreted on CPU ranks."""

from triton_dist.layers.nvidia import functional
from triton_dist.layers.nvidia.gemm_allreduce_layer import GEMMARLayer
from triton_dist.layers.nvidia.gemm_ar_layer import GemmARLayer
from triton_dist.layers.nvidia.tensor_parallel import Collectives, TensorParallel

__all__ = ["Collectives", "GEMMARLayer", "GemmARLayer", "TensorParallel", "functional"]
