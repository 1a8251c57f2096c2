"""GEMM-ReduceScatter in the harness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import create_gemm_rs_context, gemm_rs
from triton_dist.runtime.device import current_device
from triton_dist.testing.gemm_rs_peers import SERIAL, gemm_rs_peers, summed_rows
from triton_dist.utils import rand_tensor

from .shapes import Shape
from .tuned_op import TunedOp
from .workload import Choice, Workload

_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-3}
"""W parts are rounded to the dtype, and so is their sum."""


@contextmanager
def open_gemm_rs(shape: Shape, dtype: torch.dtype, choice: Choice) -> Iterator[Workload]:
    """A [M, K / W]; B U(-1, 1) [K / W, N], column-major."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device, K = current_device().torch_device, max(1, shape.K // num_ranks)
    A = torch.empty(shape.M, K, dtype=dtype, device=device)
    B = rand_tensor([shape.N, K], dtype, device).T
    with create_gemm_rs_context(shape.M, shape.N, rank, num_ranks, num_ranks, dtype) as ctx:
        yield TunedOp(
            gemm_rs, A, B, ctx, choice,
            terms=K * num_ranks,
            serial=SERIAL,
            tolerance=_TOLERANCE[dtype],
            expected=lambda: summed_rows(A, B),
            peers=lambda: gemm_rs_peers(A, B),
            is_own=lambda config: config["way"] not in ("collective", "async_tp"),
            recover=ctx.buffer.slots.reset,
        )  # fmt: skip
