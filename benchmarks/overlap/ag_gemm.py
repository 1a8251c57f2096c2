"""AllGather-GEMM in the harness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import ag_gemm, create_ag_gemm_context
from triton_dist.runtime.device import current_device
from triton_dist.testing.ag_gemm_peers import SERIAL, ag_gemm_peers, is_own_algorithm
from triton_dist.testing.reference import all_gather_matmul
from triton_dist.utils import rand_tensor

from .shapes import Shape
from .tuned_op import TunedOp
from .workload import Choice, Workload

_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-3}
"""Between two products that are each rounded once."""


@contextmanager
def open_ag_gemm(shape: Shape, dtype: torch.dtype, choice: Choice) -> Iterator[Workload]:
    """A [M / W, K]; B U(-1, 1) [K, N / W], column-major."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = current_device().torch_device
    A = torch.empty(shape.M // num_ranks, shape.K, dtype=dtype, device=device)
    B = rand_tensor([shape.N // num_ranks, shape.K], dtype, device).T
    with create_ag_gemm_context(shape.M, shape.N, shape.K, dtype, rank, num_ranks) as ctx:
        yield TunedOp(
            ag_gemm, A, B, ctx, choice,
            terms=shape.K,
            serial=SERIAL,
            tolerance=_TOLERANCE[dtype],
            expected=lambda: all_gather_matmul(A, B),
            peers=lambda: ag_gemm_peers(A, B, ctx),
            is_own=is_own_algorithm,
            recover=ctx.reset,
        )  # fmt: skip
