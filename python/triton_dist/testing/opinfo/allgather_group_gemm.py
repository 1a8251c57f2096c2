"""OpInfo of AllGather + grouped GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator

from triton_dist.kernels.common.gemm.scales import scaling_of
from triton_dist.kernels.common.moe.rows import has_library_kernel, is_library_candidate
from triton_dist.kernels.nvidia.allgather_group_gemm import (
    MoEAllGatherGroupGEMMTensorParallelContext,
    ag_group_gemm,
    create_ag_group_gemm_context,
)
from triton_dist.kernels.nvidia.allgather_group_gemm.algorithms import COLLECTIVE, Library
from triton_dist.kernels.nvidia.allgather_group_gemm.context import RoutedKey, check_operands
from triton_dist.kernels.nvidia.grouped_gemm import grouped_gemm
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.opinfo.allgather_gemm import transfer_baselines
from triton_dist.testing.opinfo.base import (
    Baseline,
    Call,
    Group,
    Operands,
    fill,
    meta,
    meta_with_layout,
)
from triton_dist.testing.opinfo.moe import FIRST_GEMMS, GroupedShape, RoutedOpInfo, routed_product
from triton_dist.testing.opinfo.scaled import gather_with_scales, new_scales, scales_of

LIBRARIES = "all-gather + torch grouped_mm"


class AllGatherGroupGEMMOpInfo(RoutedOpInfo):
    """Operands ``a`` [M / W, K], ``b`` [E, K, N / W] and ``full_topk_ids`` [M, topk], for W ranks.
    Rank 0 broadcasts the ids, so they are equal on all ranks of the world."""

    model_shapes, shapes = FIRST_GEMMS, tuple(FIRST_GEMMS.values())
    positional_names = ("a", "b", "ctx", "full_topk_ids")
    collective_name, serial_name = "all-gather", "all-gather + grouped_gemm"
    library_algorithms, algorithm_tunables = (Library.name,), ("num_groups", "gather")

    def smaller(self, shape: GroupedShape, divisor: int, num_ranks: int) -> GroupedShape:
        M, N = (max(1, size // divisor // num_ranks) * num_ranks for size in (shape.M, shape.N))
        E = min(shape.E, max(2 * shape.topk, shape.E // divisor))
        return GroupedShape(M, N, max(1, shape.K // divisor), E, shape.topk)

    def context(
        self, shape: GroupedShape, dtype: torch.dtype, group: Any = None, **options: Any
    ) -> MoEAllGatherGroupGEMMTensorParallelContext:
        ranks = group_for(group)
        return create_ag_group_gemm_context(
            shape.M, shape.N // ranks.size, shape.K, shape.E, shape.topk, self.io_dtypes(dtype)[0],
            ranks.rank, ranks.size, ranks.size, group=group, **options,
        )  # fmt: skip

    def allocate(
        self, shape: GroupedShape, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        b = self.weights(shape.E, shape.K, shape.N // num_ranks, dtype, generator)
        a = b.new_empty(shape.M // num_ranks, shape.K)
        ids = torch.empty((shape.M, shape.topk), dtype=torch.int32, device=b.device)
        return {"a": a, "b": b, "full_topk_ids": ids, **new_scales(a, b, self.recipe, generator)}

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> GroupedShape:
        (E, K, columns), (M, topk) = operands["b"].shape, operands["full_topk_ids"].shape
        return GroupedShape(M, columns * num_ranks, K, E, topk)

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        """Draw new ids and values of ``a``. Results have a standard deviation of 1."""
        a, b, ids = operands["a"], operands["b"], operands["full_topk_ids"]
        fill(a, operands, a.shape[1], generator)
        self.draw_ids(ids, len(b), generator)
        if num_ranks > 1:
            dist.broadcast(ids, 0)

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        rows, scales = operands["a"], scales_of(operands)
        dtype = self.io_dtypes(rows.dtype)[1]
        if group_for(group).size > 1:
            rows, scales = gather_with_scales(rows, scales, group)
        return routed_product(rows, operands["b"], operands["full_topk_ids"], dtype, scales)

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return the baselines. The GEMM alone uses rows that this method gathers once."""
        a, b, ids = operands["a"], operands["b"], operands["full_topk_ids"]
        group, scales = ctx.group, scales_of(operands)
        rows, all_scales = gather_with_scales(a, scales, group)
        grouped_gemm(rows, b, ids, **all_scales)  # tune now, because graph capture cannot tune

        def serial() -> torch.Tensor:
            rows, all_scales = gather_with_scales(a, scales, group)
            return grouped_gemm(rows, b, ids, **all_scales)

        baselines = {
            "GEMM alone": Baseline("gemm", lambda: grouped_gemm(rows, b, ids, **all_scales)),
            **transfer_baselines(a, ctx),
            self.serial_name: self.checked_baseline(serial, operands, group),
        }
        key = check_operands(a, b, ctx, ids, scaling_of(**scales))
        if has_library_kernel() and is_library_candidate(key):

            def library() -> torch.Tensor:
                return ag_group_gemm.fn(
                    a, b, ctx, ids, algorithm=Library.name, gather=COLLECTIVE, **scales
                )

            baselines[LIBRARIES] = self.checked_baseline(library, operands, group)
        return baselines

    def inputs_for(self, key: RoutedKey) -> Call:
        M, N, K, E, topk, dtype, layout, num_ranks = key
        M -= M % num_ranks  # the key's M, a rounded size, may not be a multiple of the ranks
        b = meta_with_layout(layout, dtype, E, K, N)
        ctx = SimpleNamespace(
            max_ntokens=M, K=K, N_per_rank=N, num_experts=E, topk=topk, dtype=dtype,
            num_ranks=num_ranks, checked_keys={},
            buffer=SimpleNamespace(num_ranks=num_ranks, workspace=meta(dtype, 1)),
        )  # fmt: skip
        return (meta(dtype, M // num_ranks, K), b, ctx, meta(torch.int32, M, topk)), {}


AG_GROUP_GEMM = AllGatherGroupGEMMOpInfo(ag_group_gemm)
