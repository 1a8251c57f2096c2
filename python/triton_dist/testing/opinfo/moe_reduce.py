"""OpInfos of the ops that end an MoE layer: grouped GEMM, then a sum over experts and ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Generator

from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.moe.rows import has_library_kernel
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.common.moe.summing import SumKey, sum_routes
from triton_dist.kernels.common.moe.topk_sum import topk_sum
from triton_dist.kernels.nvidia import (
    create_moe_ar_context,
    create_moe_rs_context,
    grouped_gemm,
    run_moe_reduce_ar,
    run_moe_reduce_rs,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.opinfo.base import (
    Baseline,
    Call,
    Cost,
    Group,
    Operands,
    fill,
    meta,
    meta_with_layout,
    own_rows,
    tolerance,
)
from triton_dist.testing.opinfo.moe import SECOND_GEMMS, GroupedShape, RoutedOpInfo, routed_product
from triton_dist.testing.opinfo.scaled import grouped_mm_call, new_scales, scales_of


class MoEReduceOpInfo(RoutedOpInfo):
    """Operands ``x`` [M * topk, K / W], ``weights`` [E, K / W, N], for W ranks, and the routing.

    The routing is ``chosen_experts`` and ``expert_weight``, both [M, topk]. Rank 0 broadcasts it,
    so it is equal on all ranks of the world.
    """

    model_shapes, shapes = SECOND_GEMMS, tuple(SECOND_GEMMS.values())
    positional_names = ("x", "weights", "chosen_experts", "expert_weight", "ctx")
    library_algorithms, algorithm_tunables = ("library",), ("num_chunks", "reduction")
    scatters_rows: ClassVar[bool]
    """Each rank gets M / W rows of the sum, and W divides M. If false, each gets all rows."""

    @abstractmethod
    def create(self, *args: Any, **options: Any) -> Any:
        """Create the op's context."""

    def reduce(self, total: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the sum of ``total`` over ranks by the group's collective."""
        collective = libraries.reduce_scatter if self.scatters_rows else libraries.all_reduce
        return collective(total, group)

    def smaller(self, shape: GroupedShape, divisor: int, num_ranks: int) -> GroupedShape:
        M = max(1, shape.M // divisor // num_ranks) * num_ranks
        N, K, E = (max(1, size // divisor) for size in (shape.N, shape.K, shape.E))
        return GroupedShape(M, max(16, N), K * num_ranks, max(2, E), shape.topk)

    def context(
        self, shape: GroupedShape, dtype: torch.dtype, group: Any = None, **options: Any
    ) -> Any:
        ranks = group_for(group)
        routes = shape.M * shape.topk
        return self.create(
            ranks.rank, ranks.size, ranks.size, routes, shape.N, shape.E, shape.topk,
            self.io_dtypes(dtype)[1], tp_group=group, **options,
        )  # fmt: skip

    def allocate(
        self, shape: GroupedShape, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        K = max(1, shape.K // num_ranks)
        weights = self.weights(shape.E, K, shape.N, dtype, generator)
        x, device = weights.new_empty(shape.M * shape.topk, K), weights.device
        return {
            "x": x,
            "weights": weights,
            "chosen_experts": torch.empty(shape.M, shape.topk, dtype=torch.int32, device=device),
            "expert_weight": torch.empty(shape.M, shape.topk, device=device),
            **new_scales(x, weights, self.recipe, generator),
        }

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> GroupedShape:
        (E, K, N), (M, topk) = operands["weights"].shape, operands["chosen_experts"].shape
        return GroupedShape(M, N, K * num_ranks, E, topk)

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        """Draw new values of ``x`` and a new routing. Results have a standard deviation of 1: a
        product summed over ranks has 1, and the squares of a token's expert weights add up to 1."""
        x, ids, weight = (operands[name] for name in ("x", "chosen_experts", "expert_weight"))
        fill(x, operands, x.shape[1] * num_ranks, generator)
        self.draw_ids(ids, len(operands["weights"]), generator)
        drawn = torch.rand(weight.shape, generator=generator, device=weight.device) + 0.1
        weight.copy_(drawn / drawn.square().sum(1, keepdim=True).sqrt())
        if dist.is_initialized():
            dist.broadcast(ids, 0)
            dist.broadcast(weight, 0)

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        x, weights, ids = operands["x"], operands["weights"], operands["chosen_experts"]
        products = routed_product(x, weights, ids, torch.float32, scales_of(operands))
        expert_weight = operands["expert_weight"]
        is_valid = (ids >= 0) & (ids < len(weights))
        route_weights = torch.where(is_valid, expert_weight, 0).float()[:, :, None]
        total = (products.view(*expert_weight.shape, -1) * route_weights).sum(1)
        if dist.is_initialized():
            dist.all_reduce(total, group=group)
        if self.scatters_rows:
            total = own_rows(total, group)
        return total.to(self.io_dtypes(x.dtype)[1])

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Return the tolerance. An expert's products are rounded before they are weighted, and a
        rank's sums before they are sent."""
        return tolerance(dtype, num_ranks + 1)

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return the baselines. ``grouped_mm`` uses the ids at the time of this method's call."""
        x, weights, group = operands["x"], operands["weights"], ctx.group
        ids, expert_weight = operands["chosen_experts"], operands["expert_weight"]
        M, N = len(ids), weights.shape[2]
        zeros = x.new_zeros(M, N, dtype=self.io_dtypes(x.dtype)[1])
        scales = scales_of(operands)

        # Tuning in the interpreter would take too long.
        tiles = grouped_tiles()[0] if current_device().interprets else None

        def product() -> torch.Tensor:
            return sum_routes(
                self.name, grouped_gemm, x, weights, ids, expert_weight, tiles, **scales
            )

        baselines = {
            "our product alone": Baseline("gemm", product),
            f"{self.collective_name} alone": Baseline(
                "transfer", lambda: self.reduce(zeros, group)
            ),
            self.serial_name: self.checked_baseline(
                lambda: self.reduce(product(), group), operands, group
            ),
        }
        if has_library_kernel() and x.dtype in (torch.bfloat16, torch.float8_e4m3fn):
            flat = ids.flatten().long()
            order = flat.argsort(stable=True)
            rows = torch.empty_like(order).scatter_(
                0, order, torch.arange(len(flat), device=flat.device)
            )
            ends = torch.bincount(flat, minlength=len(weights)).cumsum(0).int()
            multiply_sorted = grouped_mm_call(x, weights, ends, order, scales)

            def library_calls() -> torch.Tensor:
                x.view(torch.bfloat16).index_select(0, order)  # the copy that sorts the rows
                products = multiply_sorted()
                added = torch.empty_like(zeros)
                topk_sum(
                    products, expert_weight, ids, rows, added, len(weights),
                    rows_per_block=M, first_column=0, N=N,
                ).run()  # fmt: skip
                return self.reduce(added, group)

            baselines["grouped_mm alone"] = Baseline("gemm", multiply_sorted)
            baselines[f"grouped_mm + {self.collective_name}"] = Baseline("baseline", library_calls)
        return baselines

    def cost(self, shape: GroupedShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the cost. Weights are read for the expected number of experts with tokens. Rows
        are sent to the rank that adds them. If all ranks get all sums, sums are sent too."""
        K, routes = shape.K / num_ranks, shape.M * shape.topk
        operand_dtype, result_dtype = self.io_dtypes(dtype)
        rows = shape.M * shape.N * result_dtype.itemsize
        return Cost(
            operand_dtype,
            flops=2.0 * routes * shape.N * K,
            read_bytes=(routes * K + shape.used_experts * K * shape.N) * operand_dtype.itemsize,
            written_bytes=rows / (num_ranks if self.scatters_rows else 1),
            link_bytes=(1 if self.scatters_rows else 2) * rows * (num_ranks - 1) / num_ranks,
        )

    def inputs_for(self, key: Any) -> Call:
        options = {}
        if not isinstance(key, SumKey):
            key, n_chunks, config = key
            assert config is None  # shipped records have no keys with tiles of the caller
            options["n_chunks"] = n_chunks
        M, N, K, E, topk, dtype, layout, num_ranks, n_chunks_max = key
        # The key's M is a rounded size, which may not be a multiple of the ranks.
        M -= M % (num_ranks if self.scatters_rows else 1)
        weights = meta_with_layout(layout, dtype, E, K, N)
        ctx = SimpleNamespace(
            N=N, E=E, topk=topk, dtype=dtype, max_tokens=M, max_routes=M * topk, checked_keys={},
            num_ranks=num_ranks, n_chunks_max=n_chunks_max, function=self.name,
            buffer=SimpleNamespace(slots=SimpleNamespace(epoch=meta(dtype, 1))),
        )  # fmt: skip
        routing = meta(torch.int32, M, topk), meta(torch.float32, M, topk)
        return (meta(dtype, M * topk, K), weights, *routing, ctx), options


class MoEReduceRSOpInfo(MoEReduceOpInfo):
    """The result is the sums of this rank's tokens, [M / W, N]."""

    collective_name, serial_name = "reduce-scatter", "our product + reduce-scatter"
    create = staticmethod(create_moe_rs_context)
    scatters_rows = True


class MoEReduceAROpInfo(MoEReduceOpInfo):
    """The result is the sums of all tokens, [M, N], on every rank. M may be any number."""

    collective_name, serial_name = "all-reduce", "our product + all-reduce"
    create = staticmethod(create_moe_ar_context)
    scatters_rows = False


MOE_REDUCE_RS = MoEReduceRSOpInfo(run_moe_reduce_rs)
MOE_REDUCE_AR = MoEReduceAROpInfo(run_moe_reduce_ar)
