"""Base class of the OpInfos of MoE layers: shapes, routings and the reference product."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from triton_dist.testing.opinfo.base import Cost, OpInfo, uniform
from triton_dist.testing.opinfo.scaled import Scales, in_fp32, scales_of_expert, select_rows


@dataclass(frozen=True)
class GroupedShape:
    """M tokens, each routed to ``topk`` of E experts with weights [K, N]. For an op across ranks,
    sizes are global."""

    M: int
    N: int
    K: int
    E: int
    topk: int

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K} E={self.E} topk={self.topk}"

    @property
    def used_experts(self) -> float:
        """Expected number of experts with at least one token under uniform routing."""
        return self.E * (1 - (1 - min(1.0, self.topk / self.E)) ** self.M)


FIRST_GEMMS = {
    "Mixtral 8x7B": GroupedShape(8192, 28672, 4096, 8, 2),
    "Mixtral 8x22B": GroupedShape(8192, 32768, 6144, 8, 2),
    "Qwen3-30B-A3B": GroupedShape(8192, 1536, 2048, 128, 8),
    "Qwen3-235B-A22B": GroupedShape(8192, 3072, 4096, 128, 8),
    "DeepSeek-V3": GroupedShape(8192, 4096, 7168, 256, 8),
    "GPT-OSS-120B": GroupedShape(8192, 5760, 2880, 128, 4),
}
"""Global sizes of the first GEMM of MoE layers (gate and up together), by model."""
SECOND_GEMMS = {
    name: dataclasses.replace(shape, N=shape.K, K=shape.N // 2)
    for name, shape in FIRST_GEMMS.items()
}
"""Global sizes of the last GEMM of MoE layers (down), by model."""


def uniform_ids(
    M: int, E: int, topk: int, device: torch.device, generator: Generator | None = None
) -> torch.Tensor:
    """Draw ``topk`` experts for each token with equal probabilities; return ids, int32 [M, topk].
    The experts of a token differ if E >= topk."""
    scores = torch.rand((M, max(E, topk)), generator=generator, device=device)
    return (scores.topk(topk, dim=1).indices % E).int()


def zipf_ids(
    M: int, E: int, topk: int, device: torch.device, generator: Generator | None = None
) -> torch.Tensor:
    """Draw like ``uniform_ids``, but expert e with a probability proportional to 1 / (e + 1)."""
    drawn = torch.rand((M, max(E, topk)), generator=generator, device=device)
    # The top k of log p + Gumbel noise are a sample without replacement.
    expert_number = torch.arange(1, drawn.shape[1] + 1, device=device)
    scores = -expert_number.log() - (-drawn.clamp(1e-9, 1 - 1e-7).log()).log()
    return (scores.topk(topk, dim=1).indices % E).int()


def same_expert_ids(
    M: int, E: int, topk: int, device: torch.device, generator: Generator | None = None
) -> torch.Tensor:
    """Return experts 0 to topk - 1 for every token."""
    return (torch.arange(topk, device=device) % E).int().repeat(M, 1)


ROUTINGS = {"even": uniform_ids, "zipf": zipf_ids, "one expert": same_expert_ids}
"""Functions that draw expert ids, by name."""


def routed_product(
    A: torch.Tensor,
    B: torch.Tensor,
    topk_ids: torch.Tensor,
    dtype: torch.dtype | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Return the product of each token with the weights of each of its experts, [M * topk, N].

    Row t * topk + j is for token t and its expert ``topk_ids[t, j]``. It is computed in fp32 and
    rounded once to ``dtype``, by default A's. Invalid ids give rows of zeros. A is [M, K], or
    [M * topk, K] with a row for each token and expert.
    """
    ids = topk_ids.flatten()
    out = A.new_zeros(len(ids), B.shape[2], dtype=dtype or A.dtype)
    for expert in range(len(B)):
        route = (ids == expert).nonzero().flatten()
        rows = route // (len(ids) // len(A))
        a, b = in_fp32(
            select_rows(A, rows), B[expert], scales_of_expert(scales or {}, rows, expert)
        )
        out[route] = (a @ b).to(out.dtype)
    return out


class RoutedOpInfo(OpInfo[GroupedShape]):
    """An op with expert ids among its operands, which ``ROUTINGS[routing]`` draws."""

    shape_type = GroupedShape
    model_shapes: ClassVar[Mapping[str, GroupedShape]]
    """Shapes of MoE layers, by name of the model."""
    routing = "even"
    """Key of ``ROUTINGS``."""

    def weights(
        self, E: int, K: int, N: int, dtype: torch.dtype, generator: Generator | None
    ) -> torch.Tensor:
        """Return weights [E, K, N] with uniform values from -1 to 1; fp8 weights are K-major."""
        if self.recipe is None:
            return uniform((E, K, N), dtype, generator)
        return uniform((E, N, K), self.io_dtypes(dtype)[0], generator).mT

    def cost(self, shape: GroupedShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the cost of a product of tokens that all ranks gather first. Weights are read for
        the expected number of experts with tokens."""
        routes, N = shape.M * shape.topk, shape.N / num_ranks
        operand_dtype, result_dtype = self.io_dtypes(dtype)
        elements = shape.M * shape.K + shape.used_experts * shape.K * N
        return Cost(
            operand_dtype,
            flops=2.0 * routes * N * shape.K,
            read_bytes=elements * operand_dtype.itemsize,
            written_bytes=routes * N * result_dtype.itemsize,
            link_bytes=shape.M * shape.K * operand_dtype.itemsize * (num_ranks - 1) / num_ranks,
        )

    def draw_ids(self, ids: torch.Tensor, E: int, generator: Generator | None) -> None:
        """Write random ids of E experts to ``ids`` [M, topk]."""
        M, topk = ids.shape
        ids.copy_(ROUTINGS[self.routing](M, E, topk, ids.device, generator))
