"""Base classes of the OpInfos of GEMMs across ranks: shapes, operands and error inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Generator

from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import ProductKey
from triton_dist.kernels.common.gemm.scales import BLOCK_ELEMENTS, Recipe, num_scale_blocks
from triton_dist.kernels.nvidia.gemm import matmul
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.opinfo.base import (
    Baseline,
    Call,
    Cost,
    Group,
    Operands,
    OpInfo,
    fill,
    meta,
    meta_with_layout,
    own_rows,
    tolerance,
    uniform,
)
from triton_dist.testing.opinfo.scaled import Scales, in_fp32, multiply, new_scales, scales_of


@dataclass(frozen=True)
class Shape:
    """Global sizes of a GEMM: [M, K] by [K, N]."""

    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K}"

    def smaller(self, divisor: int, num_ranks: int, returns_all_rows: bool = False) -> Shape:
        """Divide every size by ``divisor``; round M and N down to multiples of ``num_ranks``. Each
        size is at least 1. With ``returns_all_rows``, M is not rounded."""
        M, N = (max(1, size // divisor // num_ranks) * num_ranks for size in (self.M, self.N))
        if returns_all_rows:
            M = max(1, self.M // divisor)
        return Shape(M, N, max(1, self.K // divisor))


SHAPES = (
    *(Shape(M, 28672, 8192) for M in (16384, 8192, 4096)),
    Shape(8192, 53248, 16384),
    Shape(8192, 10240, 8192),
    Shape(8192, 14336, 4096),
    Shape(4096, 10240, 8192),
    *(Shape(M, 28672, 8192) for M in (2048, 1024, 512)),
)
"""Shapes limited by compute, shapes limited by compute and transfer alike, small shapes."""


class GEMMOpInfo(OpInfo[Shape]):
    """A GEMM of A and B across ranks.

    Attributes:
        sums_over_ranks: K is sharded, as in a layer's last GEMM. If false, N is sharded.
        returns_all_rows: every rank gets all rows of the result, so M need not be a multiple of the
            number of ranks.
    """

    shape_type = Shape
    shapes: Sequence[Shape] = SHAPES
    algorithm_tunables = ("num_chunks",)
    sums_over_ranks: ClassVar[bool]
    returns_all_rows: ClassVar[bool] = False

    def smaller(self, shape: Shape, divisor: int, num_ranks: int) -> Shape:
        return shape.smaller(divisor, num_ranks, self.returns_all_rows)

    def layer_shape(self, M: int, N: int, K: int) -> Shape:
        """Return the op's shape in a feed-forward layer whose first GEMM has sizes M, N and K."""
        return Shape(M, K, N) if self.sums_over_ranks else Shape(M, N, K)

    def shape_from_rank(self, rows: int, columns: int, K: int, num_ranks: int) -> Shape:
        """Return the global shape from one rank's K, and rows and columns of its result."""
        rows = rows if self.returns_all_rows else rows * num_ranks
        if self.sums_over_ranks:
            return Shape(rows, columns, K * num_ranks)
        return Shape(rows, columns * num_ranks, K)

    @abstractmethod
    def operand_sizes(
        self, shape: Shape, num_ranks: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the sizes of A and of B on a rank."""

    def allocate(
        self,
        shape: Shape,
        dtype: torch.dtype,
        num_ranks: int,
        generator: Generator | None,
        column_major: bool = True,
        has_bias: bool = False,
    ) -> Operands:
        """Return an uninitialised A, and a B with uniform random values from -1 to 1. B is
        column-major if ``column_major`` is set or B is fp8. With ``has_bias``, there is also a bias
        [N] with values from -1 to 1, which rank 0 broadcasts to all ranks of the world."""
        a_sizes, (K, N) = self.operand_sizes(shape, num_ranks)
        operand_dtype, result_dtype = self.io_dtypes(dtype)
        column_major |= self.recipe is not None
        B = uniform((N, K) if column_major else (K, N), operand_dtype, generator)
        operands = {"A": B.new_empty(a_sizes), "B": B.T if column_major else B}
        operands |= new_scales(operands["A"], operands["B"], self.recipe, generator)
        if has_bias:
            operands["bias"] = uniform((N,), result_dtype, generator)
            dist.broadcast(operands["bias"], 0)
        return operands

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        """Draw new values of A. Results have a standard deviation of 1."""
        A = operands["A"]
        fill(A, operands, A.shape[1] * (num_ranks if self.sums_over_ranks else 1), generator)

    def has_async_tp(self, A: torch.Tensor, group: Group, operator: str) -> bool:
        """Return whether torch's async tensor parallelism can multiply A."""
        # It does not support block-wise scales. cuBLAS requires that the row-wise scales of a shard
        # begin at a multiple of 16 bytes.
        fits = self.recipe is None or (self.recipe is not Recipe.BLOCK and A.shape[0] % 4 == 0)
        return fits and libraries.has_async_tp(group, operator)

    def gemms_alone(self, A: torch.Tensor, B: torch.Tensor, scales: Scales) -> dict[str, Baseline]:
        """Return torch's GEMM alone, and for fp8 on GPUs also our ``matmul`` alone. For fp8,
        torch's GEMM is not the fastest for all shapes and kinds of scales."""
        gemms = {"GEMM alone": Baseline("gemm", lambda: multiply(A, B, scales))}
        if scales and not current_device().interprets:
            gemms["our GEMM alone"] = Baseline("gemm", lambda: matmul(A, B, **scales))
        return gemms

    def arguments(self, operands: Operands, ctx: Any) -> Call:
        options = {name: value for name, value in operands.items() if name not in ("A", "B")}
        return (operands["A"], operands["B"], ctx), options

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        return tolerance(dtype, num_ranks if self.sums_over_ranks else 1)


class SummedGEMMOpInfo(GEMMOpInfo):
    """The sum over W ranks of ``A @ B``, with A [M, K / W] and B [K / W, N] on each rank."""

    sums_over_ranks = True
    key_option: ClassVar[str]
    """Name of an argument that is part of the op's tuning key."""

    def operand_sizes(
        self, shape: Shape, num_ranks: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        K = max(1, shape.K // num_ranks)
        if self.recipe is Recipe.BLOCK:  # a rank's operands are padded to whole blocks
            K = num_scale_blocks(K) * BLOCK_ELEMENTS
        return (shape.M, K), (K, shape.N)

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> Shape:
        (M, K), N = operands["A"].shape, operands["B"].shape[1]
        return Shape(M, N, K * num_ranks)

    @abstractmethod
    def create(self, *args: Any, **options: Any) -> Any:
        """Create the op's context."""

    def context(self, shape: Shape, dtype: torch.dtype, group: Any = None, **options: Any) -> Any:
        ranks = group_for(group)
        return self.create(
            shape.M, shape.N, ranks.rank, ranks.size, ranks.size, self.io_dtypes(dtype)[1],
            tp_group=group, **options,
        )  # fmt: skip

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        A, bias = operands["A"], operands.get("bias")
        total = torch.matmul(*in_fp32(A, operands["B"], scales_of(operands)))
        dist.all_reduce(total, group=group)
        if not self.returns_all_rows:
            total = own_rows(total, group)
        return (total if bias is None else total + bias.float()).to(self.io_dtypes(A.dtype)[1])

    def checked_baseline(
        self, call: Callable[[], torch.Tensor], operands: Operands, group: Group = None
    ) -> Baseline:
        """Return a baseline that adds the bias, if there is one, to the sum of ``call``."""
        bias = operands.get("bias")
        return super().checked_baseline(
            call if bias is None else lambda: call() + bias, operands, group
        )

    def cost(self, shape: Shape, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the cost. Each row is sent to the rank that sums it. If
        ``returns_all_rows``, the sum is sent to all ranks."""
        M, N, K = shape.M, shape.N, shape.K / num_ranks
        operand_dtype, result_dtype = self.io_dtypes(dtype)
        nbytes = M * N * result_dtype.itemsize
        return Cost(
            operand_dtype,
            flops=2 * M * N * K,
            read_bytes=(M * K + K * N) * operand_dtype.itemsize,
            written_bytes=nbytes / (1 if self.returns_all_rows else num_ranks),
            link_bytes=(2 if self.returns_all_rows else 1) * nbytes * (num_ranks - 1) / num_ranks,
        )

    def inputs_for(self, key: tuple[ProductKey, bool]) -> Call:
        (M, N, K, dtype, layout, contiguous, num_ranks), option = key
        # The key's M is a rounded size, which may not be a multiple of the ranks.
        M -= 0 if self.returns_all_rows else M % num_ranks
        A = meta(dtype, M, K) if contiguous else meta(dtype, M, 2 * K)[:, ::2]
        slots = SimpleNamespace(epoch=meta(dtype, 1))
        ctx = SimpleNamespace(
            N=N, max_M=M, output_dtype=dtype, num_ranks=num_ranks, checked_keys={},
            reduce_st=option,
            buffer=SimpleNamespace(slots=slots, num_ranks=num_ranks),
        )  # fmt: skip
        return (A, meta_with_layout(layout, dtype, K, N), ctx), {self.key_option: option}
