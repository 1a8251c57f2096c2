"""What GEMM-ReduceScatter is measured beside: its two parts alone, and what others have for the
op."""

from __future__ import annotations

import torch
import torch.distributed as dist

from triton_dist.kernels.common import vendor_reduce_scatter as vendor
from triton_dist.kernels.nvidia import VendorMethod
from triton_dist.testing.overlap import Candidate

SERIAL, ASYNC_TP = "matmul + reduce-scatter", "torch async-TP"


def summed_rows(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of ``A @ B``, plus ``bias``: multiplied and summed in
    fp32, rounded once. A: [M, K_per_rank], B: [K_per_rank, N], bias: [N]. Collective."""
    total = torch.matmul(A.float(), B.float())
    dist.all_reduce(total, group=group)
    rows = A.shape[0] // dist.get_world_size(group)
    rank = dist.get_rank(group)
    mine = total[rank * rows : (rank + 1) * rows]
    return (mine if bias is None else mine + bias.float()).to(A.dtype)


def gemm_rs_peers(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Candidate]:
    """By name: the GEMM alone (cuBLAS), the reduce-scatter alone (NCCL), both one after the other,
    and torch's async-TP where it can run. Collective over ``group``.

    The reduce-scatter alone has a copy of the product as it is now; the others read A and B at each
    call, and those that do the whole op add the bias.
    """
    product = torch.matmul(A, B)

    def expected() -> torch.Tensor:
        return summed_rows(A, B, bias, group)

    def biased(rows: torch.Tensor) -> torch.Tensor:
        return rows if bias is None else rows + bias

    peers = {
        "GEMM alone": Candidate("gemm", lambda: torch.matmul(A, B)),
        "reduce-scatter alone": Candidate(
            "transfer", lambda: vendor.reduce_scatter(product, group)
        ),
        SERIAL: Candidate(
            "peer", lambda: biased(vendor.reduce_scatter(torch.matmul(A, B), group)), expected
        ),
    }
    if VendorMethod.ASYNC_TP in vendor.methods_here() and dist.get_world_size(group) > 1:
        peers[ASYNC_TP] = Candidate(
            "peer", lambda: biased(vendor.fused_matmul_reduce_scatter(A, B, group)), expected
        )
    return peers
