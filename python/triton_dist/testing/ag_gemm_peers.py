"""What AllGather-GEMM is measured beside: its two parts alone, and what others have for the op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import (
    AllGatherGEMMTensorParallelContext,
    AllGatherMethod,
    VendorMethod,
)
from triton_dist.testing.overlap import Candidate
from triton_dist.testing.reference import (
    all_gather_matmul,
    all_gather_rows,
    async_tp_matmul,
    has_async_tp,
)

SERIAL, ASYNC_TP = "all-gather + matmul", "torch async-TP"


def ag_gemm_peers(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Candidate]:
    """By name: the GEMM alone (cuBLAS), the all-gather alone (NCCL; copy engines), both one after
    the other, and torch's async-TP where it can run. A: [M_per_rank, K], B: [K, N_per_rank].

    Collective over ``group``. All read A and B at each call, but for the GEMM alone, which has a
    copy of all rows of A as they are now.
    """
    rows = all_gather_rows(A, group)
    peers = {
        "GEMM alone": Candidate("gemm", lambda: torch.matmul(rows, B)),
        "all-gather alone": Candidate(
            "transfer", lambda: all_gather_rows(A, group), lambda: all_gather_rows(A, group)
        ),
        # The own rows stay where they are, so its output is no gathered A.
        "copy-engine all-gather alone": Candidate("transfer", lambda: gather_alone(A, ctx)),
        SERIAL: _whole(A, B, group, all_gather_matmul),
    }
    if has_async_tp(group):
        peers[ASYNC_TP] = _whole(A, B, group, async_tp_matmul)
    return peers


def gather_alone(A: torch.Tensor, ctx: AllGatherGEMMTensorParallelContext) -> torch.Tensor:
    """The transfer of a call of the op without its consumer; returns where peers' rows land.

    It is over when every rank's is: a rank waits for its own copies to others only.
    """
    gathered = ctx.buffer.start(A, AllGatherMethod.FULL_MESH_PUSH, 1, 1)
    ctx.buffer.finish()
    rows: torch.Tensor = gathered.rows
    return rows


def is_own_algorithm(config: Mapping[str, Any]) -> bool:
    """Whether a config of ``ag_gemm`` runs an algorithm of this package, and does not merely call
    the vendor's libraries."""
    return config.get("way") not in {method.value for method in VendorMethod}


def _whole(A: torch.Tensor, B: torch.Tensor, group: Any, op: Any) -> Candidate:
    return Candidate("peer", lambda: op(A, B, group), lambda: all_gather_matmul(A, B, group))
