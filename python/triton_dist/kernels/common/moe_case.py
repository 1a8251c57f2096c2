"""Facts that ops of mixture-of-experts layers share."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import triton

from triton_dist.kernels.common.case import Call, Case, Cost, Operands, Peer, tolerance, uniform
from triton_dist.kernels.common.gemm_case import LAYOUTS, meta
from triton_dist.kernels.common.moe.rows import grouped_mm, has_fast_library
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.common.moe.summing import SumKey, summed_routes
from triton_dist.kernels.common.moe.topk_sum import topk_sum
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.tune import AutoTuner


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
    M: int, E: int, topk: int, device: torch.device, generator: torch.Generator | None = None
) -> torch.Tensor:
    """int32 [M, topk]: experts of each token at random, all different if there are so many."""
    scores = torch.rand((M, max(E, topk)), generator=generator, device=device)
    return (scores.topk(topk, dim=1).indices % E).int()


def zipf_ids(
    M: int, E: int, topk: int, device: torch.device, generator: torch.Generator | None = None
) -> torch.Tensor:
    """The same, where expert e is as likely as 1 / (e + 1)."""
    drawn = torch.rand((M, max(E, topk)), generator=generator, device=device)
    # The largest of log p + Gumbel noise are a draw without replacement.
    rank = torch.arange(1, drawn.shape[1] + 1, device=device)
    scores = -rank.log() - (-drawn.clamp(1e-9, 1 - 1e-7).log()).log()
    return (scores.topk(topk, dim=1).indices % E).int()


def one_expert_ids(
    M: int, E: int, topk: int, device: torch.device, generator: torch.Generator | None = None
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


class RoutedCase(Case[GroupedShape]):
    """A case whose operands have ids, drawn as ``routing`` says."""

    shape = GroupedShape
    models: ClassVar[Mapping[str, GroupedShape]]
    """Layers of models, by name."""
    routing = "even"
    """One of ``ROUTINGS``."""

    def draw(self, ids: torch.Tensor, E: int, generator: torch.Generator | None) -> None:
        """Fill ids [M, topk]."""
        M, topk = ids.shape
        ids.copy_(ROUTINGS[self.routing](M, E, topk, ids.device, generator))


class SummedRoutesCase(RoutedCase):
    """Operands ``x`` [M * topk, K / W], ``weights`` [E, K / W, N], ``chosen_experts`` and
    ``expert_weight`` [M, topk], these two the same on all ranks of the world: they are
    broadcast."""

    models, shapes = SECOND_PRODUCTS, tuple(SECOND_PRODUCTS.values())
    shares_rows: ClassVar[bool]
    """Ranks have as many rows of the sum each, so M is a multiple of them."""

    def __init__(self, op: AutoTuner, grouped_gemm: AutoTuner) -> None:
        super().__init__(op)
        self._grouped_gemm = grouped_gemm

    @abstractmethod
    def create(self, *args: Any, **options: Any) -> Any:
        """The op's ``create_…``."""

    @abstractmethod
    def own_rows(self, total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Rows of the sum [M, N] that this rank gets."""

    @abstractmethod
    def reduce(self, total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """The sum of ``total`` over ranks by the group's collective."""

    def scaled(self, shape: GroupedShape, divisor: int, num_ranks: int) -> GroupedShape:
        M = max(1, shape.M // divisor // num_ranks) * num_ranks
        N, K, E = (max(1, size // divisor) for size in (shape.N, shape.K, shape.E))
        return GroupedShape(M, max(16, N), K * num_ranks, max(2, E), shape.topk)

    def context(
        self, shape: GroupedShape, dtype: torch.dtype, group: Any = None, **options: Any
    ) -> Any:
        ranks = group_for(group)
        routes = shape.M * shape.topk
        return self.create(
            ranks.rank, ranks.size, ranks.size, routes, shape.N, shape.E, shape.topk, dtype,
            tp_group=group, **options,
        )  # fmt: skip

    def operands(
        self,
        shape: GroupedShape,
        dtype: torch.dtype,
        num_ranks: int,
        generator: torch.Generator | None = None,
    ) -> Operands:
        K = max(1, shape.K // num_ranks)
        weights = uniform((shape.E, K, shape.N), dtype, generator)
        device = weights.device
        operands = {
            "x": torch.empty(shape.M * shape.topk, K, dtype=dtype, device=device),
            "weights": weights,
            "chosen_experts": torch.empty(shape.M, shape.topk, dtype=torch.int32, device=device),
            "expert_weight": torch.empty(shape.M, shape.topk, device=device),
        }
        self.refill(operands, num_ranks, generator)
        return operands

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> GroupedShape:
        (E, K, N), (M, topk) = operands["weights"].shape, operands["chosen_experts"].shape
        return GroupedShape(M, N, K * num_ranks, E, topk)

    def refill(
        self, operands: Operands, num_ranks: int, generator: torch.Generator | None = None
    ) -> None:
        """x as of a GEMM over all ranks; other experts, with other weights, whose squares add up to
        1, so that results have a standard deviation of 1."""
        x, ids, choices = (operands[name] for name in ("x", "chosen_experts", "expert_weight"))
        x.copy_(uniform(x.shape, x.dtype, generator, 3 / (x.shape[1] * num_ranks) ** 0.5))
        self.draw(ids, len(operands["weights"]), generator)
        drawn = torch.rand(choices.shape, generator=generator, device=choices.device) + 0.1
        choices.copy_(drawn / drawn.square().sum(1, keepdim=True).sqrt())
        if dist.is_initialized():
            dist.broadcast(ids, 0)
            dist.broadcast(choices, 0)

    def arguments(self, operands: Operands, ctx: Any) -> Call:
        names = ("x", "weights", "chosen_experts", "expert_weight")
        return (*(operands[name] for name in names), ctx), {}

    def expected(self, operands: Operands, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Own rows of the sum, all of it in fp32."""
        x, weights = operands["x"], operands["weights"]
        products = routed_product(x, weights, operands["chosen_experts"], torch.float32)
        choices = operands["expert_weight"]
        named = (operands["chosen_experts"] >= 0) & (operands["chosen_experts"] < len(weights))
        weighed = torch.where(named, choices, 0).float()[:, :, None]
        total = (products.view(*choices.shape, -1) * weighed).sum(1)
        if dist.is_initialized():
            dist.all_reduce(total, group=group)
        return self.own_rows(total, group).to(x.dtype)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """A product is rounded before it is weighed, and a rank's sum before it travels."""
        return tolerance(dtype, num_ranks + 1)

    def peers(self, operands: Operands, ctx: Any) -> dict[str, Peer]:
        """Our product with its sum alone, the collective alone, and both one after the other; and,
        where torch has a kernel, its product alone, of rows that are sorted already, and all of it
        with a copy of rows to that order, as ids are now."""
        x, weights, group = operands["x"], operands["weights"], ctx.group
        ids, choices = operands["chosen_experts"], operands["expert_weight"]
        M, N = len(ids), weights.shape[2]
        zeros = x.new_zeros(M, N)

        # Interpreted, it is not worth a tuning.
        tiles = grouped_tiles()[0] if current_device().interprets else None

        def product() -> torch.Tensor:
            return summed_routes(self.name, self._grouped_gemm, x, weights, ids, choices, tiles)

        peers = {
            "our product alone": Peer("gemm", product),
            f"{self.transfer} alone": Peer("transfer", lambda: self.reduce(zeros, group)),
            self.serial: Peer(
                "peer",
                lambda: self.reduce(product(), group),
                lambda: self.expected(operands, group),
            ),
        }
        if has_fast_library() and x.dtype is torch.bfloat16:
            flat = ids.flatten().long()
            order = flat.argsort(stable=True)
            rows = torch.empty_like(order).scatter_(
                0, order, torch.arange(len(flat), device=flat.device)
            )
            ends = torch.bincount(flat, minlength=len(weights)).cumsum(0).int()
            ordered = x[order]

            def vendors() -> torch.Tensor:
                products = grouped_mm(x.index_select(0, order), weights, ends)
                added = x.new_empty(M, N)
                topk_sum(
                    products, choices, ids, rows, added, len(weights), slab_rows=M, first=0, N=N
                ).run()
                return self.reduce(added, group)

            peers["grouped_mm alone"] = Peer("gemm", lambda: grouped_mm(ordered, weights, ends))
            peers[f"grouped_mm + {self.transfer}"] = Peer("peer", vendors)
        return peers

    def summed_cost(
        self, shape: GroupedShape, dtype: torch.dtype, num_ranks: int, owners: int, crossings: int
    ) -> Cost:
        """With weights of experts that a token may be expected at; ``owners``: ranks that share the
        sum's rows; ``crossings``: of the links, by rows that are not the own ones."""
        K, routes, item = shape.K / num_ranks, shape.M * shape.topk, dtype.itemsize
        rows = shape.M * shape.N * item
        return Cost(
            dtype,
            flops=2.0 * routes * shape.N * K,
            read_bytes=(routes * K + shape.used_experts * K * shape.N) * item,
            written_bytes=rows / owners,
            link_bytes=crossings * rows * (num_ranks - 1) / num_ranks,
        )

    def is_own(self, config: Mapping[str, Any]) -> bool:
        return not str(config["way"]).startswith("library")

    def way(self, config: Mapping[str, Any]) -> Any:
        return config["way"], config.get("num_chunks"), config.get("reduction")

    def bad_calls(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        """For a context with ``n_chunks_max`` of 8."""
        x, weights, ids, choices = (
            good[name] for name in ("x", "weights", "chosen_experts", "expert_weight")
        )
        (E, K, N), (M, topk) = weights.shape, ids.shape
        other = torch.bfloat16 if x.dtype is not torch.bfloat16 else torch.float16
        more = M + num_ranks
        many = {
            "x": x.new_ones(more * topk, K),
            "chosen_experts": ids.new_zeros(more, topk),
            "expert_weight": choices.new_zeros(more, topk),
        }
        return {
            "x": {"x": None},
            "weights": {"weights": weights.cpu().numpy()},
            "expert_weight": {"expert_weight": 1.0},
            "num_chunks": {"num_chunks": 0},
            "num_chunks (a text)": {"num_chunks": "2"},
            "gemm_config (no tiles)": {"gemm_config": triton.Config({})},
            "x.dtype": {"x": x.to(other)},
            "x.dtype (integers)": {"x": x.int()},
            "x.device": {
                "x": x.to("meta"), "chosen_experts": ids.to("meta"),
                "expert_weight": choices.to("meta"),
            },
            "x.shape": {"x": x.new_ones(len(x) + 1, K)},
            "x.shape (K)": {"x": x.new_ones(len(x), K + 1)},
            "x.shape (vector)": {"x": x[0]},
            "x.stride()": {"x": x.new_ones(K, len(x)).T},
            "x.requires_grad": {"x": x.clone().requires_grad_()},
            "weights.dtype": {"weights": weights.to(other)},
            "weights.device": {"weights": weights.to("meta")},
            "weights.shape (E)": {"weights": weights.new_ones(E + 1, K, N)},
            "weights.shape (N)": {"weights": weights.new_ones(E, K, N + 1)},
            "weights.shape (matrix)": {"weights": weights[0]},
            "chosen_experts.dtype": {"chosen_experts": ids.short()},
            "chosen_experts.device": {"chosen_experts": ids.to("meta")},
            "chosen_experts.shape (vector)": {"chosen_experts": ids[0]},
            "chosen_experts.shape (topk)": {"chosen_experts": ids.new_zeros(M, topk + 1)},
            "chosen_experts.stride()": {"chosen_experts": ids.new_zeros(topk, M).T},
            "expert_weight.dtype": {"expert_weight": choices.double()},
            "expert_weight.device": {"expert_weight": choices.to("meta")},
            "expert_weight.shape": {"expert_weight": choices[:1]},
            "expert_weight.stride()": {"expert_weight": choices.new_zeros(topk, M).T},
            "M (too many)": many,
            "n_chunks": {"n_chunks": 9},
            "n_chunks (none)": {"n_chunks": 0},
            "config": {"config": "128x128"},
            "way": {"way": "ring"},
            "gemm_config": {"gemm_config": None},
            "reduction": {"way": "serial", "reduction": "ring"},
        }  # fmt: skip

    def recorded_call(self, key: Any) -> Call:
        fixed = {}
        if not isinstance(key, SumKey):
            key, n_chunks, config = key
            assert config is None  # tiles of a caller's are in no record that ships
            fixed["n_chunks"] = n_chunks
        M, N, K, E, topk, dtype, layout, num_ranks, n_chunks_max = key
        M -= M % (num_ranks if self.shares_rows else 1)  # the end of a range may be odd
        if layout == "row-major":
            weights = meta(dtype, E, K, N)
        elif layout == "column-major":
            weights = meta(dtype, E, N, K).transpose(1, 2)
        else:
            weights = meta(dtype, E, K, 2 * N)[:, :, ::2]
        slots = SimpleNamespace(epoch=meta(dtype, 1))
        ctx = SimpleNamespace(
            N=N, E=E, topk=topk, dtype=dtype, max_tokens=M, max_routes=M * topk, accepted={},
            num_ranks=num_ranks, n_chunks_max=n_chunks_max, function=self.name,
            buffer=SimpleNamespace(slots=slots),
        )  # fmt: skip
        routing = meta(torch.int32, M, topk), meta(torch.float32, M, topk)
        return (meta(dtype, M * topk, K), weights, *routing, ctx), fixed

    def sample_keys(self) -> Iterator[tuple[Any, ...]]:
        for rows in (16, 64, 1024, 4096):
            for layout in LAYOUTS:
                key = SumKey(rows, 4096, 768, 128, 8, torch.bfloat16, layout, 4, 8)
                yield key
                yield key, 2, None
