"""Layers of models that are distributed over ranks: tensor, expert and sequence parallelism.

They run on NVIDIA GPUs, and on CPU ranks in Triton's interpreter.
"""

from triton_dist.layers.nvidia import experts, functional, sequence_parallel
from triton_dist.layers.nvidia.checkpoint import TrainingState, gather_state_dict
from triton_dist.layers.nvidia.ep_a2a_layer import EPAll2AllLayer, EPLowLatencyAllToAllLayer
from triton_dist.layers.nvidia.ep_moe import EP_MoE
from triton_dist.layers.nvidia.gemm_ar_layer import GemmARLayer
from triton_dist.layers.nvidia.parallelize import parallelize
from triton_dist.layers.nvidia.sp_attn import SP_Attn
from triton_dist.layers.nvidia.sp_flash_decode_layer import SpGQAFlashDecodeAttention
from triton_dist.layers.nvidia.tensor_parallel import Collectives, TensorParallel
from triton_dist.layers.nvidia.tp_attn import TP_Attn
from triton_dist.layers.nvidia.tp_mlp import TP_MLP
from triton_dist.layers.nvidia.tp_moe import TP_MoE
from triton_dist.layers.nvidia.training import clip_grad_norm_, sum_gradients
from triton_dist.layers.nvidia.ulysses_sp_a2a_layer import UlyssesSPAllToAllLayer

__all__ = [
    "TP_MLP",
    "Collectives",
    "EPAll2AllLayer",
    "EPLowLatencyAllToAllLayer",
    "EP_MoE",
    "GemmARLayer",
    "SP_Attn",
    "SpGQAFlashDecodeAttention",
    "TP_Attn",
    "TP_MoE",
    "TensorParallel",
    "TrainingState",
    "UlyssesSPAllToAllLayer",
    "clip_grad_norm_",
    "experts",
    "functional",
    "gather_state_dict",
    "parallelize",
    "sequence_parallel",
    "sum_gradients",
]
