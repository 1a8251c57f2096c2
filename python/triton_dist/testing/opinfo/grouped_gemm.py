"""OpInfo of the grouped GEMM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Generator

from triton_dist.kernels.nvidia.grouped_gemm import grouped_gemm
from triton_dist.kernels.nvidia.grouped_gemm.algorithms import GroupedKey, Library
from triton_dist.testing.opinfo.base import (
    Baseline,
    Call,
    Cost,
    Group,
    Operands,
    fill,
    meta,
    meta_with_layout,
)
from triton_dist.testing.opinfo.moe import FIRST_GEMMS, GroupedShape, RoutedOpInfo, routed_product
from triton_dist.testing.opinfo.scaled import (
    grouped_mm_call,
    multiply,
    new_scales,
    scales_for_grouped_mm,
    scales_of,
    scales_of_expert,
    select_rows,
)

MODELS = {name: dataclasses.replace(shape, N=shape.N // 2) for name, shape in FIRST_GEMMS.items()}
"""First GEMMs of MoE layers (gate and up together): sizes on each of two ranks."""


class GroupedGEMMOpInfo(RoutedOpInfo):
    """Operands ``A`` [M, K], ``B`` [E, K, N] and random ``topk_ids`` [M, topk], on one GPU."""

    model_shapes, shapes = MODELS, tuple(MODELS.values())
    positional_names = ("A", "B", "topk_ids")
    collective_name, serial_name = "nothing", "grouped_mm between copies"
    overlaps, library_algorithms = False, (Library.name,)

    def smaller(self, shape: GroupedShape, divisor: int, num_ranks: int) -> GroupedShape:
        M, N, K = (max(1, size // divisor) for size in (shape.M, shape.N, shape.K))
        return GroupedShape(M, N, K, shape.E, shape.topk)

    def context(
        self, shape: GroupedShape, dtype: torch.dtype, group: Any = None, **options: Any
    ) -> Any:
        return nullcontext()  # the op has no context

    def allocate(
        self, shape: GroupedShape, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        B = self.weights(shape.E, shape.K, shape.N, dtype, generator)
        A = B.new_empty(shape.M, shape.K)
        ids = torch.empty((shape.M, shape.topk), dtype=torch.int32, device=A.device)
        return {"A": A, "B": B, "topk_ids": ids, **new_scales(A, B, self.recipe, generator)}

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> GroupedShape:
        (E, K, N), (M, topk) = operands["B"].shape, operands["topk_ids"].shape
        return GroupedShape(M, N, K, E, topk)

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        """Draw new ids and values of ``A``. Results have a standard deviation of 1."""
        A, B, ids = operands["A"], operands["B"], operands["topk_ids"]
        fill(A, operands, A.shape[1], generator)
        self.draw_ids(ids, B.shape[0], generator)

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        A, dtype = operands["A"], self.io_dtypes(operands["A"].dtype)[1]
        return routed_product(A, operands["B"], operands["topk_ids"], dtype, scales_of(operands))

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return the baselines.

        ``dense`` multiplies all rows by one expert. ``grouped_mm alone`` is torch's grouped GEMM of
        rows that this method sorts, so later changes of the ids have no effect. For fp8, there is
        also a bf16 version. Row-wise scales of 1 replace block-wise scales in torch's grouped GEMM.
        """
        A, B, ids, scales = operands["A"], operands["B"], operands["topk_ids"], scales_of(operands)
        flat = ids.flatten()
        order = flat.argsort(stable=True) // ids.shape[1]
        rows, dense_scales = select_rows(A, order), scales_of_expert(scales, order, 0)
        library_scales = scales_for_grouped_mm(A, B, scales)
        ends = torch.bincount(flat, minlength=B.shape[0]).cumsum(0).int()

        def library() -> torch.Tensor:
            C: torch.Tensor = grouped_gemm.fn(A, B, ids, algorithm=Library.name, **library_scales)
            return C

        whole = self.checked_baseline(library, operands)
        baselines = {
            "grouped_mm alone": Baseline("gemm", grouped_mm_call(A, B, ends, order, scales)),
            "dense": Baseline("gemm", lambda: multiply(rows, B[0], dense_scales)),
            self.serial_name: whole if library_scales is scales else Baseline("baseline", library),
        }
        if scales:
            in_bf16 = grouped_mm_call(A.bfloat16(), B.bfloat16(), ends, order, {})
            baselines["grouped_mm alone, bf16"] = Baseline("gemm", in_bf16)
        return baselines

    def cost(self, shape: GroupedShape, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the cost on one GPU."""
        return super().cost(shape, dtype, 1)

    def inputs_for(self, key: GroupedKey) -> Call:
        M, N, K, E, topk, dtype, layout, rows, order, activation = key
        A = meta(dtype, M if rows == "token" else M * topk, K)
        B = meta_with_layout(layout, dtype, E, K, N)
        return (A, B, meta(torch.int32, M, topk)), {"order": order, "activation": activation}

    def recover(self, ctx: Any) -> None:
        pass


GROUPED_GEMM = GroupedGEMMOpInfo(grouped_gemm)
