"""What GEMM-AllReduce is measured beside: its two parts alone, and what others have for the op."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from triton_dist.runtime.device import current_device
from triton_dist.testing.collective_peers import over_symmetric_memory
from triton_dist.testing.overlap import Candidate

SERIAL = "matmul + all-reduce"


def summed_product(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The sum over ranks of ``A @ B``, plus ``bias``: multiplied and summed in fp32, rounded once.
    A: [M, K_per_rank], B: [K_per_rank, N], bias: [N]. Collective."""
    total = torch.matmul(A.float(), B.float())
    dist.all_reduce(total, group=group)
    return (total if bias is None else total + bias.float()).to(A.dtype)


def gemm_ar_peers(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Candidate]:
    """By name: the GEMM alone (cuBLAS), the all-reduce alone (NCCL, in place, of zeros), both one
    after the other, and on GPUs the GEMM into symmetric memory followed by torch's all-reduces
    there. Collective over ``group``.

    All read A and B at each call, and those that do the whole op add the bias.
    """
    zeros = torch.zeros(A.shape[0], B.shape[1], dtype=A.dtype, device=A.device)

    def expected() -> torch.Tensor:
        return summed_product(A, B, bias, group)

    def summed(product: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(product, group=group)
        return product

    peers = {
        "GEMM alone": Candidate("gemm", lambda: torch.matmul(A, B)),
        "all-reduce alone": Candidate("transfer", lambda: summed(zeros)),
        SERIAL: Candidate("peer", _biased(lambda: summed(torch.matmul(A, B)), bias), expected),
    }
    if current_device().name == "cuda" and dist.get_world_size(group) > 1:
        calls = over_symmetric_memory(zeros, lambda staged: torch.matmul(A, B, out=staged), group)
        peers |= {
            f"matmul + {name}": Candidate("peer", _biased(call, bias), expected)
            for name, call in calls.items()
        }
    return peers


def _biased(
    call: Callable[[], torch.Tensor], bias: torch.Tensor | None
) -> Callable[[], torch.Tensor]:
    return call if bias is None else lambda: call() + bias
