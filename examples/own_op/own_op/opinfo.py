"""Metadata of ``sharded_rms_norm`` for tests and benchmarks. The op does not import this module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator

from own_op.op import NormContext, sharded_rms_norm, torch_rms_norm
from triton_dist.testing.opinfo.base import Baseline, Call, Cost, Group, Operands, OpInfo, uniform


@dataclass(frozen=True)
class Shape:
    """Number of rows, and of columns over all ranks."""

    rows: int
    columns: int


class NormOpInfo(OpInfo[Shape]):
    """Operands ``x`` and ``weight`` with uniform values from -1 to 1."""

    shape_type, collective_name, serial_name, overlaps = Shape, "all-reduce", "library", False
    shapes = (Shape(16, 8192), Shape(512, 8192), Shape(4096, 8192))

    def smaller(self, shape: Shape, divisor: int, num_ranks: int) -> Shape:
        columns = max(1, shape.columns // divisor // num_ranks) * num_ranks
        return Shape(max(1, shape.rows // divisor), columns)

    def context(
        self, shape: Shape, dtype: torch.dtype, group: Group = None, **_: Any
    ) -> NormContext:
        return NormContext(shape.rows, group)

    def allocate(
        self,
        shape: Shape,
        dtype: torch.dtype,
        num_ranks: int,
        generator: Generator | None,
        **_: Any,
    ) -> Operands:
        columns = shape.columns // num_ranks
        x = uniform((shape.rows, columns), dtype, generator)
        return {"x": x, "weight": uniform((columns,), dtype, generator)}

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        x = operands["x"]
        x.copy_(uniform(x.shape, x.dtype, generator))

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> Shape:
        rows, columns = operands["x"].shape
        return Shape(rows, columns * num_ranks)

    def arguments(self, operands: Operands, ctx: NormContext) -> Call:
        return (operands["x"], operands["weight"], ctx), {}

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        return torch_rms_norm(operands["x"], operands["weight"], 1e-6, group)

    def baselines(self, operands: Operands, ctx: NormContext) -> dict[str, Baseline]:
        def library() -> torch.Tensor:
            return self.reference(operands, ctx.group)

        return {"library": Baseline("baseline", library, library)}

    def cost(self, shape: Shape, dtype: torch.dtype, num_ranks: int) -> Cost:
        nbytes = shape.rows * shape.columns / num_ranks * dtype.itemsize
        return Cost(dtype, 0, nbytes, nbytes, link_bytes=4 * shape.rows * (num_ranks - 1))


SHARDED_RMS_NORM = NormOpInfo(sharded_rms_norm)
