"""Create and free the process-wide contexts of ``TritonDistFusedEpMoeFunction``.

New programs create a ``TensorParallel`` and call ``layers.nvidia.expert_parallel.ep_experts``.
"""

from __future__ import annotations

import torch

from triton_dist.errors import ContextFinalized
from triton_dist.layers.nvidia.tensor_parallel import TensorParallel
from triton_dist.runtime.ranks import Group

_ranks: TensorParallel | None = None


def init_triton_dist_ep_op(
    ep_group: Group, max_tokens_per_rank: int, hidden_size: int, topk: int,
    ep_rank: int, num_experts: int, ep_size: int, dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype = torch.float32, num_sm: int = 8, sm_margin: int = 0,
    num_buffers: int = 1, capacity: float = 4.0, ep_implementation: str = "mega",
) -> None:  # fmt: skip
    """Create the ``TensorParallel`` that all later calls use. Collective over ``ep_group``.

    An existing ``TensorParallel`` is freed first. ``ep_group``, ``ep_size`` and
    ``max_tokens_per_rank``, the largest number of tokens of a rank, are used. The other arguments
    are ignored: sizes and dtypes come from the calls, and numbers of multiprocessors are tuned.
    """
    global _ranks
    deinit_triton_dist_ep_op()
    _ranks = TensorParallel(max_tokens_per_rank * ep_size, ep_group)


def deinit_triton_dist_ep_op() -> None:
    """Free the contexts; idempotent. Collective."""
    global _ranks
    ranks, _ranks = _ranks, None
    if ranks is not None:
        ranks.finalize()


def current_tensor_parallel() -> TensorParallel:
    """Return the ``TensorParallel`` of ``init_triton_dist_ep_op``.

    Raises:
        ContextFinalized: ``init_triton_dist_ep_op`` was not called, or
            ``deinit_triton_dist_ep_op`` was called after it.
    """
    if _ranks is None:
        raise ContextFinalized("TensorParallel of init_triton_dist_ep_op")
    return _ranks
