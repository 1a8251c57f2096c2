"""Assign ranks to shared GPUs.

With ``launch.sh --share-gpus``, several ranks share a GPU if there are fewer GPUs than ranks. The
driver time-slices the GPU between processes, so a kernel makes progress while a kernel of another
rank waits for it. Times are not meaningful, and NCCL supports only one rank per GPU.
"""

from __future__ import annotations

import torch

from triton_dist import knobs


def ranks_per_gpu() -> int:
    """Return the maximum number of ranks per GPU of this host, which is equal on all ranks.

    1: each rank has its own GPU, or sharing was not requested.
    """
    if not knobs.share_gpus.get():
        return 1
    return -(-knobs.local_world_size.get() // max(1, torch.cuda.device_count()))


def gpu_of(local_rank: int) -> int:
    """Return the CUDA ordinal of a rank's GPU; neighbouring ranks share a GPU.

    Without sharing, the ordinal may exceed the last GPU.
    """
    if ranks_per_gpu() == 1:
        return local_rank
    return local_rank * torch.cuda.device_count() // knobs.local_world_size.get()
