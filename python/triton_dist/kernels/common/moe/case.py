"""Facts that products of mixture-of-experts layers share: shapes of models, ids, a reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupedShape:
    """Sizes: M tokens of K, ``topk`` of E experts each, with weights [K, N]."""

    M: int
    N: int
    K: int
    E: int
    topk: int

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K} E={self.E} topk={self.topk}"

    @property
    def used_experts(self) -> float:
        """Experts that some token may be expected at."""
        return self.E * (1 - (1 - min(1.0, self.topk / self.E)) ** self.M)


MODELS = {
    "Mixtral 8x7B": GroupedShape(8192, 28672, 4096, 8, 2),
    "Mixtral 8x22B": GroupedShape(8192, 32768, 6144, 8, 2),
    "Qwen3-30B-A3B": GroupedShape(8192, 1536, 2048, 128, 8),
    "Qwen3-235B-A22B": GroupedShape(8192, 3072, 4096, 128, 8),
    "DeepSeek-V3": GroupedShape(8192, 4096, 7168, 256, 8),
    "GPT-OSS-120B": GroupedShape(8192, 5760, 2880, 128, 4),
}
"""First products of layers, gate and up together, of all ranks."""


def even_ids(
    M: int, E: int, topk: int, device: torch.device, generator: torch.Generator | None = None
) -> torch.Tensor:
    """[M, topk], int32: each token goes to other experts at random, all different if there are so
    many."""
    scores = torch.rand((M, max(E, topk)), generator=generator, device=device)
    return (scores.topk(topk, dim=1).indices % E).int()


def routed_product(A: torch.Tensor, B: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """[M * topk, N] in the order of routes, zero where they are nobody's: multiplied in fp32,
    rounded once. A: [M, K], or a row a route."""
    ids = topk_ids.flatten()
    rows = A.repeat_interleave(len(ids) // len(A), dim=0)
    out = A.new_zeros(len(ids), B.shape[2])
    for expert in range(B.shape[0]):
        own = ids == expert
        out[own] = (rows[own].float() @ B[expert].float()).to(A.dtype)
    return out
