"""Facts that the plain collectives share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from triton_dist.kernels.common.case import Call, Case, Cost, Operands, Peer, tolerance, uniform
from triton_dist.runtime.ranks import group_for

LIBRARY = "library"


@dataclass(frozen=True)
class Size:
    """Bytes of the whole: of what a rank has before it or, of an all-gather, after it."""

    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes"


class CollectiveCase(Case[Size]):
    """A collective of ``x``, U(-1, 1), of one dimension.

    Attributes:
        scatters: a rank gets the sum's shard; else all of the result.
    """

    shape, serial, overlaps = Size, LIBRARY, False
    shapes = tuple(Size(1 << exponent) for exponent in range(14, 29))
    scatters: ClassVar[bool] = False

    @abstractmethod
    def create(self, *args: Any, **options: Any) -> Any:
        """The op's ``create_…``."""

    @abstractmethod
    def library(self, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """The same by the group's own (NCCL, gloo on CPU ranks), out of place."""

    def scaled(self, shape: Size, divisor: int, num_ranks: int) -> Size:
        return Size(max(1, shape.nbytes // divisor))

    def context(self, shape: Size, dtype: torch.dtype, group: Any = None, **options: Any) -> Any:
        """With room for one element of each rank at least."""
        ranks = group_for(group)
        room = max(shape.nbytes, ranks.size * dtype.itemsize)
        return self.create(room, ranks.rank, ranks.size, ranks.size, group=group, **options)

    def elements(self, shape: Size, dtype: torch.dtype, num_ranks: int) -> int:
        """Elements of x: a multiple of the ranks, at least one for each."""
        return max(1, shape.nbytes // dtype.itemsize // num_ranks) * num_ranks

    def operands(
        self,
        shape: Size,
        dtype: torch.dtype,
        num_ranks: int,
        generator: torch.Generator | None = None,
    ) -> Operands:
        return {"x": uniform((self.elements(shape, dtype, num_ranks),), dtype, generator)}

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> Size:
        return Size(operands["x"].nbytes)

    def refill(
        self, operands: Operands, num_ranks: int, generator: torch.Generator | None = None
    ) -> None:
        x = operands["x"]
        x.copy_(uniform(x.shape, x.dtype, generator))

    def arguments(self, operands: Operands, ctx: Any) -> Call:
        return (operands["x"], ctx), {}

    def expected(self, operands: Operands, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Own part of the sum: added in fp32, rounded once."""
        x = operands["x"]
        total = x.float()
        dist.all_reduce(total, group=group)
        if self.scatters:
            total = total.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        return total.to(x.dtype)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        return tolerance(dtype, num_ranks)

    def peers(self, operands: Operands, ctx: Any) -> dict[str, Peer]:
        """The library's, out of place."""
        x, group = operands["x"], ctx.group
        return {LIBRARY: self.whole(lambda: self.library(x, group), operands, group)}

    def whole(self, call: Any, operands: Operands, group: dist.ProcessGroup | None) -> Peer:
        """Others' code for it."""
        return Peer("peer", call, lambda: self.expected(operands, group))

    def cost(self, shape: Size, dtype: torch.dtype, num_ranks: int) -> Cost:
        """The whole is read, and written or the shard of it; what is not the own crosses links."""
        nbytes = shape.nbytes
        return Cost(
            dtype,
            flops=0,
            read_bytes=nbytes,
            written_bytes=nbytes / num_ranks if self.scatters else nbytes,
            link_bytes=nbytes * (num_ranks - 1) / num_ranks,
        )

    def bad_calls(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        x = good["x"]
        columns = x.new_ones(x.numel(), 2)
        other = torch.float16 if x.dtype is not torch.float16 else torch.bfloat16
        return {
            "x": {"x": None},
            "x (of another library)": {"x": x.cpu().numpy()},
            "x.dtype": {"x": x.int()},
            "x.device": {"x": x.to("meta")},
            "x.stride()": {"x": columns[:, 0]},
            "x.shape": {"x": x[:0]},
            "output.dtype": {"output": x.to(other)},
            "output.device": {"output": x.to("meta")},
            "output.shape": {"output": x[:3]},
            "output.stride()": {"output": columns[:, 0]},
            "output": {"output": "output"},
            "straggler_option": {"straggler_option": {}},
            "method": {"method": "one_shot"},
            "way": {"way": "ring"},
        }

    def recorded_call(self, key: Any) -> Call:
        """The largest size of the bucket, which always fits vectors."""
        elements, dtype, _, num_ranks, *_ = key
        x = torch.empty(elements * (num_ranks if self.scatters else 1), dtype=dtype, device="meta")
        device = SimpleNamespace(torch_device=x.device)
        ctx = SimpleNamespace(
            num_ranks=num_ranks, buffer=SimpleNamespace(device=device), workspace_nbytes=1 << 40
        )
        return (x, ctx), {}

    def sample_keys(self) -> Iterator[tuple[Any, ...]]:
        for exponent in range(10, 22):
            for dtype in (torch.bfloat16, torch.float32):
                yield 1 << exponent, dtype, True, 4


class ShardCase(CollectiveCase):
    """A collective that moves shards; x is no larger than its context says."""

    def bad_calls(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        x = good["x"]
        return {
            **super().bad_calls(good, num_ranks),
            "x.nbytes": {"x": x.new_ones(x.numel() + num_ranks)},
            "x.shape (no rows)": {"x": x[0]},
        }
