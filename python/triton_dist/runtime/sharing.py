"""Ranks that share a GPU: how many, and which GPU each has.

Where a launch asks for it (``launch.sh --share-gpus``) and there are fewer GPUs than ranks, each
GPU has several. The driver gives each process the whole GPU in turn, so kernels of one make
progress while those of another wait for them; but times mean little, and NCCL takes one rank a GPU
only.
"""

from __future__ import annotations

import torch

from triton_dist import knobs


def ranks_per_gpu() -> int:
    """Ranks of this host that take turns on a GPU, at most: the same on all of them. 1: each has
    its own, or sharing was not asked for."""
    if not knobs.share_gpus.get():
        return 1
    return -(-knobs.local_world_size.get() // max(1, torch.cuda.device_count()))


def gpu_of(local_rank: int) -> int:
    """CUDA ordinal of a rank's GPU, past the last one if there are too few; neighbours share."""
    if ranks_per_gpu() == 1:
        return local_rank
    return local_rank * torch.cuda.device_count() // knobs.local_world_size.get()
