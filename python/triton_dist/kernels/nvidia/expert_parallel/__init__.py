"""Expert-parallel dispatch and combine; ``op.py`` describes the ops and their design.

An op that fuses a dispatch with a product also uses the call and kernel functions. They are not for
users, and therefore not in ``__all__``.
"""

from triton_dist.kernels.nvidia.expert_parallel.algorithms import DispatchCall as DispatchCall
from triton_dist.kernels.nvidia.expert_parallel.algorithms import max_programs as max_programs
from triton_dist.kernels.nvidia.expert_parallel.context import (
    EPContext,
    Received,
    create_ep_context,
)
from triton_dist.kernels.nvidia.expert_parallel.kernel import begin_ep_call as begin_ep_call
from triton_dist.kernels.nvidia.expert_parallel.kernel import send_rows as send_rows
from triton_dist.kernels.nvidia.expert_parallel.op import ep_combine, ep_dispatch, ep_send
from triton_dist.kernels.nvidia.expert_parallel.op import id_variants as id_variants

__all__ = ["EPContext", "Received", "create_ep_context", "ep_combine", "ep_dispatch", "ep_send"]
