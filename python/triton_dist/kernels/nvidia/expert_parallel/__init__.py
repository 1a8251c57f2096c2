"""Expert-parallel dispatch and combine; ``op.py`` describes the ops and their design."""

from triton_dist.kernels.nvidia.expert_parallel.context import (
    EPContext,
    Received,
    create_ep_context,
)
from triton_dist.kernels.nvidia.expert_parallel.op import ep_combine, ep_dispatch, ep_send

__all__ = ["EPContext", "Received", "create_ep_context", "ep_combine", "ep_dispatch", "ep_send"]
