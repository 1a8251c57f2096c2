"""Tensor-parallel layers for NVIDIA GPUs. They also run in the interpreter on CPU ranks."""

from triton_dist.layers.nvidia import experts, functional
from triton_dist.layers.nvidia.gemm_ar_layer import GemmARLayer
from triton_dist.layers.nvidia.parallelize import parallelize, sum_gradients
from triton_dist.layers.nvidia.tensor_parallel import Collectives, TensorParallel
from triton_dist.layers.nvidia.tp_attn import TP_Attn
from triton_dist.layers.nvidia.tp_mlp import TP_MLP
from triton_dist.layers.nvidia.tp_moe import TP_MoE

__all__ = [
    "Collectives",
    "GemmARLayer",
    "TP_MLP",
    "TP_Attn",
    "TP_MoE",
    "TensorParallel",
    "experts",
    "functional",
    "parallelize",
    "sum_gradients",
]
