"""Assign ranks to shared GPUs.

With ``launch.sh --share-gpus``, several ranks share a GPU if there are fewer GPUs than ranks. The
driver time-slices the GPU between processes, so a kernel makes progress while a kernel of another
rank waits for it. Times measured on a shared GPU are not meaningful. NCCL supports only one rank
per GPU, so ranks that share a GPU cannot use it.
"""

from __future__ import annotations

import torch

from triton_dist import knobs


def ranks_per_gpu() -> int:
    """Return the maximum number of ranks per GPU of this host; equal on all ranks of the host. The
    result is 1 if each rank has its own GPU, or if GPUs are not shared."""
    if not knobs.share_gpus.get():
        return 1
    return -(-knobs.local_world_size.get() // max(1, torch.cuda.device_count()))


def gpu_of(local_rank: int) -> int:
    """Return the CUDA ordinal of a rank's GPU. Consecutive ranks share a GPU. If GPUs are not
    shared, the result is ``local_rank``, even if the host has fewer GPUs."""
    if ranks_per_gpu() == 1:
        return local_rank
    return local_rank * torch.cuda.device_count() // knobs.local_world_size.get()
