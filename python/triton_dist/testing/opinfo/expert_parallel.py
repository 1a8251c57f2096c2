"""OpInfos of expert-parallel dispatch and combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Generator

from triton_dist.kernels.nvidia import (
    create_ep_context,
    ep_combine,
    ep_dispatch,
    ep_dispatch_group_gemm,
)
from triton_dist.kernels.nvidia.expert_parallel import Received
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.opinfo.base import (
    Baseline,
    Call,
    Cost,
    Group,
    Operands,
    meta,
    tolerance,
    uniform,
)
from triton_dist.testing.opinfo.exchange import META_DEVICE, ExchangeOpInfo, gathered
from triton_dist.testing.opinfo.moe import uniform_ids

EXPERTS_PER_RANK = 4
"""Number of experts per rank."""


@dataclass(frozen=True)
class TokenShape:
    """M tokens over all ranks, each with ``hidden`` elements and ``topk`` experts."""

    M: int
    hidden: int
    topk: int

    def __str__(self) -> str:
        return f"{self.M}x{self.hidden} topk={self.topk}"


class EPOpInfo(ExchangeOpInfo[TokenShape]):
    """Operands ``topk_ids`` and ``topk_weights`` [M / W, topk], for W ranks, and rows to send."""

    shape_type: type[TokenShape] = TokenShape
    shapes: Sequence[TokenShape] = (TokenShape(8192, 7168, 2), TokenShape(256, 7168, 4))
    collective_name, create = "all-to-all", staticmethod(create_ep_context)
    row_operand: ClassVar[str]
    """Name of the operand whose rows [·, hidden] are sent: ``x`` (dispatch) or ``y`` (combine)."""

    def smaller(self, shape: TokenShape, divisor: int, num_ranks: int) -> TokenShape:
        M = max(1, shape.M // divisor // num_ranks) * num_ranks
        hidden = max(16, shape.hidden // divisor // 16 * 16)  # packets require multiples of 16
        return TokenShape(M, hidden, shape.topk)

    def context_sizes(self, shape: TokenShape, num_ranks: int) -> tuple[int, ...]:
        return shape.M // num_ranks, shape.hidden, EXPERTS_PER_RANK * num_ranks, shape.topk

    def allocate(
        self, shape: TokenShape, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        device, routing = current_device().torch_device, (shape.M // num_ranks, shape.topk)
        # y has memory for the case that all tokens of all ranks choose experts of this rank.
        num_rows = shape.M // num_ranks if self.row_operand == "x" else shape.M * shape.topk
        return {
            self.row_operand: torch.empty(num_rows, shape.hidden, dtype=dtype, device=device),
            "topk_ids": torch.empty(routing, dtype=torch.int32, device=device),
            "topk_weights": torch.empty(routing, device=device),
        }

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        super().refill(operands, num_ranks, generator)
        (tokens, topk), experts = operands["topk_ids"].shape, EXPERTS_PER_RANK * num_ranks
        device = operands["topk_ids"].device
        operands["topk_ids"].copy_(uniform_ids(tokens, experts, topk, device, generator))

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> TokenShape:
        received = operands.get("received")
        routes = operands["topk_ids"] if received is None else received.position_of_route
        M = len(routes) * num_ranks if received is None else len(routes)
        return TokenShape(M, operands[self.row_operand].shape[1], routes.shape[1])

    def sorted_routes(
        self, operands: Operands, group: Group
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return three tensors: expert's rank, token, weight of each choice; sorted by expert."""
        ids, weights = operands["topk_ids"], operands["topk_weights"]
        expert, weights = (gathered(each, group).flatten() for each in (ids, weights))
        order = expert.argsort(stable=True)
        return expert[order].long() // EXPERTS_PER_RANK, order // ids.shape[1], weights[order]

    def output(self, result: Any) -> torch.Tensor:
        """Return the rows that a dispatch received, sorted by expert; or a combine's result."""
        if isinstance(result, Received):
            return result.expanded()[0][: result.num_positions()]
        return super().output(result)

    def cost(self, shape: TokenShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the cost if tokens choose all experts with equal probability. A token is sent once
        to each rank that has one of its experts."""
        row_bytes, tokens = shape.hidden * dtype.itemsize, shape.M / num_ranks
        received = shape.M * (1 - (1 - 1 / num_ranks) ** shape.topk) * row_bytes
        link = received * (num_ranks - 1) / num_ranks
        reads, writes = tokens * row_bytes, received
        if self.row_operand == "y":
            reads = tokens * shape.topk * row_bytes + link
            writes = tokens * row_bytes + link
        return Cost(dtype, flops=0, read_bytes=reads, written_bytes=writes, link_bytes=link)

    @staticmethod
    def meta_inputs(key: Any) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return context, rows, ids and weights of a call with tuning key ``key``."""
        ctx = SimpleNamespace(
            max_tokens=key.M, capacity=key.M, hidden=key.hidden, topk=key.topk, dtype=key.dtype,
            num_experts=key.num_experts, num_ranks=key.num_ranks, buffer=None, pending=None,
            can_combine=True, device=META_DEVICE,
        )  # fmt: skip
        weights = meta(torch.float32, key.M, key.topk) if key.has_weights else None
        return ctx, meta(key.dtype, key.M, key.hidden), meta(torch.int32, key.M, key.topk), weights


class DispatchOpInfo(EPOpInfo):
    """Operand ``x`` [M / W, hidden], this rank's tokens. The result has a row for each choice of
    one of this rank's experts."""

    row_operand, random_operands = "x", ("x", "topk_weights")
    positional_names: ClassVar[tuple[str, ...]] = ("x", "topk_ids", "ctx", "topk_weights")

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        rank, token, _ = self.sorted_routes(operands, group)
        return gathered(operands["x"], group)[token[rank == group_for(group).rank]]

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Return 0: rows are copied."""
        return 0.0

    def inputs_for(self, key: Any) -> Call:
        ctx, x, ids, weights = self.meta_inputs(key)
        return (x, ids, ctx, weights), {"num_sms": key.num_sms, "routing_skew": key.routing_skew}


class CombineOpInfo(EPOpInfo):
    """Operand ``y``, the experts' results: a row for each row of the dispatch's result. The result
    is the weighted sum for each of this rank's tokens, [M / W, hidden]."""

    row_operand, random_operands = "y", ("y", "topk_weights")

    def arguments(self, operands: Operands, ctx: Any) -> Call:
        """Return the arguments of a call, including the result of a new dispatch. Collective."""
        y, ids = operands["y"], operands["topk_ids"]
        x = y.new_zeros(len(ids), y.shape[1])
        return (y, ep_dispatch.fn(x, ids, ctx, operands["topk_weights"]), ctx), {}

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return a baseline: the op with the library's reduce-scatter. The baseline uses the
        routing at the time when this method is called."""
        baselines = super().baselines(operands, ctx)
        return {name: replace(each, expected=None) for name, each in baselines.items()}

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        y, tokens, ranks = operands["y"], len(operands["topk_ids"]), group_for(group)
        rank, token, weight = self.sorted_routes(operands, group)
        position = torch.arange(len(rank), device=y.device) - torch.searchsorted(rank, rank)
        products = gathered(y, group)[rank * len(y) + position].float() * weight[:, None]
        total = products.new_zeros(tokens * ranks.size, y.shape[1]).index_add_(0, token, products)
        return total[tokens * ranks.rank :][:tokens].to(y.dtype)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        return tolerance(dtype, num_ranks + 1)

    def inputs_for(self, key: Any) -> Call:
        ctx, x, _, weights = self.meta_inputs(key)
        routes, words = meta(torch.int32, key.num_ranks * key.M, key.topk), meta(torch.int32, 1)
        received = Received(
            ctx, x, None, words, words, words, weights, routes, routes, words, key.M, key.M,
            routing_skew=key.routing_skew,
        )  # fmt: skip
        return (x, received, ctx), {"num_sms": key.num_sms}


@dataclass(frozen=True)
class MultipliedTokenShape(TokenShape):
    """Tokens that are multiplied by weights [hidden, N] of each of their experts."""

    N: int


class DispatchGroupGemmOpInfo(DispatchOpInfo):
    """Operands of a dispatch, and ``B`` [experts per rank, hidden, N]. The result has a row for
    each choice of one of this rank's experts."""

    shape_type = MultipliedTokenShape
    shapes = (
        MultipliedTokenShape(8192, 4096, 2, 28672), MultipliedTokenShape(8192, 2048, 8, 1536),
    )  # fmt: skip
    positional_names = ("x", "topk_ids", "B", "ctx", "topk_weights")
    baseline_algorithm, library_algorithms = "library", ("library",)

    def smaller(self, shape: Any, divisor: int, num_ranks: int) -> MultipliedTokenShape:
        tokens = super().smaller(shape, divisor, num_ranks)
        N = max(16, shape.N // divisor // 16 * 16)
        return MultipliedTokenShape(tokens.M, tokens.hidden, tokens.topk, N)

    def allocate(
        self, shape: Any, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        operands = super().allocate(shape, dtype, num_ranks, generator)
        sizes = EXPERTS_PER_RANK, shape.hidden, shape.N
        # Products then have a standard deviation of 1.
        return {**operands, "B": uniform(sizes, dtype, generator, 3 / shape.hidden**0.5)}

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> MultipliedTokenShape:
        tokens = super().shape_of(operands, num_ranks)
        return MultipliedTokenShape(tokens.M, tokens.hidden, tokens.topk, operands["B"].shape[2])

    def output(self, result: Any) -> torch.Tensor:
        if isinstance(result, tuple):
            product, received = result
            result = product[: received.num_positions()]
        return super().output(result)

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        rows, B = super().reference(operands, group), operands["B"]
        expert = gathered(operands["topk_ids"], group).flatten().sort().values.long()
        expert = expert - group_for(group).rank * EXPERTS_PER_RANK
        expert = expert[(expert >= 0) & (expert < EXPERTS_PER_RANK)]
        product = rows.new_empty(len(rows), B.shape[2])
        for index, weights in enumerate(B):
            chosen = expert == index
            product[chosen] = (rows[chosen].float() @ weights.float()).to(rows.dtype)
        return product

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        return tolerance(dtype)

    def cost(self, shape: Any, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the cost if tokens choose all experts with equal probability."""
        dispatch_cost = super().cost(shape, dtype, num_ranks)
        routes = shape.M * shape.topk / num_ranks
        weights = EXPERTS_PER_RANK * shape.hidden * shape.N
        return replace(
            dispatch_cost, flops=int(2 * routes * shape.hidden * shape.N),
            read_bytes=dispatch_cost.memory_bytes + weights * dtype.itemsize,
            written_bytes=dispatch_cost.written_bytes + routes * shape.N * dtype.itemsize,
        )  # fmt: skip

    def inputs_for(self, key: Any) -> Call:
        names = "M", "topk", "dtype", "num_experts", "num_ranks", "has_weights"
        sizes = {name: getattr(key, name) for name in names}
        ctx, x, ids, weights = self.meta_inputs(SimpleNamespace(hidden=key.K, **sizes))
        ctx.local_experts = key.num_experts // key.num_ranks
        B = meta(key.dtype, ctx.local_experts, key.K, key.N)
        if key.layout == "column-major":
            B = meta(key.dtype, ctx.local_experts, key.N, key.K).mT
        options = {"activation": key.activation, "routing_skew": key.routing_skew}
        return (x, ids, B, ctx, weights), options


EP_DISPATCH = DispatchOpInfo(ep_dispatch)
EP_COMBINE = CombineOpInfo(ep_combine)
EP_DISPATCH_GROUP_GEMM = DispatchGroupGemmOpInfo(ep_dispatch_group_gemm)
