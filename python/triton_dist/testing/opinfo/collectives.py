"""OpInfos of the collectives: all-reduce, reduce-scatter and all-gather."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Generator

from triton_dist.kernels.common import libraries
from triton_dist.kernels.nvidia import (
    all_gather,
    all_reduce,
    create_all_gather_ctx,
    create_allreduce_ctx,
    create_reduce_scatter_ctx,
    reduce_scatter,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.opinfo.base import (
    Baseline,
    Call,
    Cost,
    Group,
    Operands,
    OpInfo,
    meta,
    own_rows,
    symmetric_all_reduces,
    tolerance,
    uniform,
)

LIBRARY, IN_PLACE = "library", "library, in place"


@dataclass(frozen=True)
class CollectiveSize:
    """Bytes of a rank's input or, for an all-gather, of its output."""

    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes"


class CollectiveOpInfo(OpInfo[CollectiveSize]):
    """A collective of a one-dimensional ``x`` with uniform random values from -1 to 1.

    Attributes:
        scatters: the result is only this rank's shard of the sum.
    """

    shape_type, serial_name, overlaps = CollectiveSize, LIBRARY, False
    positional_names = ("x", "ctx")
    shapes = tuple(CollectiveSize(1 << exponent) for exponent in range(14, 29))
    scatters: ClassVar[bool] = False

    @abstractmethod
    def create(self, *args: Any, **options: Any) -> Any:
        """Create the op's context."""

    @abstractmethod
    def library(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the result of the group's collective (NCCL; gloo on CPU ranks), out of place."""

    def smaller(self, shape: CollectiveSize, divisor: int, num_ranks: int) -> CollectiveSize:
        return CollectiveSize(max(1, shape.nbytes // divisor))

    def context(
        self, shape: CollectiveSize, dtype: torch.dtype, group: Any = None, **options: Any
    ) -> Any:
        """Create a context with memory for at least one element per rank."""
        ranks = group_for(group)
        max_nbytes = max(shape.nbytes, ranks.size * dtype.itemsize)
        return self.create(max_nbytes, ranks.rank, ranks.size, ranks.size, group=group, **options)

    def elements(self, shape: CollectiveSize, dtype: torch.dtype, num_ranks: int) -> int:
        """Return the number of elements of x: a positive multiple of the number of ranks."""
        return max(1, shape.nbytes // dtype.itemsize // num_ranks) * num_ranks

    def allocate(
        self, shape: CollectiveSize, dtype: torch.dtype, num_ranks: int, generator: Generator | None
    ) -> Operands:
        elements = self.elements(shape, dtype, num_ranks)
        return {"x": torch.empty(elements, dtype=dtype, device=current_device().torch_device)}

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> CollectiveSize:
        return CollectiveSize(operands["x"].nbytes)

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        x = operands["x"]
        x.copy_(uniform(x.shape, x.dtype, generator))

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        """Return the sum, or this rank's shard of the sum, added in fp32 and rounded once."""
        x = operands["x"]
        total = x.float()
        dist.all_reduce(total, group=group)
        if self.scatters:
            total = own_rows(total, group)
        return total.to(x.dtype)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        return tolerance(dtype, num_ranks)

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return a baseline: the library's collective, out of place."""
        x, group = operands["x"], ctx.group
        return {LIBRARY: self.checked_baseline(lambda: self.library(x, group), operands, group)}

    def cost(self, shape: CollectiveSize, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the cost: a rank reads x, writes the result, and sends all shards but its own."""
        nbytes = shape.nbytes
        return Cost(
            dtype,
            flops=0,
            read_bytes=nbytes,
            written_bytes=nbytes / num_ranks if self.scatters else nbytes,
            link_bytes=nbytes * (num_ranks - 1) / num_ranks,
        )

    def inputs_for(self, key: Any) -> Call:
        """Return a call of the largest size with tuning key ``key``, a multiple of 16 bytes."""
        elements, dtype, _, num_ranks, *_ = key
        x = meta(dtype, elements * (num_ranks if self.scatters else 1))
        device = SimpleNamespace(torch_device=x.device)
        ctx = SimpleNamespace(
            num_ranks=num_ranks, buffer=SimpleNamespace(device=device), workspace_nbytes=1 << 40
        )
        return (x, ctx), {}


class AllReduceOpInfo(CollectiveOpInfo):
    """Operand ``x``; the result is the sum of x over ranks."""

    collective_name = "all-reduce"
    create = staticmethod(create_allreduce_ctx)

    def library(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        return libraries.all_reduce(x.clone(), group)

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return the library's collective and, on GPUs, torch's all-reduces in symmetric memory.
        torch's all-reduces include the copy of x into symmetric memory. ``library, in place`` adds
        zeros, and its result is not checked."""
        x, group = operands["x"], ctx.group
        zeros = torch.zeros_like(x)
        symmetric = symmetric_all_reduces(x, lambda staged: staged.copy_(x), group)
        return {
            **super().baselines(operands, ctx),
            **{
                name: self.checked_baseline(call, operands, group)
                for name, call in symmetric.items()
            },
            IN_PLACE: Baseline("baseline", lambda: libraries.all_reduce(zeros, group)),
        }

    def cost(self, shape: CollectiveSize, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the cost: a rank sends shards to the ranks that sum them, then its sum to all."""
        cost = super().cost(shape, dtype, num_ranks)
        return dataclasses.replace(cost, link_bytes=2 * cost.link_bytes)

    def inputs_for(self, key: Any) -> Call:
        *_, method, in_place = key
        (x, ctx), _ = super().inputs_for(key)
        return (x, ctx), {"method": method, **({"output": x} if in_place else {})}


class ShardOpInfo(CollectiveOpInfo):
    """A reduce-scatter or all-gather: x must not be larger than the context allows."""


class ReduceScatterOpInfo(ShardOpInfo):
    """Operand ``x``; the result is this rank's shard of the sum of x over ranks."""

    collective_name, scatters = "reduce-scatter", True
    create = staticmethod(create_reduce_scatter_ctx)

    def library(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        return libraries.reduce_scatter(x, group)


class AllGatherOpInfo(ShardOpInfo):
    """Operand ``x``, this rank's shard; the result is the concatenation of all shards."""

    collective_name = "all-gather"
    create = staticmethod(create_all_gather_ctx)

    def elements(self, shape: CollectiveSize, dtype: torch.dtype, num_ranks: int) -> int:
        return super().elements(shape, dtype, num_ranks) // num_ranks

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> CollectiveSize:
        return CollectiveSize(operands["x"].nbytes * num_ranks)

    def library(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        return libraries.all_gather_rows(x, group)

    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        return libraries.all_gather_rows(operands["x"], group)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Return 0: elements are copied."""
        return 0.0

    def cost(self, shape: CollectiveSize, dtype: torch.dtype, num_ranks: int) -> Cost:
        nbytes, shard = shape.nbytes, shape.nbytes / num_ranks
        return Cost(
            dtype, flops=0, read_bytes=shard, written_bytes=nbytes, link_bytes=nbytes - shard
        )


ALL_REDUCE = AllReduceOpInfo(all_reduce)
REDUCE_SCATTER = ReduceScatterOpInfo(reduce_scatter)
ALL_GATHER = AllGatherOpInfo(all_gather)
