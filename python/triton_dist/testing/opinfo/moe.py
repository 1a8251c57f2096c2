"""Shared by the OpInfos of mixture-of-experts layers: shapes, routings, the reference product."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from triton_dist.testing.opinfo.base import OpInfo


@dataclass(frozen=True)
class GroupedShape:
    """M tokens, ``topk`` of E experts each with weights [K, N]. Of an op of one rank all are that
    rank's; of one across ranks, global."""

    M: int
    N: int
    K: int
    E: int
    topk: int

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K} E={self.E} topk={self.topk}"

    @property
    def used_experts(self) -> float:
        """Experts that some token may be expected at, if all are as likely."""
        return self.E * (1 - (1 - min(1.0, self.topk / self.E)) ** self.M)


FIRST_PRODUCTS = {
    "Mixtral 8x7B": GroupedShape(8192, 28672, 4096, 8, 2),
    "Mixtral 8x22B": GroupedShape(8192, 32768, 6144, 8, 2),
    "Qwen3-30B-A3B": GroupedShape(8192, 1536, 2048, 128, 8),
    "Qwen3-235B-A22B": GroupedShape(8192, 3072, 4096, 128, 8),
    "DeepSeek-V3": GroupedShape(8192, 4096, 7168, 256, 8),
    "GPT-OSS-120B": GroupedShape(8192, 5760, 2880, 128, 4),
}
"""Products that begin layers, gate and up together, of all ranks."""
SECOND_PRODUCTS = {
    name: dataclasses.replace(shape, N=shape.K, K=shape.N // 2)
    for name, shape in FIRST_PRODUCTS.items()
}
"""Products that end layers, of all ranks."""


def even_ids(
    M: int, E: int, topk: int, device: torch.device, generator: Generator | None = None
) -> torch.Tensor:
    """int32 [M, topk]: experts of each token at random, all different if there are so many."""
    scores = torch.rand((M, max(E, topk)), generator=generator, device=device)
    return (scores.topk(topk, dim=1).indices % E).int()


def zipf_ids(
    M: int, E: int, topk: int, device: torch.device, generator: Generator | None = None
) -> torch.Tensor:
    """The same, where expert e is as likely as 1 / (e + 1)."""
    drawn = torch.rand((M, max(E, topk)), generator=generator, device=device)
    # The largest of log p + Gumbel noise are a draw without replacement.
    rank = torch.arange(1, drawn.shape[1] + 1, device=device)
    scores = -rank.log() - (-drawn.clamp(1e-9, 1 - 1e-7).log()).log()
    return (scores.topk(topk, dim=1).indices % E).int()


def one_expert_ids(
    M: int, E: int, topk: int, device: torch.device, generator: Generator | None = None
) -> torch.Tensor:
    """The same ``topk`` experts for every token."""
    return (torch.arange(topk, device=device) % E).int().repeat(M, 1)


ROUTINGS = {"even": even_ids, "zipf": zipf_ids, "one expert": one_expert_ids}
"""Draws of ids, by name."""


def routed_product(
    A: torch.Tensor, B: torch.Tensor, topk_ids: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[M * topk, N] in the order of routes, zero where they are nobody's: multiplied in fp32,
    rounded once, to ``dtype`` or that of A. A: [M, K], or a row a route."""
    ids = topk_ids.flatten()
    out = A.new_zeros(len(ids), B.shape[2], dtype=dtype or A.dtype)
    for expert in range(len(B)):
        route = (ids == expert).nonzero().flatten()
        rows = A[route // (len(ids) // len(A))]
        out[route] = (rows.float() @ B[expert].float()).to(out.dtype)
    return out


class RoutedOpInfo(OpInfo[GroupedShape]):
    """An op whose operands have ids of experts, drawn as ``routing`` says."""

    shape = GroupedShape
    models: ClassVar[Mapping[str, GroupedShape]]
    """Layers of models, by name."""
    routing = "even"
    """One of ``ROUTINGS``."""

    def draw(self, ids: torch.Tensor, E: int, generator: Generator | None) -> None:
        """Fill ids [M, topk]."""
        M, topk = ids.shape
        ids.copy_(ROUTINGS[self.routing](M, E, topk, ids.device, generator))
